"""EAGLE and DFlash heads in PyTorch, on any device, in float64 to bfloat16. They are the reference for native heads.

Attention runs once for the whole batch: the blocks of all sequences are gathered and padded, and the padding is masked.
M = total rows, B = sequences, n = most rows of a sequence, S = most visible slots, H query and Hk key/value heads,
G = H / Hk, R = sequences with a block.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.backends.torch.torch_paged import TorchBlocks, TorchPaged
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import index_rows
from slipstream.executor.executor import Batch, check_ids, check_steps
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_head import EagleHead, Rotary
from slipstream.kv.blocks import BLOCK


class _TorchHead(TorchPaged[TorchBlocks]):
    """A head with its KV cache. head: includes the target's weights that it uses, on the device and in the dtype of the
    arithmetic."""

    name = "torch"

    def __init__(self, head: EagleHead | DFlashHead):
        self.device, self.dtype = head.fc.weight.device, head.fc.weight.dtype
        inv_freq, self._scale = head.config.decoder.rope()
        self._inv_freq = inv_freq.to(self.device)
        super().__init__(TorchBlocks(head.config.decoder, self.dtype, self.device), ahead=1)

    def _slots(self, batch: Batch, extra: int = 0) -> Slots:
        """Reserve slots for the rows of a batch, and `extra` further slots of each sequence."""
        places = self._reserve(batch, extra)
        return Slots(self._blocks, [self._pool.tables[seq_id] for seq_id in batch.seq_ids], places)

    def _rotary(self, positions: Seq[int] | np.ndarray) -> Rotary:
        """cos and sin of M positions, [M, 1, D]; angles in float64, so that large positions stay accurate."""
        at = torch.as_tensor(np.asarray(positions, np.float64)).to(self.device, non_blocking=True)
        angles = torch.outer(at, self._inv_freq)  # [M, D/2]
        angles = torch.cat((angles, angles), -1).unsqueeze(1)  # [M, 1, D]
        return (angles.cos() * self._scale).to(self.dtype), (angles.sin() * self._scale).to(self.dtype)


class TorchEagle(_TorchHead):
    """Implements `EagleRuntime`."""

    def __init__(self, head: EagleHead):
        super().__init__(head)
        self.head, self.config = head, head.config
        self.ids, self.mask = head.target_ids, head.mask_taps

    @torch.inference_mode()
    def extend(self, batch: Batch, features: Tensor, from_head: bool = False) -> tuple[Tensor, Tensor]:
        check_ids(batch.tokens, self.config.decoder.vocab_size)
        with self._calls:
            attend = PackedAttention(self._slots(batch), batch)
            hidden, x = self.head(batch.tokens, self._fuse(features, from_head), self._rotary(batch.positions), attend)
        select = list(batch.select)
        return hidden[select], self.head.logits(x[select])

    @torch.inference_mode()
    def decode_steps(self, batch: Batch, features: Tensor, steps: int, sampling: StepSampling = ARGMAX) -> DecodedSteps:
        check_steps(steps)
        check_ids(batch.tokens, self.config.decoder.vocab_size)
        last = [s - 1 for s in batch.splits[1:]]
        with self._calls:
            slots = self._slots(batch, steps - 1)
            attend: PackedAttention | _Single = PackedAttention(slots, batch)
            hidden, x = self.head(batch.tokens, self._fuse(features, False), self._rotary(batch.positions), attend)
            hidden, x = hidden[last], x[last]  # [B, d]
            place = np.asarray(batch.positions)[last]  # [B]
            attend = _Single(slots, batch)
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

    def _fuse(self, features: Tensor, from_head: bool) -> Tensor:
        features = features.to(self.dtype)
        return features if from_head else self.head.fuse(list(features.split(self.config.target_hidden, -1)))


class TorchDFlash(_TorchHead):
    """Implements `DFlashRuntime`."""

    mask: Tensor | None = None

    def __init__(self, head: DFlashHead):
        super().__init__(head)
        self.head, self.config, self.width, self.after = head, head.config, head.width, head.after

    @torch.inference_mode()
    def extend(self, batch: Batch, features: Tensor) -> None:
        rotary = self._rotary(batch.positions)
        with self._calls:
            places = torch.tensor([at for slots in self._reserve(batch) for at in slots], device=self.device)  # [M]
            for layer, (k, v) in enumerate(self.head.context(features.to(self.dtype), rotary)):
                self._blocks.write(layer, places, k, v)

    @torch.inference_mode()
    def run_blocks(self, batch: Batch) -> Tensor:
        check_ids(batch.tokens, len(self.head.embedding))
        rotary, kinds = self._rotary(batch.positions), self.config.attention
        rows = {True: replace(batch, trees=[None] * len(batch.seq_ids)), False: batch}  # keys: whether rows are causal
        with self._calls:
            slots = self._slots(batch)
            each = {kind: PackedAttention(slots, rows[kind[1]], kind[0]) for kind in dict.fromkeys(kinds)}
            x = self.head(batch.tokens, rotary, lambda layer, q, k, v: each[kinds[layer]](layer, q, k, v))
        return self.head.logits(x[list(batch.select)])


class Slots:
    """The slots of B sequences in the cache, and for each sequence the places that may be written."""

    def __init__(self, blocks: TorchBlocks, tables: Seq[Seq[int]], places: Seq[Seq[int]]):
        self.blocks, self.places, self.device = blocks, places, blocks.layers[0].device
        in_place = len(tables) == 1 and isinstance(index_rows(tables[0]), slice)
        self._first = tables[0][0] * BLOCK if in_place else None
        longest = max(map(len, tables))
        padded = [[*table, *[table[0]] * (longest - len(table))] for table in tables]
        self._tables = torch.tensor(padded, device=self.device)  # [B, longest]

    def read(self, layer: int, ends: Seq[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the slots before max(ends), [B, Hk, slots, D] each. They are views for a single
        sequence in consecutive blocks, else copies. Sequence b has zeros from slot ends[b] on: later slots belong to
        other tokens or sequences, and a NaN there would pass the mask, because 0 * NaN is NaN."""
        slots = max(ends)
        if self._first is not None:
            stored = self.blocks.layers[layer][:, None, :, self._first : self._first + slots]
            return stored[0], stored[1]
        needed = self._tables[:, : -(-slots // BLOCK)]  # [B, blocks]
        gathered = self.blocks.gather(layer, needed.flatten()).unflatten(2, (len(needed), -1))  # [2, Hk, B, S, D]
        gathered = gathered[:, :, :, :slots].transpose(1, 2)  # [2, B, Hk, slots, D]
        if min(ends) < slots:
            written = torch.arange(slots, device=self.device) < torch.tensor([*ends], device=self.device)[:, None]
            gathered = gathered.where(written[:, None, :, None], 0.0)
        keys, values = gathered
        return keys, values


class PackedAttention:
    """`Attend` for the packed rows of a batch. window: a row sees slots whose distance from its own slot is smaller."""

    def __init__(self, cache: Slots, batch: Batch, window: int | None = None):
        past, splits = np.asarray(batch.past), np.asarray(batch.splits)
        counts = np.diff(splits)  # [B]
        most, slots = int(counts.max()), int((past + counts).max())
        self._slots, self._ends, device = cache, (past + counts).tolist(), cache.device
        owner = np.repeat(np.arange(len(counts)), counts)  # [M] sequence of each row
        nth = np.arange(splits[-1]) - splits[owner]  # [M] index of each row among its sequence's rows
        written = [place for places, n in zip(cache.places, counts, strict=True) for place in places[:n]]
        self._written = torch.tensor(written, device=device)  # [M]
        self._pad: Tensor | None = None  # [B, n] batch row of each padded row; padding repeats the last row
        if (counts != most).any():
            self._pad = torch.as_tensor(
                splits[:-1, None] + np.minimum(np.arange(most), counts[:, None] - 1), device=device
            )
            self._place = torch.as_tensor(owner * most + nth, device=device)  # [M]
        self._shape = len(counts), most
        after = np.arange(slots) - (past[:, None] + np.arange(most))[:, :, None]  # [B, n, S] slot minus the row's
        seen = after <= 0
        for b, tree in enumerate(batch.trees):
            if tree is not None:
                seen[b, : counts[b], past[b] : past[b] + counts[b]] = tree.numpy()
        if window is not None:
            seen &= np.abs(after) < window
        self._mask = None if seen.all() else torch.as_tensor(seen[:, None], device=device)  # [B, 1, n, S]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._slots.blocks.write(layer, self._written, k, v)
        keys, values = self._slots.read(layer, self._ends)
        padded = (q if self._pad is None else q[self._pad]).view(*self._shape, *q.shape[1:])  # [B, n, H, D]
        out = _attend(padded, keys, values, self._mask)
        out = out.reshape(-1, *q.shape[1:])  # [B n, H, D]
        return out if self._pad is None else out[self._place]


class _Single:
    """`Attend` for one further row of each sequence at a time, after the rows of a batch."""

    def __init__(self, slots: Slots, batch: Batch):
        counts = np.diff(np.asarray(batch.splits))  # [B]
        ends = np.asarray(batch.past) + counts  # [B]
        later = [places[n:] for places, n in zip(slots.places, counts, strict=True)]
        self._slots, self._written, self._step = slots, torch.tensor(later, device=slots.device).T, 0  # [steps, B]
        self._slot = torch.as_tensor(ends, device=slots.device)  # [B]
        self._ends, self._ragged = (ends + 1).tolist(), bool((ends != ends[0]).any())

    def advance(self) -> None:
        self._slot, self._step = self._slot + 1, self._step + 1
        self._ends = [end + 1 for end in self._ends]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._slots.blocks.write(layer, self._written[self._step], k, v)
        keys, values = self._slots.read(layer, self._ends)
        mask = None
        if self._ragged:
            seen = torch.arange(max(self._ends), device=q.device) <= self._slot[:, None]  # [B, S]
            mask = seen[:, None, None]  # [B, 1, 1, S]
        return _attend(q[:, None], keys, values, mask)[:, 0]


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention: q [B, n, H, D], keys and values [B, Hk, S, D], mask bool [B, 1, n, S] -> [B, n, H, D]. Query heads
    that share a key/value head become rows, so that keys are read only once."""
    batch, rows, heads, dim = q.shape
    groups = heads // keys.shape[1]
    q = q.view(batch, rows, -1, groups, dim).permute(0, 2, 3, 1, 4).reshape(batch, -1, groups * rows, dim)
    if mask is not None:
        mask = mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # [B, Hk, G n, D]
    return out.view(batch, -1, groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim)
