"""Estimates of the probability that draft tokens are accepted, learned from earlier drafts. `MatchLengthStats` (for
lookups) estimates by the length of the match, `ConfidenceStats` (for chains of a model) by confidence, `DepthStats`
(for any drafter) by depth. `count_accepted` counts the draft tokens that agree with the text, whether they were
verified or not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft

FADE = 127 / 128
"""Factor on the weight of a record at each new draft token, so roughly the last 128 draft tokens count."""
RULE_WEIGHT = 4.0
"""Weight of the prior (`rule`) of a class, in draft tokens; 8 and 30 were as fast."""
LONGEST_MATCH = 16
"""Matches of this length and of greater lengths share one record."""
CONFIDENCES = 16
"""Number of classes of confidence, of equal width."""

RESTART_BELOW = 0.01  # an even less probable streak means that the text has changed


class AcceptanceByClass:
    """Probability that a draft token is accepted, by its class. The record of each class starts from its prior in
    `rule`, which counts as `RULE_WEIGHT` draft tokens. Only earlier steps are used, so the output distribution is
    unchanged."""

    rule: tuple[float, ...]

    def __init__(self) -> None:
        self.compared, self.right = [0.0] * len(self.rule), [0.0] * len(self.rule)

    def rate(self, at: int, usual: AcceptanceByClass | None = None) -> float:
        """Return the acceptance rate of class `at`; the last class also holds all higher values. usual: a record of
        many requests, whose rate replaces the prior `rule`."""
        at = min(at, len(self.rule) - 1)
        expected = self.rule[at] if usual is None else usual.rate(at)
        return (self.right[at] + RULE_WEIGHT * expected) / (self.compared[at] + RULE_WEIGHT)

    def learn(self, at: int, right: bool) -> None:
        """Record one draft token of class `at`. right: whether it was accepted."""
        at = min(at, len(self.rule) - 1)
        self.compared[at] = self.compared[at] * FADE + 1
        self.right[at] = self.right[at] * FADE + right


class MatchLengthStats(AcceptanceByClass):
    """Probability that a token which followed a match earlier in the text comes next again, by length of the match.

    On greedy texts of SmolLM2-135M-Instruct (chat, questions, summaries, translations, mathematics, code), 26 % of the
    tokens after a match of one token were right, 49 % after two, 62 % after three, 68 % after four, 80 % after eight
    and 90 % after twelve: nearly m / (m + 2) after m. After a right draft token, the match of the next draft token is
    one token longer, and counts like a match of this length in the text."""

    rule = tuple(match / (match + 2) for match in range(LONGEST_MATCH + 1))


class ConfidenceStats(AcceptanceByClass):
    """Estimates how likely a model's draft token is accepted, by its confidence: the highest probability of the
    distribution that it was drawn from. The prior of a class is the middle of its range of confidences. Measured with
    an EAGLE-3 head for SmolLM2: draft tokens of confidence 0.35 were accepted with probability 0.46 in greedy decoding
    and 0.38 at temperature 0.8; draft tokens of confidence 0.9 with probability 0.9 and 0.6."""

    rule = tuple((at + 0.5) / CONFIDENCES for at in range(CONFIDENCES))


class SpellingStats(AcceptanceByClass):
    """Estimates how likely the target writes forced text in the drafted tokens. Classes 0 and 1 are the first token and
    the further tokens of a guess (confidence 0, see `Forced`) after a draft that was not fully accepted. Classes 2 and
    3 are the same for every other guess. Class 3 + c is for confidence c. Measured for SmolLM2 under eight schemas."""

    rule = (0.55, 0.8, 0.8, 0.93, 0.93, 0.96, 0.98)

    @staticmethod
    def classes(confidence: int, after_right: bool) -> tuple[int, int]:
        """Return the classes of the first and the further tokens of a draft."""
        if confidence:
            return 3 + confidence, 3 + confidence
        return (2, 3) if after_right else (0, 1)


class DepthStats:
    """Acceptance probability of one drafter's draft tokens, learned for each depth, given that all draft tokens before
    were accepted. So drafts of one length also predict how drafts of any other length would be accepted.

    The prior of a depth is `weight` draft tokens accepted at the rate of all depths together, so a depth with few
    samples is assumed to be like the others. That common rate's prior is `weight` draft tokens accepted at rate
    `prior`.

    Text changes abruptly (prose, then a quotation), so old steps lose weight. A streak also restarts the record: a
    number of steps in a row whose first draft token was accepted (or rejected), if the estimate gives this a
    probability below `RESTART_BELOW`. The steps of the streak are kept.

    deepest  deeper draft tokens share one record.
    fade     factor on the weight of the record at each step.
    """

    def __init__(self, deepest: int, prior: float, weight: float, fade: float):
        self.prior, self.weight, self.fade = prior, weight, fade
        self.compared = [0.0] * deepest  # [i]: steps that compared draft token i + 1, all before it accepted
        self.accepted = [0.0] * deepest
        self.streak = 0  # steps in a row whose first draft token was accepted; negative: rejected

    def learn(self, accepted: int, rejected: bool) -> None:
        """Record a step whose first `accepted` draft tokens were accepted. rejected: whether the draft token after them
        was rejected; False if it was not compared."""
        if accepted or rejected:
            self.streak = max(self.streak, 0) + 1 if accepted else min(self.streak, 0) - 1
            usual = self.acceptance_by_depth(1)[0]
            if (usual if accepted else 1 - usual) ** abs(self.streak) < RESTART_BELOW:
                before = abs(self.streak) - 1
                self.compared = [float(before), *[0.0] * (len(self.compared) - 1)]
                self.accepted = [float(before) if accepted else 0.0, *[0.0] * (len(self.accepted) - 1)]
        self.compared = [count * self.fade for count in self.compared]
        self.accepted = [count * self.fade for count in self.accepted]
        last = len(self.compared) - 1
        for i in range(accepted):
            self.compared[min(i, last)] += 1
            self.accepted[min(i, last)] += 1
        if rejected:
            self.compared[min(accepted, last)] += 1

    @property
    def rate(self) -> float:
        """Acceptance probability of a draft token of unknown depth."""
        return (sum(self.accepted) + self.weight * self.prior) / (sum(self.compared) + self.weight)

    def acceptance_by_depth(self, depth: int) -> list[float]:
        """Return for each depth 1, 2, ..., `depth` the probability that all draft tokens so far are accepted."""
        rate, last, joint, probabilities = self.rate, len(self.compared) - 1, 1.0, []
        for i in range(depth):
            i = min(i, last)
            joint *= (self.accepted[i] + self.weight * rate) / (self.compared[i] + self.weight)
            probabilities.append(joint)
        return probabilities


def count_accepted(draft: Draft, b: int, run: Seq[int]) -> tuple[int, bool]:
    """Compare the draft of sequence b with the emitted tokens `run` (`Verdict.run`). Returns the number of accepted
    draft tokens, and whether the next one was rejected. This also works for a draft that the step did not verify.

    A draft token is accepted if and only if the same token is emitted at its position: no lossless rule emits a token
    that it has just rejected. The second value is False if the draft has no further token, or if the text ended before
    it."""
    children, start = draft.children(b), draft.splits[b]
    node, accepted = -1, 0
    for token in run:
        below = children.get(node, [])
        node = next((i for i in below if draft.ids[start + i] == token), -1)
        if node < 0:
            return accepted, bool(below)
        accepted += 1
    return accepted, False
