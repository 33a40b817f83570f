"""Estimates of the probability that draft tokens are accepted, learned from earlier drafts: `MatchLengthStats` by
length of match, for lookup drafters, and `DepthStats` by depth, for any drafter. `accepted_prefix` counts the draft
tokens that agree with the text, whether they were verified or not."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.drafters.guard import MAX_NODES

FADE = 127 / 128  # weight that the record keeps with each new draft token: roughly the last 128 count

RESTART_BELOW = 0.01  # a streak with a lower probability than this means that the text has changed


class MatchLengthStats:
    """Acceptance probability of draft tokens, learned for each length of match: a longer match is more reliable.

    A draft token at depth d is accepted with probability a^d, where a is the share of recently compared draft tokens
    that were accepted. Verifying rejected rows is not free, so the draft ends at the last depth with a^d >= row_cost.
    If not even one draft token is worth its row, the record fades with every match that is not used, until a draft
    token is tried again. Only earlier steps are used, so the output distribution is unchanged.

    Draft tokens of one draft are accepted or rejected together more often than independent ones, so a^d is too low for
    large d: this limits wasted rows, it is not an optimum. On 129 held-out Python files, at 8 draft tokens a step of
    the n-gram drafter, it cuts the verified draft tokens from 5.7 to 2.3 a step and costs 4 % of the tokens a step.

    row_cost  cost of verifying one more row, as a share of a step; 0: no limit.
    longest   matches longer than this share one record.
    """

    def __init__(self, row_cost: float, longest: int):
        self.row_cost = row_cost
        # By length of match; draft tokens after a rejected one are not compared. The record starts with the tokens of
        # the match itself, as if each were a draft token that was accepted.
        self.compared = [float(match) for match in range(longest + 1)]
        self.accepted = [float(match) for match in range(longest + 1)]
        self.uncompared: tuple[int, Draft, int] | None = None  # (match, draft, sequence) of the last draft

    def depth(self, match: int) -> int:
        """Greatest depth at which a draft token is worth its row."""
        if not self.row_cost:
            return MAX_NODES
        match = min(match, len(self.compared) - 1)
        a = (self.accepted[match] + 3) / (self.compared[match] + 4)  # prior: 3 of 4 accepted
        depth = int(math.log(self.row_cost) / math.log(a))
        if not depth:
            self.compared[match] *= FADE
            self.accepted[match] *= FADE
        return depth

    def learn(self, match: int, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` > 0 draft tokens were accepted."""
        match = min(match, len(self.compared) - 1)
        compared = min(proposed, accepted + 1)
        keep = FADE**compared
        self.compared[match] = self.compared[match] * keep + compared
        self.accepted[match] = self.accepted[match] * keep + accepted

    def remember(self, match: int, draft: Draft, b: int) -> None:
        """Keep the draft of sequence b, found by a match of length `match`, until `compare` sees the text."""
        self.uncompared = match, draft, b

    def compare(self, run: Seq[int]) -> None:
        """Learn from the emitted tokens `run`, whether the remembered draft was verified or another drafter's was."""
        if self.uncompared is not None:
            match, draft, b = self.uncompared
            accepted, rejected = accepted_prefix(draft, b, run)
            self.learn(match, accepted + rejected, accepted)
            self.uncompared = None


class DepthStats:
    """Acceptance probability of one drafter's draft tokens, learned for each depth, given that all tokens before are
    accepted. What one draft length shows therefore counts for every other length.

    A depth with few samples is assumed to be like the others: its own counts are added to `weight` draft tokens
    accepted at the rate of all depths together. That rate in turn is added to `weight` draft tokens at the rate
    `prior`.

    Text changes abruptly (prose, then a quotation). Besides fading, the record is therefore restarted after a streak of
    accepted (or rejected) first draft tokens that the current estimate gives a probability below `restart_below`. The
    steps of that streak are kept.

    deepest  deeper draft tokens share one record.
    fade     weight that the record keeps with each step.
    """

    def __init__(self, deepest: int, prior: float, weight: float, fade: float, restart_below: float = RESTART_BELOW):
        self.prior, self.weight, self.fade, self.restart_below = prior, weight, fade, restart_below
        self.compared = [0.0] * deepest  # [i]: steps that compared draft token i + 1, all before it accepted
        self.accepted = [0.0] * deepest
        self.streak = 0  # steps in a row whose first draft token was accepted; negative: rejected

    def learn(self, accepted: int, rejected: bool) -> None:
        """Record a step whose first `accepted` draft tokens were accepted. rejected: the next one was rejected;
        otherwise it was not compared."""
        if accepted or rejected:
            self.streak = max(self.streak, 0) + 1 if accepted else min(self.streak, 0) - 1
            usual = self.acceptance_by_depth(1)[0]
            if (usual if accepted else 1 - usual) ** abs(self.streak) < self.restart_below:
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

    def inherit(self, past: DepthStats, steps: float) -> None:
        """Start from another record, weighted like at most `steps` steps."""
        share = min(1.0, steps / max(past.compared[0], 1e-9))
        self.compared = [count * share for count in past.compared]
        self.accepted = [count * share for count in past.accepted]

    @property
    def rate(self) -> float:
        """Acceptance probability of a draft token of unknown depth."""
        return (sum(self.accepted) + self.weight * self.prior) / (sum(self.compared) + self.weight)

    def acceptance_by_depth(self, depth: int) -> list[float]:
        """Probability that draft token 1, 2, ..., `depth` is accepted together with all before it."""
        rate, last, joint, probabilities = self.rate, len(self.compared) - 1, 1.0, []
        for i in range(depth):
            i = min(i, last)
            joint *= (self.accepted[i] + self.weight * rate) / (self.compared[i] + self.weight)
            probabilities.append(joint)
        return probabilities


def accepted_prefix(draft: Draft, b: int, run: Seq[int]) -> tuple[int, bool]:
    """(number of accepted draft tokens, whether the next one was rejected) for the draft of sequence b and the emitted
    tokens `run` (`Verdict.run`). The draft need not be the one that was verified.

    A draft token is accepted exactly if it is the token emitted at its place: no lossless rule emits a token that it
    has just rejected. The next one is not rejected if there is none, or if the text ends first.
    """
    children, start = draft.children(b), draft.splits[b]
    node, accepted = -1, 0
    for token in run:
        below = children.get(node, [])
        node = next((i for i in below if draft.ids[start + i] == token), -1)
        if node < 0:
            return accepted, bool(below)
        accepted += 1
    return accepted, False
