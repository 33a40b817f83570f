"""Writes checkpoints of EAGLE heads: the native layouts of EAGLE-1/-2 and -3, and that of `speculators`."""

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.heads.eagle_head import EagleConfig, EagleHead
from slipstream.heads.recognition import TAPS, write
from slipstream.models.config import DecoderConfig

Layout = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json and tensors."""


def save_eagle(
    head: EagleHead, folder: str | Path, dtype: torch.dtype = torch.float16, target: str | None = None
) -> None:
    """Write `head` in the native layout. dtype: of the stored floats; target: name of the target model."""
    write(folder, *native(head, target), dtype)


def native(head: EagleHead, target: str | None = None, maps: bool = False) -> Layout:
    """The layout of the EAGLE authors' releases.

    maps  write d2t and t2d even for a full vocabulary; vLLM refuses them there.

    Norms and orders of computation are named only where they differ from the authors': SpecForge leaves out a norm if
    `norm_output` is false.
    """
    c = head.config
    qwen3 = c.version == 3 and c.decoder.qk_norm
    config: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else f"LlamaForCausalLMEagle{'3' * (c.version == 3)}"],
        **layer_config(c.decoder),
    }
    if target is not None:
        config["target_model"] = target
    if c.version == 1:
        return config | {"bias": c.fc_bias}, dict(head.state_dict())
    # SpecForge and SGLang write [1, 3, 4] for the states after layers 2, 4 and 5; SGLang only if the first is 1.
    by_sglang = [tap - (c.taps[0] == 2) for tap in c.taps]
    config |= {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "num_aux_hidden_states": len(c.taps),
        TAPS: list(c.taps),  # as vLLM counts
        "eagle_config": {TAPS: by_sglang, "use_aux_hidden_state": True, "norm_before_fc": c.norm_before_fc},
    }
    if c.mask_token is not None:
        config |= {"ptd_token_id": c.mask_token, "para_depths": c.depths}
    return config | {name: True for name, on in _variants(c).items() if on}, _tensors(head, maps)


def speculators(head: EagleHead, target: str, architectures: Seq[str]) -> Layout:
    """The layout of the package `speculators` for EAGLE-3 and P-EAGLE; target: folder or hub id."""
    c = head.config
    kind, name, length = ("eagle3", "Eagle3", 4) if c.mask_token is None else ("peagle", "PEagle", c.depths or 8)
    config: dict[str, Any] = {
        "architectures": [f"{name}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer_config(c.decoder) | {"num_aux_hidden_states": len(c.taps)},
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        TAPS: list(c.taps),
        **_variants(c),
    }
    if c.mask_token is not None:
        config["mask_token_id"] = c.mask_token
    return config, {name.replace("midlayer.", "layers.0."): t for name, t in _tensors(head).items()}


def _variants(c: EagleConfig) -> dict[str, bool]:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(c, name) for name in names}


def _tensors(head: EagleHead, maps: bool = False) -> dict[str, Tensor]:
    full = head.config.draft_vocab == head.config.decoder.vocab_size and not maps
    return {name: t for name, t in head.state_dict().items() if not (full and name in ("d2t", "t2d"))}


def layer_config(d: DecoderConfig) -> dict[str, Any]:
    """The head's own decoder layers as a model of Llama's or Qwen3's kind, for transformers 4 and 5."""
    rope: Mapping[str, Any] = d.rope_parameters
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return {
        "model_type": "qwen3" if d.qk_norm else "llama",
        "vocab_size": d.vocab_size,
        "hidden_size": d.hidden_size,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "intermediate_size": d.intermediate_size,
        "max_position_embeddings": d.context,
        "rms_norm_eps": d.norm_eps,
        "hidden_act": d.activation,
        "attention_bias": d.qkv_bias,
        "mlp_bias": d.mlp_bias,
        "rope_theta": rope.get("rope_theta", 1e4),
        "rope_parameters": dict(rope),
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "tie_word_embeddings": False,
    }
