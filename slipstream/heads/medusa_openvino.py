"""Medusa heads on the CPU as an OpenVINO graph: one call a round, hidden [B, d] -> logits [B, K, draft_vocab], float32.

The first residual blocks of all heads are one matrix product, and so are all lm_heads where the target's is shared;
further blocks and own lm_heads are a product each, because the runtime packs two-dimensional weights only.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.targets.decoder.openvino_graph import Node, ints
from slipstream.targets.decoder.openvino_paged import PROPERTIES
from slipstream.targets.decoder.openvino_program import core

_ONE_THREAD_BYTES = 4 << 20  # below, a second thread costs more than it saves, as for the decoder
_KEPT_ROWS = 64  # buffers are kept for batches of up to so many sequences


class OpenVinoMedusa:
    """What a `MedusaHeads` computes; the module is read once and can be dropped.

    threads  None leaves it to the runtime, except that small heads run on one.
    """

    dtype = torch.float32

    def __init__(self, heads: MedusaHeads, threads: int | None = None):
        self.config: MedusaConfig = heads.config
        self.token_map = heads.token_map
        weights = [w for w in (heads.blocks, heads.biases, heads.lm_head) if w is not None]
        if threads is None and sum(w.numel() * 4 for w in weights) < _ONE_THREAD_BYTES:
            threads = 1
        properties = dict(PROPERTIES) | ({} if threads is None else {"INFERENCE_NUM_THREADS": threads})
        self._request = core().compile_model(_graph(heads), "CPU", properties).create_infer_request()
        self._buffers: dict[int, tuple[Tensor, Tensor, ov.Tensor, ov.Tensor]] = {}
        self._bound = 0  # rows of the buffers that are bound

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, d] -> [B, K, draft_vocab], valid until the next call."""
        rows = len(hidden)
        given, logits, *views = self._buffers.get(rows) or self._made(rows)
        if rows != self._bound:
            self._request.set_input_tensor(0, views[0])
            self._request.set_output_tensor(0, views[1])
            self._bound = rows
        given.copy_(hidden)
        self._request.infer(share_outputs=True)
        return logits

    def _made(self, rows: int) -> tuple[Tensor, Tensor, ov.Tensor, ov.Tensor]:
        c = self.config
        given = np.zeros((rows, c.hidden_size), np.float32)
        logits = np.zeros((rows, c.heads, c.width), np.float32)
        views = ov.Tensor(given, shared_memory=True), ov.Tensor(logits, shared_memory=True)
        made = (torch.from_numpy(given), torch.from_numpy(logits), *views)
        self._bound = 0
        if rows <= _KEPT_ROWS:
            self._buffers[rows] = made
        return made


def _graph(heads: MedusaHeads) -> ov.Model:
    c = heads.config
    K, d = c.heads, c.hidden_size
    hidden = op.parameter([-1, d], np.float32, name="hidden")
    x = op.unsqueeze(hidden, ints([1]))  # [B, 1, d]
    for layer in range(c.layers):
        if layer == 0:
            y = op.reshape(_linear(hidden, heads.blocks[0].flatten(0, 1)), ints([-1, K, d]), False)  # [B, K, d]
        else:
            y = _each(x, list(heads.blocks[layer]), d)
        if heads.biases is not None:
            y = op.add(y, op.constant(_array(heads.biases[layer])[None]))
        x = op.add(x, op.swish(y))  # [B, K, d]
    if heads.lm_heads is None:
        flat = op.reshape(x, ints([-1, d]), False)  # [B * K, d]
        y = op.reshape(_linear(flat, heads.lm_head), ints([-1, K, c.width]), False)
    else:
        y = _each(x, list(heads.lm_heads), c.width)
    return ov.Model([op.result(y)], [hidden], "medusa")


def _each(x: Node, weights: list[Tensor], width: int) -> Node:
    """Each head's own matrix [width, d]: [B, K, d] -> [B, K, width]."""
    heads = op.split(x, ints(1), len(weights)).outputs()  # [B, 1, d] each
    d = weights[0].shape[1]
    made = [_linear(op.reshape(h, ints([-1, d]), False), w) for h, w in zip(heads, weights, strict=True)]
    return op.reshape(op.concat(made, 1), ints([-1, len(weights), width]), False)


def _linear(x: Node, weight: Tensor) -> Node:
    return op.matmul(x, op.constant(_array(weight)), False, True)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()
