"""A drafter with a given acceptance rate: it drafts from known continuations, and makes some draft tokens wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence, request_ids
from slipstream.core.target import TargetOut


class Replayed:
    """continuations: the tokens that follow each prompt or source. Nothing is drafted for an unknown prompt.
    rate: probability that a draft token is the token of the continuation. Otherwise it is this token plus one, modulo
    `vocab_size`.

    Which draft tokens are wrong does not depend on the random numbers of verification, so every draft token is a point
    mass, and q is None.
    """

    name = "replayed"
    traits = DrafterTraits()

    def __init__(self, continuations: Mapping[tuple[int, ...], Seq[int]], vocab_size: int, rate: float):
        self.continuations, self.vocab_size, self.rate = continuations, vocab_size, rate

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.chains(
            [self._row(seq, each.depth) if each.depth > 0 else [] for seq, each in zip(seqs, budgets, strict=True)]
        )

    def _row(self, seq: Sequence, depth: int) -> list[int]:
        done = len(seq.tokens) - seq.prompt
        known = self.continuations.get(tuple(request_ids(seq)), ())[done : done + depth]
        draws = [seq.random.uniforms(DRAFT, len(seq.tokens) + place, 1)[0] for place in range(len(known))]
        return [
            token if u < self.rate else (token + 1) % self.vocab_size for token, u in zip(known, draws, strict=True)
        ]

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass
