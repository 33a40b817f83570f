"""Multi-token prediction (MTP) layers in a checkpoint: which families have them, and under which names.

An MTP layer is a decoder layer after a projection of the target's last hidden state and the next token's embedding
(DeepSeek-V3, 2412.19437, section 2.2). transformers builds and loads MTP layers if a family's configuration gives their
number; this module has the missing configuration of other families. Sources: `MtpModel` of transformers 5.23; for
Qwen3-Next, ERNIE 4.5 and MiMo-V2 the loaders of vLLM 0.33. This module does not import torch.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName
from slipstream.checkpoints.families.wrappers import WRAPPERS
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError, LoadError, PairError, reading

log = logging.getLogger("slipstream")

TRANSFORMERS = "5.23"
"""The first version whose MTP layers are known to work here."""

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Possible keys of config.json for the number of MTP layers."""


@dataclass(frozen=True)
class MtpFamily:
    """index     matches one tensor of each MTP layer; its group is the layer's number.
    numbered  True if the numbers continue those of the target's layers; otherwise they start at 0.
    types     configuration list -> entry to add for each MTP layer, for lists that transformers does not fill.
    config    further configuration values with which an MTP layer is built.
    renamed   names in the checkpoint, after transformers' own renaming -> names in `MtpModel`; regular expressions.
    """

    index: str
    numbered: bool = False
    types: Mapping[str, str] = field(default_factory=dict)
    config: JsonMapping = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def count_layers(self, names: Iterable[str], layers: int) -> int:
        """Count the MTP layers among the tensor names of a target with `layers` layers."""
        numbers = {int(match[1]) for name in names if (match := re.search(self.index, name))}
        return sum(n >= layers for n in numbers) if self.numbered else len(numbers)


_NUMBERED = MtpFamily(r"^model\.layers\.(\d+)\.eh_proj\.weight$", numbered=True)
_BESIDE = r"^mtp\.layers\.(\d+)\.input_layernorm\.weight$"

FAMILIES: dict[str, MtpFamily] = {
    "deepseek_v3": _NUMBERED,
    "glm4_moe": _NUMBERED,
    "glm4_moe_lite": replace(_NUMBERED, types={"mtp_mlp_layer_types": "sparse"}),
    "mellum": MtpFamily(_BESIDE),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        MtpFamily(_BESIDE, types={"mtp_layer_types": "full_attention"}),
    ),
    "ernie4_5_moe": MtpFamily(
        r"^model\.mtp_linear_proj\.(\d+)\.weight$",
        config={"chain_hidden_post_norm": False, "moe_layer_interval": 2},  # no norm after it; layer 0 is dense
        renamed={
            r"^mtp_block\.(\d+)\.": r"layers.\1.mtp_block.",
            r"^mtp_emb_norm\.(\d+)\.": r"layers.\1.enorm.",
            r"^mtp_hidden_norm\.(\d+)\.": r"layers.\1.hnorm.",
            r"^mtp_linear_proj\.(\d+)\.": r"layers.\1.eh_proj.",
        },
    ),
    "mimo_v2_flash": MtpFamily(
        r"^model\.mtp\.layers\.(\d+)\.eh_proj\.weight$",
        types={"mtp_layer_types": "sliding_attention", "mtp_mlp_layer_types": "dense"},
        renamed={
            r"\.mtp_block\.pre_mlp_layernorm\.": ".mtp_block.post_attention_layernorm.",
            r"\.mtp_block\.final_layernorm\.": ".post_norm.",
        },
    ),
}
"""`model_type` of a target's (text) configuration -> its MTP layers."""

_IN_GGUF = MtpFamily(r"^blk\.(\d+)\.nextn\.eh_proj\.weight$", numbered=True)


def has_mtp_layers() -> bool:
    """Return whether the installed transformers builds MTP layers."""
    installed, first = version("transformers").split("."), TRANSFORMERS.split(".")
    return [int(n) for n in installed[:2]] >= [int(n) for n in first]


def explain_no_layers(family: str) -> PairError:
    """Return the error for a target whose family is not in `FAMILIES`."""
    return PairError(
        f"drafter 'mtp' does not work with this {family!r} model, and no MTP layers are known for this family",
        why="they are known for " + ", ".join(sorted(FAMILIES)),
        fix="use another drafter, or a target of one of these families",
    )


def find_mtp_layers(target: Checkpoint) -> tuple[int, int]:
    """Return (MTP layers in a checkpoint's tensors, and in its configuration). Raises the family of LoadError."""
    if target.is_gguf:
        header = target.header
        promised = header.size("nextn_predict_layers")
        return _IN_GGUF.count_layers((t.name for t in header.tensors), header.size("block_count") - promised), promised
    config, fix = target.config, "correct config.json, or export the checkpoint again"
    with reading(f"config.json of {target} does not tell its MTP layers", fix, ConfigError):
        return _find_in(target, config)


def _find_in(target: Checkpoint, config: JsonMapping) -> tuple[int, int]:
    """Compute `find_mtp_layers` for a checkpoint that is a folder."""
    text_config = {**WRAPPERS.get(config.get("model_type", ""), {}), **(config.get("text_config") or config)}
    family = FAMILIES.get(text_config.get("model_type", ""))
    if family is None or config.get("quantization_config"):
        return 0, 0
    stored = family.count_layers(target.tensor_names, int(text_config["num_hidden_layers"]))
    return stored, int(next((n for key in COUNTS if (n := text_config.get(key))), stored))


def check_stored(target: object, stored: int, promised: int) -> None:
    """Raise ConfigError for a checkpoint without MTP layers, or with fewer than its configuration promises."""
    if stored < max(1, promised):
        raise ConfigError(
            f"drafter 'mtp' does not work with {target}, which holds {stored} MTP layers and promises {promised}",
            why="the configuration has layers that the weights do not have" if promised else "the drafter needs them",
            fix="use another drafter, or a checkpoint that was saved with its MTP layers",
        )


def count_mtp_layers(target: CheckpointName, native: bool = False) -> int:
    """Count the usable MTP layers of a checkpoint. Returns 0 if the files cannot be read, and, with a warning, if
    layers are missing or the target's runner cannot run them (our own decoder if `native`, else transformers). For a
    checkpoint on the hub, the small files are downloaded."""
    try:
        stored, promised = find_mtp_layers(Checkpoint.open(target))
    except LoadError:  # loading the target reports the error
        return 0
    why = ""
    if stored < promised:
        why = f"holds {stored} of the {promised} MTP layers that it promises"
    elif stored and not (native or has_mtp_layers()):
        why = f"brings MTP layers, which need transformers {TRANSFORMERS}"
    elif stored > 1 and native:
        why = f"brings {stored} MTP layers, and our own decoder runs one"
    if why:
        log.warning("%s %s: no drafter uses them", target, why)
    return 0 if why else stored
