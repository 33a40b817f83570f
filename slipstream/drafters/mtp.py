"""MTP: the multi-token prediction layers that a checkpoint brings (2412.19437, section 2.2) draft from the target's
last hidden states, as EAGLE does.

Layer 0 reads the target's state of token i after its final norm, and token i + 1, and predicts token i + 2; layer k
reads the output of layer k - 1 and token i + 1 + k. Beyond the last layer, drafting begins again with the first one,
which continues from its own row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.core.sequence import Sequence
from slipstream.core.target import HEAD_HOST, Target, require
from slipstream.drafters.eagle import EagleDraftConfig, EagleDrafter
from slipstream.errors import PairError, ParameterError
from slipstream.heads.mtp_names import FAMILIES, TRANSFORMERS, explain_no_layers, has_mtp_layers

if TYPE_CHECKING:
    from slipstream.targets.huggingface.mtp_layers import MtpLayers


class MtpDrafter(EagleDrafter):
    """layers: in the place of an EAGLE head. vocab_size: width of the target's logits."""

    def __init__(self, layers: MtpLayers, vocab_size: int, config: EagleDraftConfig | None = None):
        super().__init__(layers, vocab_size, config)
        self.layers, self.name = layers, "mtp"
        if layers.layers > 1 and self.config.shape == "tree":
            raise ParameterError(
                f"drafter 'mtp' was asked for trees of {layers.layers} MTP layers",
                why="each level would be of another layer",
                fix="leave shape out",
            )

    def keep(self, seq: Sequence) -> None:
        self.layers.settle([seq.id])
        super().keep(seq)


def make(target: Target, **options: Any) -> MtpDrafter:
    """See `registry`; options as in `EagleDraftConfig`. Raises ParameterError, PairError (also for a target
    without MTP layers) and the family of LoadError."""
    config = EagleDraftConfig(**options)
    host = require(target.capabilities.head_host, target, HEAD_HOST, "drafter 'mtp'")
    family = host.family if host.module is None else host.module.config.get_text_config(decoder=True).model_type
    if family not in FAMILIES:
        raise explain_no_layers(family)
    if host.module is None:
        raise PairError(
            f"drafter 'mtp' was asked of a {family!r} model that our own decoder runs",
            why="transformers runs MTP layers, and only beside a target that it runs, too",
            fix="load the target with executor='transformers', or choose another drafter",
        )
    if not has_mtp_layers():
        raise ParameterError(
            f"drafter 'mtp' was asked of a transformers before {TRANSFORMERS}",
            why="it builds the MTP layers",
            fix=f"pip install 'transformers>={TRANSFORMERS}'",
        )
    from slipstream.targets.huggingface.mtp_layers import load_mtp  # imports transformers, which takes long

    return MtpDrafter(
        load_mtp(host.module, host.runtime.checkpoint, host.device, host.context), host.vocab_size, config
    )
