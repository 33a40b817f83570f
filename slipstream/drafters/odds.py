"""How likely guesses are to stand, learnt from how earlier ones fared: `Odds` by length of match, for a lookup, and
`Reach` by depth, for any drafter. `accepted_prefix` says how a draft fared, whether it was verified or not."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.drafters.guard import MAX_NODES

FADE = 127 / 128  # weight that the record of past guesses keeps with each new one: the last 128 or so count

SURPRISE = 0.01  # a streak that was less likely than this is taken for a change of the text


class Odds:
    """How likely a guess is to stand, learnt for each length of match, since a longer match is a better witness.

    A guess d deep stands with chance a^d, a being the share of guesses that stood among those judged lately; rows
    that are verified in vain are not free, so guesses are made only as deep as a^d >= row_cost. Where not even one is
    worth its row, the memory fades with every match that was let go, until a guess tries again. Only earlier rounds
    are looked at, so the law of the output is not touched.

    Guesses of one draft stand or fall together more often than that, so a^d is too low for large d: this is a brake,
    not an optimum. On 129 held-out Python files, at 8 guesses a step of the n-gram drafter, it cuts the guesses
    verified from 5.7 to 2.3 a step and costs 4 % of the tokens a step.

    longest  matches longer than this share one record.
    """

    def __init__(self, row_cost: float, longest: int):
        self.row_cost = row_cost
        # By length of match; a guess behind one that fell was not judged. The tokens of a match are its first record:
        # each might have been a guess that stood.
        self.judged = [float(match) for match in range(longest + 1)]
        self.stood = [float(match) for match in range(longest + 1)]
        self.trial: tuple[int, Draft, int] | None = None

    def depth(self, match: int) -> int:
        """Deepest guess that is worth its row."""
        if not self.row_cost:
            return MAX_NODES
        match = min(match, len(self.judged) - 1)
        a = (self.stood[match] + 3) / (self.judged[match] + 4)  # as if 3 of 4 had stood before the first
        depth = int(math.log(self.row_cost) / math.log(a))
        if not depth:
            self.judged[match] *= FADE
            self.stood[match] *= FADE
        return depth

    def learn(self, match: int, proposed: int, accepted: int) -> None:
        """Take in that the first `accepted` guesses out of `proposed` stood, proposed > 0."""
        match = min(match, len(self.judged) - 1)
        judged = min(proposed, accepted + 1)
        keep = FADE**judged
        self.judged[match] = self.judged[match] * keep + judged
        self.stood[match] = self.stood[match] * keep + accepted

    def try_out(self, match: int, draft: Draft, b: int) -> None:
        """Keep what a lookup guessed for sequence b, resting on `match`, until the text shows how it fares."""
        self.trial = match, draft, b

    def judge(self, run: Seq[int]) -> None:
        """Learn from the tokens that came, whether the guesses on trial were verified or another drafter's were."""
        if self.trial is not None:
            match, draft, b = self.trial
            stood, fell = accepted_prefix(draft, b, run)
            self.learn(match, stood + fell, stood)
            self.trial = None


class Reach:
    """How deep the drafts of one drafter stand. The chance of a guess, given that all before it stand, is kept for each
    depth, so that what one draft length shows counts for every other.

    A depth of which little is known is taken to be like the others: its share counts beside `weight` guesses that
    stood at the rate of all depths together, and that rate beside `weight` guesses at the rate `prior`.

    Texts change abruptly (prose, then a quotation), so besides fading the record is begun anew where first guesses
    fall, or stand, so many times in a row as its own estimate gives a chance of less than `surprise`; the rounds of
    that streak are kept.

    deepest  deeper guesses share one record.
    fade     weight that the record keeps with each round.
    """

    def __init__(self, deepest: int, prior: float, weight: float, fade: float, surprise: float = SURPRISE):
        self.prior, self.weight, self.fade, self.surprise = prior, weight, fade, surprise
        self.judged = [0.0] * deepest  # [i] rounds whose guess i + 1 was judged: all before it stood
        self.stood = [0.0] * deepest
        self.streak = 0  # rounds in a row whose first guess stood; negative: fell

    def learn(self, stood: int, fell: bool) -> None:
        """Take in a round whose first `stood` guesses stood, and whose next one fell, or was not judged."""
        if stood or fell:
            self.streak = max(self.streak, 0) + 1 if stood else min(self.streak, 0) - 1
            usual = self.stands(1)[0]
            if (usual if stood else 1 - usual) ** abs(self.streak) < self.surprise:
                before = abs(self.streak) - 1
                self.judged = [float(before), *[0.0] * (len(self.judged) - 1)]
                self.stood = [float(before) if stood else 0.0, *[0.0] * (len(self.stood) - 1)]
        self.judged = [count * self.fade for count in self.judged]
        self.stood = [count * self.fade for count in self.stood]
        last = len(self.judged) - 1
        for i in range(stood):
            self.judged[min(i, last)] += 1
            self.stood[min(i, last)] += 1
        if fell:
            self.judged[min(stood, last)] += 1

    def inherit(self, past: Reach, rounds: float) -> None:
        """Begin with what another record has learnt, as if it had been learnt in so many rounds at most."""
        share = min(1.0, rounds / max(past.judged[0], 1e-9))
        self.judged = [count * share for count in past.judged]
        self.stood = [count * share for count in past.stood]

    @property
    def rate(self) -> float:
        """Chance of a guess of unknown depth."""
        return (sum(self.stood) + self.weight * self.prior) / (sum(self.judged) + self.weight)

    def stands(self, depth: int) -> list[float]:
        """Chance that the guesses 1, 2, ..., `depth` stand, each with all before it."""
        rate, last, whole, chances = self.rate, len(self.judged) - 1, 1.0, []
        for i in range(depth):
            i = min(i, last)
            whole *= (self.stood[i] + self.weight * rate) / (self.judged[i] + self.weight)
            chances.append(whole)
        return chances


def accepted_prefix(draft: Draft, b: int, run: Seq[int]) -> tuple[int, bool]:
    """(guesses that stood, whether the next one fell), for what `draft` guessed for sequence b and the tokens that
    came, `Verdict.run`. It need not be the draft that was verified.

    A guess stands exactly if it is the token that came in its place: no lossless rule rejects a guess and then says it
    after all. The next one did not fall if there is none, or if the text ends first.
    """
    children, start = draft.children(b), draft.splits[b]
    node, stood = -1, 0
    for token in run:
        below = children.get(node, [])
        node = next((i for i in below if draft.ids[start + i] == token), -1)
        if node < 0:
            return stood, bool(below)
        stood += 1
    return stood, False
