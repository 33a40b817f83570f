"""`TimedStep`: what a step of the engine cost and gave, for `DraftLengths`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.sequence import Sequence
from slipstream.engine.draft_lengths import Step


class TimedStep:
    """What a step, or a call of several plain ones, took and gave: the difference of the counters before and after.

    seqs         requests that decode, at least one; lengths: their draft lengths.
    catching_up  see `Step`, as for prompt_rows.
    sharing      requests among which the time of the step is divided: these, and those whose prompts are read.
    """

    def __init__(self, seqs: Seq[Sequence], lengths: Seq[int], catching_up: bool, prompt_rows: int, sharing: int):
        self._seqs, self._lengths, self._catching_up = seqs, lengths, catching_up
        self.prompt_rows, self._sharing = prompt_rows, sharing
        self._before = [(seq.stats.proposed, seq.stats.accepted, len(seq.tokens)) for seq in seqs]
        self._seconds = dict(seqs[0].stats.seconds)

    def step(self) -> Step:
        """See `draft_lengths.Step`."""
        seqs, before = self._seqs, self._before
        spent = {name: self._sharing * (s - self._seconds[name]) for name, s in seqs[0].stats.seconds.items()}
        nodes = [seq.stats.proposed - proposed for seq, (proposed, _, _) in zip(seqs, before, strict=True)]
        accepted = [seq.stats.accepted - known for seq, (_, known, _) in zip(seqs, before, strict=True)]
        gained = max(len(seq.tokens) - length for seq, (_, _, length) in zip(seqs, before, strict=True))
        return Step(
            [seq.id for seq in seqs], self._lengths, nodes, accepted, spent["draft"],
            sum(spent.values()) - spent["draft"], 1 if any(self._lengths) else gained, self._catching_up,
            self.prompt_rows,
        )  # fmt: skip
