"""MTP: the multi-token prediction layers that a checkpoint brings (2412.19437, section 2.2) draft from the target's
last hidden states, as EAGLE does.

Layer 0 reads the target's state of token i after its final norm, and token i + 1, and predicts token i + 2; layer k
reads the output of layer k - 1 and token i + 1 + k. After the last layer, drafting begins again with layer 0, which
continues from its own earlier row.

With our own decoder the native backend runs the only MTP layer of a checkpoint (`NativeMtp`); with a target that
transformers runs, transformers runs one or several layers (`MtpLayers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.core.params import check_integer
from slipstream.core.sequence import Sequence
from slipstream.core.target import HEAD_HOST, HeadHost, Target, require
from slipstream.drafters.eagle import EagleDraftConfig, EagleDrafter
from slipstream.errors import PairError, ParameterError
from slipstream.heads.mtp_layer import load_mtp_layer
from slipstream.heads.mtp_names import FAMILIES, TRANSFORMERS, explain_no_layers, has_mtp_layers

if TYPE_CHECKING:
    from slipstream.backends.native.native_heads import NativeMtp
    from slipstream.targets.huggingface.mtp_layers import MtpLayers


class MtpDrafter(EagleDrafter):
    """Drafts with MTP `layers` in place of an EAGLE head. vocab_size: width of the target's logits."""

    def __init__(self, layers: MtpLayers, vocab_size: int, config: EagleDraftConfig | None = None):
        super().__init__(layers, vocab_size, config, "mtp")
        self.layers = layers
        if layers.layers > 1 and self.config.shape == "tree":
            raise ParameterError(
                f"drafter 'mtp' cannot draft trees with {layers.layers} MTP layers",
                why="trees are supported only if one MTP layer drafts all tokens",
                fix="leave shape out",
            )

    def keep(self, seq: Sequence) -> None:
        self.layers.settle([seq.id])
        super().keep(seq)


def make(target: Target, *, draft_vocab: int | None = None, **options: Any) -> EagleDrafter:
    """Make the drafter `mtp`, as `registry` requires. options: as in `EagleDraftConfig`. draft_vocab: draft only ids
    below this number; tokenizers give small ids to frequent tokens. Only these rows of the output head are read. Raises
    ParameterError, PairError (also for a target without MTP layers) and the family of LoadError."""
    config = EagleDraftConfig(**options)
    host = require(target.capabilities.head_host, target, HEAD_HOST, "drafter 'mtp'")
    if host.module is None:
        return EagleDrafter(_load_native(host, draft_vocab), host.vocab_size, config, "mtp")
    if draft_vocab is not None:
        raise ParameterError(
            f"draft_vocab={draft_vocab} was given, but transformers runs the target",
            why="with transformers, MTP layers always draft from the complete vocabulary",
            fix="leave draft_vocab out",
        )
    family = host.module.config.get_text_config(decoder=True).model_type
    if family not in FAMILIES:
        raise explain_no_layers(family)
    if not has_mtp_layers():
        raise ParameterError(
            f"drafter 'mtp' needs transformers {TRANSFORMERS} or newer",
            why="older versions cannot load MTP layers",
            fix=f"pip install 'transformers>={TRANSFORMERS}'",
        )
    from slipstream.targets.huggingface.mtp_layers import load_mtp  # imports transformers, which takes long

    return MtpDrafter(
        load_mtp(host.module, host.runtime.checkpoint, host.device, host.context), host.vocab_size, config
    )


def _load_native(host: HeadHost, draft_vocab: int | None) -> NativeMtp:
    """Return the MTP layer of the checkpoint that our own decoder was loaded from, in the format of its weights."""
    runtime = host.runtime
    if host.family not in FAMILIES:
        raise explain_no_layers(host.family)
    if runtime.checkpoint is None or runtime.backend != "native":
        raise PairError(
            f"drafter 'mtp' does not work with a {host.family!r} model "
            + ("from memory" if runtime.checkpoint is None else f"that the {runtime.backend} backend runs"),
            why="only the native backend runs MTP layers, and it loads them from the target's checkpoint",
            fix="give the target's folder or GGUF file, or choose another drafter",
        )
    if draft_vocab is not None and check_integer("draft_vocab", draft_vocab, 1) > host.vocab_size:
        raise ParameterError(
            f"draft_vocab is {draft_vocab}, but the vocabulary has only {host.vocab_size} ids",
            fix="give a smaller draft_vocab, or leave it out",
        )
    from slipstream.backends.native.native_heads import NativeMtp  # imports Numba, which is optional

    weights = load_mtp_layer(Checkpoint.open(runtime.checkpoint))
    quantised = QUANTISED.get(runtime.quantize or "")
    layer = NativeMtp(weights.config, weights, host.packed_tables, runtime.threads, quantised, draft_vocab)
    weights.unmap()
    return layer
