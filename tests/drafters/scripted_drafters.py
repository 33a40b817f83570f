"""Drafters with known acceptance. They know the target's continuation, and draft correct or wrong tokens by a script.

right           every draft token is the continuation's token
wrong_at(j)     every draft token except the j-th of each draft, counted from 0
replay(rate)    each draft token is correct with this probability, independently
"""

from collections.abc import Callable, Mapping, Sequence as Seq

import torch

from slipstream.core import dice
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, DrafterTraits, NoDrafter
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence, request_ids
from tests.core.fake_drafters import depths

Script = Callable[[Sequence, int, int], bool]
"""Function (sequence, index of the draft token in the sequence, index in the draft from 0) that returns whether the
draft token is correct."""


def right(seq: Sequence, position: int, place: int) -> bool:
    return True


def wrong_at(j: int) -> Script:
    return lambda seq, position, place: place != j


def replay(rate: float) -> Script:
    return lambda seq, position, place: bool(seq.random.uniforms(DRAFT, position, 1)[0] < rate)


class ScriptedDrafter(NoDrafter):
    """continuations: the tokens that follow each prompt or source; nothing is drafted for an unknown prompt. A wrong
    draft token is the correct token plus one, modulo `vocab_size`."""

    name = "scripted"
    traits = DrafterTraits()

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], Seq[int]],
        vocab_size: int,
        script: Script = right,
        device: torch.device | str = "cpu",
    ):
        self.continuations, self.vocab_size, self.script, self.device = continuations, vocab_size, script, device

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        rows = [self._row(seq, depth) if depth > 0 else [] for seq, depth in zip(seqs, depths(budgets), strict=True)]
        return Draft.chains(rows, device=self.device)

    def _row(self, seq: Sequence, depth: int) -> list[int]:
        end, done = len(seq.tokens), len(seq.tokens) - seq.prompt
        known = self.continuations.get(tuple(request_ids(seq)), ())[done : done + depth]
        return [
            token if self.script(seq, end + place, place) else (token + 1) % self.vocab_size
            for place, token in enumerate(known)
        ]


class Silent(NoDrafter):
    """A drafter that never proposes a draft token."""

    name, traits = "silent", DrafterTraits()


class RandomDrafter(NoDrafter):
    """Draws draft tokens uniformly from the vocabulary, with an acceptance rate of about 1 / `vocab_size`. sampled:
    report the uniform distribution as q. Otherwise each draft token is a point mass. This is also correct, because
    draft tokens are drawn independently of the random numbers of verification."""

    name = "random"
    traits = DrafterTraits()

    def __init__(self, vocab_size: int, sampled: bool = True, device: torch.device | str = "cpu"):
        self.vocab_size, self.sampled, self.device = vocab_size, sampled, device

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        rows = [
            dice.invert(
                torch.full((depth, self.vocab_size), 1 / self.vocab_size, dtype=torch.float64),
                torch.from_numpy(seq.random.uniforms(DRAFT, len(seq.tokens), depth)),
            ).tolist()
            for seq, depth in zip(seqs, depths(budgets), strict=True)
        ]
        q = None
        if self.sampled:
            shape = (sum(map(len, rows)), self.vocab_size)
            q = torch.full(shape, 1 / self.vocab_size, dtype=torch.float64, device=self.device)  # [N, V]
        return Draft.chains(rows, q, self.device)
