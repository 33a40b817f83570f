"""An EAGLE head run by PyTorch: any device, float64 to bfloat16; the reference of the native head.

All sequences share one KV pool, a line each, so that a batch is one attention whatever its sequences hold. M rows in
all, B sequences, n the most rows of one, S the most visible slots, H query and Hk key/value heads, G = H / Hk.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.heads.eagle_head import EagleHead, Rotary
from slipstream.heads.eagle_runtime import target_ids
from slipstream.models.executor import Batch, check_steps


class TorchEagle:
    """head: with the target's weights borrowed, on the device and in the dtype to run in. See `EagleRuntime`."""

    name = "torch"

    def __init__(self, head: EagleHead):
        weight = head.fc.weight
        self.head, self.config = head, head.config
        self.device, self.dtype = weight.device, weight.dtype
        self.ids = target_ids(head).to(self.device)
        inv_freq, self._scale = head.config.decoder.rope()
        self._inv_freq = inv_freq.to(self.device)
        self._pool = _Pool(head)

    @torch.inference_mode()
    def extend(self, batch: Batch, features: Tensor, own: bool = False) -> tuple[Tensor, Tensor]:
        attend = _Attention(self._pool, batch)
        hidden, x = self.head(batch.tokens, self._fused(features, own), self._rotary(batch.positions), attend)
        select = list(batch.select)
        return hidden[select], self.head.logits(x[select])

    @torch.inference_mode()
    def decode_steps(
        self,
        batch: Batch,
        features: Tensor,
        steps: int,
        sampling: StepSampling = ARGMAX,
    ) -> DecodedSteps:
        check_steps(steps)
        attend: _Attention | _Single = _Attention(self._pool, batch, steps - 1)
        last = [s - 1 for s in batch.splits[1:]]
        hidden, x = self.head(batch.tokens, self._fused(features, False), self._rotary(batch.positions), attend)
        hidden, x = hidden[last], x[last]  # [B, d]
        place = np.asarray(batch.positions)[last]  # [B]
        attend = _Single(self._pool, batch)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for j in range(steps):
            if j:
                hidden, x = self.head(self.ids[tokens[-1]], hidden, self._rotary(place + j), attend)
                attend.advance()
            logits = self.head.logits(x)  # [B, draft_vocab]
            tokens.append(sampling.pick(logits, j))
            scores.append(logits)
        return DecodedSteps(torch.stack(tokens), torch.stack(scores))

    def release(self, seq_id: int) -> None:
        self._pool.release(seq_id)

    def kv(self, seq_id: int, length: int) -> Tensor:
        return self._pool.kv[:, :, self._pool.lines[seq_id], :, :length].clone()

    # --- parts ---------------------------------------------------------------------------------------------------

    def _fused(self, features: Tensor, own: bool) -> Tensor:
        features = features.to(self.dtype)
        return features if own else self.head.fuse(list(features.split(self.config.target_hidden, -1)))

    def _rotary(self, positions: Seq[int] | np.ndarray) -> Rotary:
        """cos and sin, [M, 1, D]; angles in float64, so that far positions stay sharp."""
        at = torch.as_tensor(np.asarray(positions, np.float64)).to(self.device, non_blocking=True)
        angles = torch.outer(at, self._inv_freq)  # [M, D/2]
        angles = torch.cat((angles, angles), -1).unsqueeze(1)  # [M, 1, D]
        return (angles.cos() * self._scale).to(self.dtype), (angles.sin() * self._scale).to(self.dtype)


class _Pool:
    """KV of every sequence, [L, 2, lines, Hk, slots, D]; grows by doubling. Always finite: a masked NaN is a NaN."""

    def __init__(self, head: EagleHead):
        c = head.config.decoder
        self.kv = head.fc.weight.new_zeros(c.layers, 2, 0, c.kv_heads, 0, c.head_dim)
        self.lines: dict[int, int] = {}
        self._free: list[int] = []

    def reserve(self, seq_ids: Seq[int], slots: int) -> list[int]:
        """Line of each sequence, with room for `slots` slots."""
        new = [s for s in seq_ids if s not in self.lines]
        lines, held = self.kv.shape[2], self.kv.shape[4]
        if len(new) > len(self._free) or slots > held:
            more = max(0, len(new) - len(self._free))
            wider = lines if not more else max(lines + more, 2 * lines)
            longer = held if slots <= held else max(slots, 2 * held)
            self.kv = F.pad(self.kv, (0, 0, 0, longer - held, 0, 0, 0, wider - lines))
            self._free += range(lines, wider)
        for s in new:
            self.lines[s] = self._free.pop()
        return [self.lines[s] for s in seq_ids]

    def release(self, seq_id: int) -> None:
        line = self.lines.pop(seq_id, None)
        if line is not None:
            self._free.append(line)

    def keys_values(self, layer: int, lines: Seq[int], slots: int) -> tuple[Tensor, Tensor]:
        """[B, Hk, S, D] each; a view where that is possible."""
        k, v = self.kv[layer, :, :, :, :slots]
        if len(lines) == 1:
            return k[lines[0] : lines[0] + 1], v[lines[0] : lines[0] + 1]
        index = torch.as_tensor(lines, device=k.device)
        return k[index], v[index]


