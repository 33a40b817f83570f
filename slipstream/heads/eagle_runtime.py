"""`EagleRuntime`: an EAGLE head that runs over its own KV cache, behind one interface with two implementations.

A row of the head is a pair (feature of the target after token i, token i + 1) at rotary position i; its logits guess
token i + 2. *True* rows carry the target's tapped states. *Own* rows, of guesses, carry what the head itself put out
for the row before them: they serve one draft and are overwritten by the true rows of what was accepted.

Rows come packed as in `executor.Batch`, with `tokens` the token *after* each feature. As there, rolling back is
passing a smaller `past`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.heads.eagle_head import EagleConfig, EagleHead
from slipstream.models.executor import Batch


class EagleRuntime(Protocol):
    name: str
    config: EagleConfig
    device: torch.device
    ids: Tensor
    """Target id of each draft id, int64 [draft_vocab], on the device."""

    def extend(self, batch: Batch, features: Tensor, own: bool = False) -> tuple[Tensor, Tensor]:
        """Run rows of one kind, chains or trees. features: the taps side by side [M, taps * target_hidden], or, of
        `own` rows, outputs of earlier rows [M, d]. Returns (next features [R, d], logits [R, draft_vocab]) of the
        rows in `batch.select`, valid until the next call."""
        ...

    def decode_steps(
        self,
        batch: Batch,
        features: Tensor,
        steps: int,
        sampling: StepSampling = ARGMAX,
    ) -> DecodedSteps:
        """Run the pending true rows and draft `steps` tokens a sequence in one call, picked by `sampling`: draft ids,
        with logits and distributions over the draft vocabulary. KV is written for the pending rows and steps-1 own
        ones."""
        ...

    def release(self, seq_id: int) -> None:
        """Free the KV of a sequence; unknown ids are ignored."""
        ...

    def kv(self, seq_id: int, length: int) -> Tensor:
        """Copy of the first `length` slots, [L, 2, Hk, length, D] (for tests and tools)."""
        ...


def target_ids(head: EagleHead) -> Tensor:
    """Target id of each draft id, int64 [draft_vocab]."""
    if head.config.version == 1:
        return torch.arange(head.config.decoder.vocab_size)
    return head.target_ids
