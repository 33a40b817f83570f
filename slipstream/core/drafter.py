"""The contract of a drafter, and nothing else.

A drafter sees sequences, proposes a forest of guesses, and is shown what became of them. Whether it guesses by
a model, a lookup or a head is its own business: the step and the verification never ask.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut


@runtime_checkable
class Drafter(Protocol):
    """One that never guesses may have `silent = True`: it is not asked, and the target may run several steps on end."""

    name: str
    """Short name for tables, e.g. "model" or "ngram"."""
    taps: tuple[int, ...]
    """Target layers whose hidden states `observe` needs (see `TargetOut.hidden`)."""

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        """Guesses for each sequence, at most `budget[b]` tokens deep; 0 asks for none.

        Whether to guess, and how far, may depend on everything except the guess just drawn: dropping a sampled
        guess because its own q was low biases the output.
        """
        ...

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Learn from a step. The sequences have already advanced by `verdict`."""
        ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        ...
