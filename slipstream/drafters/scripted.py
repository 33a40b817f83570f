"""Drafters that know the answer: measuring instruments, not methods.

Each one is handed the continuation that the target would give and is right, or wrong, where the script says so. The
tests force every length of acceptance with them, and the laboratory replays a recorded continuation with a chosen
acceptance rate, so that speed can be measured on weights that are random and that no drafter could predict.

    right                        every guess is the continuation's token
    wrong                        no guess is
    wrong_at(j)                  every guess is but the j-th of each draft, counted from 0
    replay(rate)                 the token at each position is guessed right with that chance, independently

Guesses are deterministic or drawn apart from everything that verification draws, so q is None: a point mass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import check_number
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut

Script = Callable[[Sequence, int, int], bool]
"""(sequence, index of the guessed token in the sequence, place in the draft from 0) -> whether the guess is right."""


def right(seq: Sequence, position: int, place: int) -> bool:
    """Every guess is right."""
    return True


def wrong(seq: Sequence, position: int, place: int) -> bool:
    """No guess is right."""
    return False


def wrong_at(j: int) -> Script:
    """Every guess is right but the j-th of each draft, counted from 0."""
    return lambda seq, position, place: place != j


def replay(rate: float) -> Script:
    """Each position is guessed right with chance `rate` in [0, 1], drawn from the sequence's own stream: the mean
    share of guesses that stand, among those whose predecessors stood, is `rate`, whatever the draft length."""
    check_number("rate", rate, 0.0, 1.0)
    return lambda seq, position, place: bool(seq.random.uniforms(DRAFT, position, 1)[0] < rate)


class ScriptedDrafter:
    """continuations  prompt -> the tokens that follow it. Of an unknown prompt, or past the end of a continuation,
                      nothing is guessed.
    script            where to be right; a wrong guess is the right token plus one, modulo `vocab_size`.

    A continuation holds for a text that keeps to it (greedy, or recorded with the same seed and the rule "coupled").
    Where the text leaves it the guesses are merely poor, as any drafter's may be.
    """

    name = "scripted"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], Seq[int]],
        vocab_size: int,
        script: Script = right,
        device: torch.device | str = "cpu",
    ):
        self.continuations, self.vocab_size, self.script, self.device = continuations, vocab_size, script, device

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        rows = [self._row(seq, depth) if depth > 0 else [] for seq, depth in zip(seqs, budget, strict=True)]
        return Draft.chains(rows, device=self.device)

    def _row(self, seq: Sequence, depth: int) -> list[int]:
        end, done = len(seq.tokens), len(seq.tokens) - seq.prompt
        known = self.continuations.get(tuple(seq.tokens[: seq.prompt]), ())[done : done + depth]
        return [
            token if self.script(seq, end + place, place) else (token + 1) % self.vocab_size
            for place, token in enumerate(known)
        ]

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


class RandomDrafter:
    """Guesses drawn uniformly from the vocabulary: right about once in `vocab_size`, the worst drafter that still
    has a law. sampled: report that law as q; otherwise each guess is a point mass, which is just as true, because it
    is drawn apart from all that verification draws."""

    name = "random"
    taps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, sampled: bool = True, device: torch.device | str = "cpu"):
        self.vocab_size, self.sampled, self.device = vocab_size, sampled, device

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        rows = [
            (seq.random.uniforms(DRAFT, len(seq.tokens), depth) * self.vocab_size).astype(int).tolist()
            for seq, depth in zip(seqs, budget, strict=True)
        ]
        q = None
        if self.sampled:
            shape = (sum(map(len, rows)), self.vocab_size)
            q = torch.full(shape, 1 / self.vocab_size, dtype=torch.float64, device=self.device)  # [N, V]
        return Draft.chains(rows, q, self.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass
