"""No guesses: plain decoding, the baseline of every speed-up, through the same code as everything else."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut


class NoDrafter:
    name = "none"
    silent = True
    taps: tuple[int, ...] = ()

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        return Draft.empty(len(seqs))

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def make(target: Target) -> NoDrafter:
    """See `registry`."""
    return NoDrafter()
