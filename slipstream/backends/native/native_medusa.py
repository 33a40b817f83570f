"""Medusa heads on the native backend: hidden [B, d] -> logits [B, K, draft_vocab] in one call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.native.kernels import medusa_pass
from slipstream.backends.native.kernels.compiled import compile_lock
from slipstream.backends.native.kernels.records import MATRIX, MEDUSA
from slipstream.backends.native.packed_weights import Layout, narrowest, quantised_format
from slipstream.backends.native.threads import Threads, Workspace, kernel_lock
from slipstream.errors import TargetError
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads
from slipstream.settings import WeightFormat


class NativeMedusa:
    """Computes the same as a `MedusaHeads`, whose weights are copied: the module is not needed
    afterwards. threads: as in `NativeExecutor`."""

    dtype = torch.float32

    def __init__(self, heads: MedusaHeads, threads: int | None = None, quantised: WeightFormat | None = None):
        self.config: MedusaConfig = heads.config
        self.token_map = heads.token_map
        with compile_lock():
            self._layout = Layout()
            self._heads = _record(heads, quantised, self._layout)
            self._workspace = Workspace(Threads(threads, self._layout.nbytes))
            self._padded = -(-self.config.width // 64) * 64
            self(torch.zeros(1, self.config.hidden_size))

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, d] -> [B, K, draft_vocab]"""
        c, rows = self.config, len(hidden)
        if tuple(hidden.shape) != (rows, c.hidden_size):
            raise TargetError(f"hidden states are {tuple(hidden.shape)}, the heads need [{rows}, {c.hidden_size}]")
        states = np.empty((c.heads, rows, c.hidden_size), np.float32)
        logits = np.empty((c.heads, rows, self._padded), np.float32)
        given = hidden.float().contiguous().numpy()
        with kernel_lock():
            self._workspace.run(medusa_pass.draft, self._heads, given, states, logits, rows=rows)
        return torch.from_numpy(logits)[..., : c.width].transpose(0, 1)


def _record(heads: MedusaHeads, quantised: WeightFormat | None, layout: Layout) -> np.ndarray:
    """MEDUSA [1]"""
    out = heads.lm_head if heads.lm_heads is not None else heads.lm_head[None]  # [K or 1, V, d]
    blocks, biases = heads.blocks.detach(), None if heads.biases is None else heads.biases.detach()
    form = quantised_format(quantised) if quantised else narrowest([blocks, out.detach()])
    made = np.zeros(1, MEDUSA)
    made[0]["first"] = layout.matrix(blocks[0].flatten(0, 1), form, None if biases is None else biases[0].flatten())
    later = np.zeros(len(blocks[1:].flatten(0, 1)), MATRIX)
    for i, block in enumerate(blocks[1:].flatten(0, 1)):
        later[i] = layout.matrix(block, form, None if biases is None else biases[1:].flatten(0, 1)[i])
    outs = np.zeros(len(out), MATRIX)
    for i, each in enumerate(out.detach()):
        outs[i] = layout.matrix(each, form)
    layout.held += [later, outs]
    own = made[0]
    own["later"], own["laters"], own["out"], own["outs"] = later.ctypes.data, len(later), outs.ctypes.data, len(outs)
    return made
