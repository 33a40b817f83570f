"""A DFlash head run by PyTorch: any device, float64 to bfloat16.

M = rows in all, R = sequences, n = rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.backends.torch.torch_eagle import PackedAttention, Slots, rotary_at
from slipstream.backends.torch.torch_paged import TorchBlocks, TorchPaged
from slipstream.heads.dflash_head import DFlashHead
from slipstream.models.executor import Batch, check_ids


class TorchDFlash(TorchPaged[TorchBlocks]):
    """The head with its KV cache. Rows of the context stay; those of a block serve one draft, and are then overwritten
    by the context of the accepted tokens. As in `executor.Batch`, a smaller `past` rolls the cache back.

    head: with the target's weights borrowed, on the device and in the dtype to run in.
    """

    name = "torch"
    mask: Tensor | None = None
    """No row of its context is a mask: see `EagleRuntime.mask`."""

    def __init__(self, head: DFlashHead):
        weight = head.fc.weight
        self.head, self.config = head, head.config
        self.device, self.dtype = weight.device, weight.dtype
        inv_freq, self._scale = head.config.decoder.rope()
        self._inv_freq = inv_freq.to(self.device)
        # A row depends on no later token, but `EagleRows` keeps one token less than it could: as EAGLE's rows do.
        super().__init__(TorchBlocks(head.config.decoder, self.dtype, self.device), ahead=1)

    @torch.inference_mode()
    def extend(self, batch: Batch, features: Tensor) -> None:
        """Write the keys and values of context rows. features: the joined taps [M, taps * target_hidden]."""
        rotary = rotary_at(batch.positions, self._inv_freq, self._scale, self.dtype)
        with self._calls:
            places = torch.tensor([at for own in self._reserve(batch) for at in own], device=self.device)  # [M]
            for layer, (k, v) in enumerate(self.head.context(features.to(self.dtype), rotary)):
                self._blocks.write(layer, places, k, v)

    @torch.inference_mode()
    def run_blocks(self, batch: Batch, steps: int) -> Tensor:
        """Run the block of each sequence, n rows each, after its context -> logits of the first `steps` draft tokens
        [R, steps, V], without the Markov head. All in one product: the output head is read once."""
        check_ids(batch.tokens, len(self.head.embedding))
        rotary = rotary_at(batch.positions, self._inv_freq, self._scale, self.dtype)
        with self._calls:
            places = self._reserve(batch)
            held = Slots(self._blocks, [self._pool.tables[seq_id] for seq_id in batch.seq_ids], places)
            x = self.head(batch.tokens, rotary, PackedAttention(held, batch))
        return self.head.logits(x.unflatten(0, (len(places), -1))[:, -self.config.depth :][:, :steps])
