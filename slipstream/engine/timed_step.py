"""`TimedStep`: what a step of the engine cost and gave, for the `DraftLengths` of each drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

from slipstream.core.sequence import Sequence
from slipstream.engine.draft_lengths import DraftLengths, Others, Step


@dataclass(frozen=True)
class Group:
    """The requests of one drafter in a step.

    drafter   its `id`. members: which requests are its own, or draft nothing; all others are of other drafters.
    catching_up, read_rows  see `Step`.
    """

    lengths: DraftLengths
    drafter: int
    members: Seq[int]
    catching_up: bool
    read_rows: int


class RestingStep:
    """In place of a `TimedStep` where all drafters rest and nothing is to be learned: tokens are counted."""

    def __init__(self, seq: Sequence, lengths: Seq[DraftLengths], prompt_rows: int):
        self._seq, self._lengths, self._before = seq, lengths, len(seq.tokens)
        self.prompt_rows = prompt_rows

    def teach(self, drafting: Mapping[int, float] | None) -> None:
        for each in self._lengths:
            each.rest(len(self._seq.tokens) - self._before)


class TimedStep:
    """What a step, or a call of several plain ones, took and gave: the difference of the counters before and after.

    seqs         requests that decode, at least one; lengths: their draft lengths; groups: of each drafter.
    prompt_rows  see `Step`.
    sharing      requests among which the time of the step is divided: these, and those whose prompts are read.
    """

    def __init__(self, seqs: Seq[Sequence], lengths: Seq[int], groups: Seq[Group], prompt_rows: int, sharing: int):
        self._seqs, self._lengths, self._groups = seqs, lengths, groups
        self.prompt_rows, self._sharing = prompt_rows, sharing
        self._before = [(seq.stats.proposed, seq.stats.accepted, len(seq.tokens)) for seq in seqs]
        self._seconds = dict(seqs[0].stats.seconds)

    def teach(self, drafting: Mapping[int, float] | None) -> None:
        """Tell the lengths of each drafter, after the step. drafting: seconds of each drafter, by its id; None: there
        was one."""
        spent = {name: self._sharing * (s - self._seconds[name]) for name, s in self._seqs[0].stats.seconds.items()}
        gains = [self._gain(b) for b in range(len(self._seqs))]
        for group in self._groups:
            group.lengths.learn(self._step(group, spent, gains, drafting))

    def _step(
        self,
        group: Group,
        spent: Mapping[str, float],
        gains: Seq[tuple[int, int, int]],
        drafting: Mapping[int, float] | None,
    ) -> Step:
        own = group.members
        others = [gains[b] for b in range(len(gains)) if b not in own]
        draft = spent["draft"] if drafting is None else drafting.get(group.drafter, 0.0)
        elsewhere = 0.0 if drafting is None else sum(drafting.values()) - draft
        return Step(
            [self._seqs[b].id for b in own],
            [self._lengths[b] for b in own],
            [gains[b][0] for b in own],
            [gains[b][1] for b in own],
            draft,
            sum(spent.values()) - draft - elsewhere,
            1 if any(self._lengths) else max(tokens for _, _, tokens in gains),
            group.catching_up,
            self.prompt_rows,
            group.read_rows,
            Others(len(others), sum(1 + each[0] for each in others), sum(each[2] for each in others), elsewhere),
        )

    def _gain(self, b: int) -> tuple[int, int, int]:
        """Draft tokens of a request in this step, those of them that were accepted, and tokens that it gained."""
        (proposed, accepted, length), seq = self._before[b], self._seqs[b]
        return seq.stats.proposed - proposed, seq.stats.accepted - accepted, len(seq.tokens) - length