class _Attention:
    """`Attend` for the packed rows of a batch."""

    def __init__(self, pool: _Pool, batch: Batch, extra: int = 0):
        past, splits = np.asarray(batch.past), np.asarray(batch.splits)
        counts = np.diff(splits)  # [B]
        most, slots = int(counts.max()), int((past + counts).max())
        self._pool, self._slots = pool, slots
        self._lines = pool.reserve(batch.seq_ids, slots + extra)
        device = pool.kv.device
        owner = np.repeat(np.arange(len(counts)), counts)  # [M] sequence of each row
        nth = np.arange(splits[-1]) - splits[owner]  # [M] its number there
        self._line = torch.as_tensor(np.asarray(self._lines)[owner], device=device)  # [M]
        self._slot = torch.as_tensor(past[owner] + nth, device=device)  # [M]
        self._pad: Tensor | None = None  # [B, n] row of the batch for each place, repeated where there is none
        if (counts != most).any():
            self._pad = torch.as_tensor(
                splits[:-1, None] + np.minimum(np.arange(most), counts[:, None] - 1), device=device
            )
            self._place = torch.as_tensor(owner * most + nth, device=device)  # [M]
        self._shape = len(counts), most
        seen = np.arange(slots) <= (past[:, None] + np.arange(most))[:, :, None]  # [B, n, S]
        for b, tree in enumerate(batch.trees):
            if tree is not None:
                seen[b, : counts[b], past[b] : past[b] + counts[b]] = tree.numpy()
        self._mask = None if seen.all() else torch.as_tensor(seen[:, None], device=device)  # [B, 1, n, S]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._pool.kv
        kv[layer, 0, self._line, :, self._slot] = k
        kv[layer, 1, self._line, :, self._slot] = v
        keys, values = self._pool.keys_values(layer, self._lines, self._slots)
        padded = (q if self._pad is None else q[self._pad]).view(*self._shape, *q.shape[1:])  # [B, n, H, D]
        out = _attended(padded, keys, values, self._mask)
        out = out.reshape(-1, *q.shape[1:])  # [B n, H, D]
        return out if self._pad is None else out[self._place]


class _Single:
    """`Attend` for one more row of each sequence, behind those of a batch."""

    def __init__(self, pool: _Pool, batch: Batch):
        held = np.asarray(batch.past) + np.diff(np.asarray(batch.splits))  # [B]
        self._pool, self._lines = pool, [pool.lines[s] for s in batch.seq_ids]
        self._line = torch.as_tensor(self._lines, device=pool.kv.device)
        self._slot = torch.as_tensor(held, device=pool.kv.device)  # [B]
        self._slots, self._ragged = int(held.max()) + 1, bool((held != held[0]).any())

    def advance(self) -> None:
        self._slot, self._slots = self._slot + 1, self._slots + 1

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._pool.kv
        kv[layer, 0, self._line, :, self._slot] = k
        kv[layer, 1, self._line, :, self._slot] = v
        keys, values = self._pool.keys_values(layer, self._lines, self._slots)
        mask = None
        if self._ragged:
            seen = torch.arange(self._slots, device=kv.device) <= self._slot[:, None]  # [B, S]
            mask = seen[:, None, None]  # [B, 1, 1, S]
        return _attended(q[:, None], keys, values, mask)[:, 0]


def _attended(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, n, H, D], keys and values [B, Hk, S, D], mask bool [B, 1, n, S] -> [B, n, H, D]. The query heads of a
    group are laid out as rows: one pass over the keys for all of them."""
    batch, rows, heads, dim = q.shape
    groups = heads // keys.shape[1]
    q = q.view(batch, rows, -1, groups, dim).permute(0, 2, 3, 1, 4).reshape(batch, -1, groups * rows, dim)
    if mask is not None:
        mask = mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # [B, Hk, G n, D]
    return out.view(batch, -1, groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim)
