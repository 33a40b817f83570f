"""`EagleRuntime`: an EAGLE head that runs over its own KV cache, behind one interface with two implementations.

A row of the head is a pair (feature of the target after token i, token i + 1) at rotary position i; its logits guess
token i + 2. *True* rows carry the target's tapped states. *Own* rows, of guesses, carry what the head itself put out
for the row before them: they serve one draft and are overwritten by the true rows of what was accepted.

Rows come packed as in `executor.Batch`, with `tokens` the token *after* each feature. As there, rolling back is
passing a smaller `past`.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from slipstream.backends.native.weights import refusal
from slipstream.core.draws import GREEDY, Drawn, Draws
from slipstream.errors import ParameterError
from slipstream.heads.eagle import EagleConfig, EagleHead
from slipstream.heads.host import Host
from slipstream.settings import QUANTISATIONS, one_of
from slipstream.targets.decoder.executor import Batch
from slipstream.targets.decoder.model import quantisation

log = logging.getLogger("slipstream")


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

    def chains(
        self,
        batch: Batch,
        features: Tensor,
        steps: int,
        draws: Draws = GREEDY,
    ) -> Drawn:
        """Run the pending true rows and draft `steps` tokens a sequence in one call, picked by `draws`: draft ids, and
        logits and laws over the draft vocabulary. KV is written for the pending rows and steps-1 own ones."""
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


def runtime_for(head: EagleHead, host: Host, threads: int | None = None, quantize: str | None = None) -> EagleRuntime:
    """The native backend where it runs the target and can run the head, else torch, where the target is. quantize:
    None, or "int8" (which is "w8a8"), "w8a16" or "w8a8" for the head's weights; raises ParameterError with torch."""
    if quantize is not None:
        one_of("quantize", quantize, QUANTISATIONS)
    if is_native(head, host, quantize):
        from slipstream.backends.native.eagle import NativeEagle

        embedding = None if head.config.own_embedding else host.embedding_record
        return NativeEagle(head, threads, quantisation(quantize, "draft"), embedding)
    if quantize:
        raise ParameterError(
            f"quantize={quantize!r} was asked of a head that torch runs",
            why="torch has no kernels for it",
            fix="drop quantize, or run the target with executor='native'",
        )
    from slipstream.heads.eagle_torch import TorchEagle

    return TorchEagle(head)


def is_native(head: EagleHead, host: Host, quantize: str | None = None) -> bool:
    """Whether the native backend runs a head."""
    if host.executor != "native":
        return False
    found = refusal(head.config.decoder, quantize)
    if found is not None:
        log.warning("the native backend cannot run this head (%s): torch runs it instead, slower", found)
    return found is None
