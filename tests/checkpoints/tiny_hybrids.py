"""Tiny checkpoints with recurrent layers, whose weights depend only on the names of tensors. llama.cpp's own converter
made GGUF files from these checkpoints (`hybrids/`)."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_checkpoints import config_of, rewrite

FILES = Path(__file__).with_name("hybrids")

_SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LAYERS = ["linear_attention", "full_attention"]
_DELTA = {
    "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": _LAYERS,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_MAMBA = {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 16, "shared_intermediate_size": 32, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
    "residual_multiplier": 0.4, "attention_multiplier": 0.3,
}  # fmt: skip
_NEMOTRON = {
    "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "n_routed_experts": 3,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
_FALCON = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_rms_norm": True,
    "mamba_norm_before_gate": False, "lm_head_multiplier": 0.5, "embedding_multiplier": 4.0, "key_multiplier": 0.5,
    "mlp_multipliers": [0.5, 2.0], "attention_out_multiplier": 0.5, "attention_in_multiplier": 2.0,
    "ssm_multipliers": [0.25, 0.5, 2.0, 0.5, 4.0], "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5,
}  # fmt: skip
"""Multipliers that are powers of two, so that the converter can apply them to float16 weights without rounding."""

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lfm2": ("Lfm2", _SHAPE | {
        "tie_word_embeddings": True, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    }),
    "qwen3next": ("Qwen3Next", _SHAPE | _DELTA | _EXPERTS),
    "qwen35": ("Qwen3_5Text", _SHAPE | _DELTA | {"mtp_num_hidden_layers": 1}),
    "qwen35moe": ("Qwen3_5MoeText", _SHAPE | _DELTA | _EXPERTS | {"mtp_num_hidden_layers": 1}),
    "granitehybrid": ("GraniteMoeHybrid", _SHAPE | _MAMBA | {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "granitehybrid-moe": ("GraniteMoeHybrid", _SHAPE | _MAMBA | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "lfm2moe": ("Lfm2Moe", _SHAPE | _EXPERTS | {
        "tie_word_embeddings": True, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
    }),
    "nemotron_h": ("NemotronH", _SHAPE | _NEMOTRON | {"hybrid_override_pattern": "M-M*-"}),
    "nemotron_h_moe": ("NemotronH", _SHAPE | _NEMOTRON | {"hybrid_override_pattern": "ME*E"}),
    "falcon-h1": ("FalconH1", _SHAPE | _FALCON | {"head_dim": 16}),
}  # fmt: skip
"""By file: name of the configuration class in transformers, and the configuration."""


_STORED = {
    "experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}  # fmt: skip
"""Names of parameters in transformers, and in published checkpoints."""


def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a weight that depends only on its name and is exact in float16."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    low, high = (0, 90) if name.endswith(("A_log", "norm.weight", "layernorm.weight")) else (-127, 128)
    return torch.from_numpy(rng.integers(low, high, shape).astype(np.float32) / (64 if low == 0 else 512))


def make_checkpoint(folder: Path, name: str) -> Path:
    """Write the checkpoint from which a file was made. Qwen3-Next and Qwen3.5 have an MTP layer."""
    from transformers import AutoModelForCausalLM

    kind, shape = MODELS[name]
    model = AutoModelForCausalLM.from_config(config_of(kind, **shape))
    model.save_pretrained(folder)
    state = {key: _weight(key, tuple(value.shape)) for key, value in model.state_dict().items()}
    if kind in ("Lfm2Moe", "NemotronH", "FalconH1"):  # saved under the names of published checkpoints
        model.load_state_dict(state)
        model.save_pretrained(folder)
        if kind == "NemotronH":
            dense = {} if "E" in shape["hybrid_override_pattern"] else {"num_experts_per_tok": None}
            rewrite(folder, layers_block_type=None, hybrid_override_pattern=shape["hybrid_override_pattern"], **dense)
        return folder
    for old, new in (_STORED if kind == "GraniteMoeHybrid" else {}).items():
        state = {key.replace(old, new): value for key, value in state.items()}
    state |= {
        f"mtp.{key}".replace("layers.1", "layers.0"): value
        for full, value in state.items()
        if "qwen" in name and (key := full.removeprefix("model.")).startswith("layers.1.")
    }
    if shape["tie_word_embeddings"]:
        del state["lm_head.weight"]
    if kind == "GraniteMoeHybrid":  # as in published checkpoints; transformers writes other names
        rewrite(folder, layer_types=shape["layer_types"])
    if "qwen" in name:
        names = {"fc": (32, 64), **dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (32,))}
        state |= {f"mtp.{key}.weight": _weight(key, dims) for key, dims in names.items()}
    save_file({key: value.clone() for key, value in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
