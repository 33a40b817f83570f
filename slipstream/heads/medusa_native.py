"""Medusa heads on a CPU by our own kernels: hidden [B, d] -> logits [B, K, draft_vocab] in one call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.kernels import medusa
from slipstream.kernels.compiled import readied
from slipstream.targets.decoder.native_paged import Threads
from slipstream.targets.decoder.native_weights import matrix, narrowest


class NativeMedusa:
    """What a `MedusaHeads` computes; the module is read once and can be dropped. threads: None for as many as torch
    has; small heads run on one."""

    dtype = torch.float32

    def __init__(self, heads: MedusaHeads, threads: int | None = None):
        self.config: MedusaConfig = heads.config
        self.token_map = heads.token_map
        self._heads = _heads(heads)
        parts = self._heads.first, self._heads.later, self._heads.out
        self._threads = Threads(threads, sum(part.values.nbytes for part in parts))
        with readied():
            self(torch.zeros(1, self.config.hidden_size))

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, d] -> [B, K, draft_vocab]"""
        c, rows = self.config, len(hidden)
        states = np.empty((c.heads, rows, c.hidden_size), np.float32)
        logits = np.empty((c.heads, rows, self._heads.out.values.shape[1]), np.float32)
        threads = self._threads.of(rows)
        with Threads.turn(threads):
            medusa.guess(self._heads, hidden.float().contiguous().numpy(), states, logits, threads)
        return torch.from_numpy(logits)[..., : c.width].transpose(0, 1)


def _heads(heads: MedusaHeads) -> medusa.Heads:
    out = heads.lm_head if heads.lm_heads is not None else heads.lm_head[None]  # [K or 1, V, d]
    bits = narrowest([heads.blocks, out])
    first, later = heads.blocks[0].flatten(0, 1), heads.blocks[1:].flatten(0, 1)
    biases = [] if heads.biases is None else [heads.biases[0].flatten()]
    later_biases = [] if heads.biases is None else list(heads.biases[1:].flatten(0, 1))
    wide = matrix([first], 1, bits, biases)
    return medusa.Heads(
        first=wide,
        later=matrix(later, len(later), bits, later_biases) if len(later) else wide._replace(values=wide.values[:0]),
        out=matrix(out, len(out), bits),
    )
