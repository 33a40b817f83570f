"""`TimedStep`: what a step of the engine cost and gave, for its `DraftLengths`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.sequence import Sequence
from slipstream.engine.draft_lengths import DraftLengths, Step


class TimedStep:
    """What a step, or a call of several plain ones, took and gave: the difference of the counters before and after.

    seqs         requests that decode, at least one; lengths: their draft lengths.
    catching_up, prompt_rows, read_rows  see `Step`.
    sharing      requests among which the time of the step is divided: these, and those whose prompts are read.
    """

    def __init__(
        self,
        seqs: Seq[Sequence],
        lengths: Seq[int],
        catching_up: bool,
        prompt_rows: int,
        read_rows: int,
        sharing: int,
    ):
        self._seqs, self._lengths, self._catching_up = seqs, lengths, catching_up
        self._prompt_rows, self._read_rows, self._sharing = prompt_rows, read_rows, sharing
        self._before = [(seq.stats.proposed, seq.stats.accepted) for seq in seqs]
        self._tokens = [len(seq.tokens) for seq in seqs]
        self._seconds = dict(seqs[0].stats.seconds)

    def teach(self, chosen: DraftLengths) -> None:
        """Tell the lengths, after the step."""
        gained = max(len(seq.tokens) - before for seq, before in zip(self._seqs, self._tokens, strict=True))
        if not chosen.learning:
            chosen.rest(gained)
            return
        spent = {name: self._sharing * (s - self._seconds[name]) for name, s in self._seqs[0].stats.seconds.items()}
        chosen.learn(
            Step(
                [seq.id for seq in self._seqs],
                self._lengths,
                [seq.stats.proposed - before for seq, (before, _) in zip(self._seqs, self._before, strict=True)],
                [seq.stats.accepted - before for seq, (_, before) in zip(self._seqs, self._before, strict=True)],
                spent["draft"],
                sum(spent.values()) - spent["draft"],
                1 if any(self._lengths) else gained,
                self._catching_up,
                self._prompt_rows,
                self._read_rows,
            )
        )
