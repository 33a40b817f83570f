"""Toy targets that can do what only some decoders can: several steps in one call, and leaving early."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace

import torch
from torch import Tensor

from slipstream.core.draws import GREEDY, Drawn, Draws
from slipstream.core.sequence import Sequence
from slipstream.targets.toy import ToyTarget


class UnrolledToy(ToyTarget):
    """Decodes several steps in one call, as `Decoder.chains`, in float32 as the CPU executor does. `asked` keeps the
    numbers of steps; every `clumsy`-th pick is wrong, as where rounding turned a near tie round."""

    unrolls = True
    clumsy = 0

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.asked: set[int] = set()
        self.picks = 0

    def chains(
        self,
        seqs: Seq[Sequence],
        steps: int,
        draws: Draws = GREEDY,
        exit: int | None = None,
    ) -> Drawn:
        self.asked.add(steps)
        texts = [list(seq.tokens) for seq in seqs]
        scores = []
        for j in range(steps):
            rows = [self._row(tuple(text[-self.order :])) for text in texts]
            scores.append(torch.from_numpy(self._table[rows]).float())  # [B, V]
            for text, token in zip(texts, draws.pick(scores[-1], j).tolist(), strict=True):
                self.picks += 1
                wrong = self.clumsy and self.picks % self.clumsy == 0
                text.append((token + 1) % self.vocab_size if wrong else token)
        for seq, text in zip(seqs, texts, strict=True):
            self._check(seq)
            self._slots[seq.id] = text[:-1]
        tokens = torch.tensor([text[len(seq.tokens) :] for seq, text in zip(seqs, texts, strict=True)])
        return Drawn(tokens.T, torch.stack(scores))


class ExitToy(UnrolledToy):
    """Plays the target's early exit: its laws are those of the exit. It keeps nothing, as the real one's KV is the
    target's own."""

    chunk = 512
    config = SimpleNamespace(layers=3)

    def ahead(self, seqs: Seq[Sequence], chains: Seq[Seq[int]], exit: int) -> Tensor:
        return torch.stack([self.logits([*seq.tokens, *chain]) for seq, chain in zip(seqs, chains, strict=True)])

    def chains(self, *args: object, **kwargs: object) -> Drawn:
        made = super().chains(*args, **kwargs)  # type: ignore[arg-type]
        self._slots.clear()
        return made

    def _check(self, seq: Sequence) -> None:
        pass
