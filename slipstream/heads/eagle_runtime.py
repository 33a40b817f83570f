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

from slipstream.core.draws import GREEDY, Drawn, Draws
from slipstream.errors import ParameterError, UnsupportedModelError
from slipstream.heads.eagle import EagleConfig, EagleHead
from slipstream.heads.host import Host
from slipstream.targets.decoder.executor import Batch, check_settings
from slipstream.targets.decoder.native_weights import leads_in_int8, roundable, suits

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
    """Our own kernels where they run the target and suit the head, OpenVINO where else the target is not run by torch
    and the head is float32 on the CPU, else torch where the target is. quantize: None, or "int8" for the head's
    weights, not with torch; raises ParameterError there."""
    check_settings(quantize)
    if host.executor == "native" and native_suits(head, quantize):
        from slipstream.heads.eagle_native import NativeEagle

        return NativeEagle(head, threads, quantize, None if head.config.own_embedding else host.panels)
    if host.graphs and host.device.type == "cpu" and host.dtype == torch.float32:
        from slipstream.heads.eagle_openvino import OpenVinoEagle

        try:
            return OpenVinoEagle(head, threads, quantize=quantize)
        except UnsupportedModelError as error:
            log.warning("OpenVINO cannot run this head (%s): torch runs it instead, slower on a CPU", error)
    if quantize:
        raise ParameterError(
            "quantize='int8' was asked of a head that torch runs",
            why="torch has no kernels for it",
            fix="drop quantize, or run the target with executor='native' or 'openvino'",
        )
    from slipstream.heads.eagle_torch import TorchEagle

    return TorchEagle(head)


def native_suits(head: EagleHead, quantize: str | None) -> bool:
    """Whether our own kernels are the best for a head; in int8 as for decoders."""
    read = sum(t.numel() for t in head.state_dict().values() if t.ndim == 2 and t.is_floating_point())
    rounds = quantize is None or (leads_in_int8(read) and roundable(head.fc.weight.shape[1]))
    return suits(head.config.decoder, quantize) and rounds
