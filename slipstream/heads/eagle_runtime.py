"""`EagleRuntime`: the interface of an EAGLE head with its own KV cache; each backend implements it.

A row of the head is a pair (feature of the target after token i, token i + 1) at rotary position i; its logits predict
token i + 2. *True* rows carry the target's tapped states. *Own* rows, those of draft tokens, carry the head's output
for the row before them. Own rows serve one draft and are then overwritten by the true rows of the accepted tokens. Mask
rows, of a parallel head, are true rows of the mask token with learned taps; they are overwritten, too.

Rows are packed as in `executor.Batch`; `tokens` holds the token *after* each feature. As there, a smaller `past` rolls
the cache back.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.heads.eagle_head import EagleConfig, EagleHead
from slipstream.kv.kv_memory import KVMemory
from slipstream.models.executor import Batch


class EagleRuntime(Protocol):
    name: str
    config: EagleConfig
    device: torch.device
    kv_memory: KVMemory
    """The blocks of its KV cache; those of rows that depend on one token after their last."""
    ids: Tensor
    """Target id of each draft id, int64 [draft_vocab], on the device."""
    mask: Tensor | None
    """Taps of the mask rows of a parallel head, [taps * target_hidden], on the device; None for any other."""

    def extend(self, batch: Batch, features: Tensor, from_head: bool = False) -> tuple[Tensor, Tensor]:
        """Run rows of one kind, chains or trees. features: the concatenated taps [M, taps * target_hidden] or, with
        `from_head`, outputs of earlier rows [M, d]. Returns (next features [R, d], logits [R, draft_vocab]) of the rows
        in `batch.select`, valid until the next call."""
        ...

    def decode_steps(
        self,
        batch: Batch,
        features: Tensor,
        steps: int,
        sampling: StepSampling = ARGMAX,
    ) -> DecodedSteps:
        """Run the pending true rows and draft `steps` tokens per sequence in one call, picked by `sampling`. Returns
        draft ids, with logits and distributions over the draft vocabulary. KV is written for the pending rows and steps
        - 1 own rows."""
        ...

    def release(self, seq_id: int) -> None:
        """Free the KV of a sequence; unknown ids are ignored."""
        ...

    def kv(self, seq_id: int, length: int) -> Tensor:
        """Copy of the first `length` slots, [L, 2, Hk, length, D] (for tests and tools)."""
        ...


def mask_taps(head: EagleHead) -> Tensor | None:
    """See `EagleRuntime.mask`."""
    return None if head.config.mask_token is None else head.mask_hidden.detach().flatten()


def target_ids(head: EagleHead) -> Tensor:
    """Target id of each draft id, int64 [draft_vocab]."""
    if head.config.version == 1:
        return torch.arange(head.config.decoder.vocab_size)
    return head.target_ids
