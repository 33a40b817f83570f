"""Tiny random checkpoints with MTP layers, whose tensors have the names of published checkpoints."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.backends.native.native_heads import NativeMtp
from slipstream.checkpoints.module_shape import Experts
from slipstream.drafters.eagle import EagleDraftConfig, EagleDrafter
from slipstream.drafters.mtp import MtpDrafter
from slipstream.heads.mtp_names import TRANSFORMERS, has_mtp_layers
from tests.backends.native import models
from tests.targets.huggingface.architectures import _EXPERTS, _LINEAR, _MLA, _config

LAYERS = 2
"""Number of layers of each target."""


def _moe(model: str, layers: int, **more: Any) -> Any:
    """Make the configuration of a mixture of experts."""
    return _config(model, **_EXPERTS | {"num_hidden_layers": layers, "moe_intermediate_size": 16} | more)


CONFIGS: dict[str, Callable[[int], Any]] = {
    "deepseek_v3": lambda n: _config("DeepseekV3", **_MLA | {"num_hidden_layers": n}),
    "glm4_moe": lambda n: _moe(
        "Glm4Moe", n, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
        head_dim=8,
    ),
    "glm4_moe_lite": lambda n: _config("Glm4MoeLite", **_MLA | {"num_hidden_layers": n}),
    "mellum": lambda n: _moe(
        "Mellum", n, head_dim=8, num_experts=4, mlp_layer_types=["sparse"] * n, sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"][:n],
    ),
    "qwen3_next": lambda n: _moe(
        "Qwen3Next", n, head_dim=8, num_experts=4, shared_expert_intermediate_size=16, **_LINEAR,
        layer_types=["linear_attention", "full_attention", "full_attention"][:n],
    ),
    "ernie4_5_moe": lambda n: _moe(
        "Ernie4_5_Moe", n, moe_k=2, moe_num_experts=4, moe_num_shared_experts=1, moe_layer_start_index=1,
        moe_layer_end_index=1,
    ),
    "mimo_v2_flash": lambda n: _moe(
        "MiMoV2Flash", n, head_dim=12, v_head_dim=8, sliding_window=6, n_routed_experts=4,
        layer_types=["full_attention", *["sliding_attention"] * 4][:n],
        mlp_layer_types=["sparse", "sparse", *["dense"] * 4][:n],
    ),
}  # fmt: skip
"""By `model_type`: function that makes the configuration of a target with n layers. MTP layers are built like the last
layers of a longer target."""

BRINGS = [(family, n) for family in CONFIGS for n in (1, 2, 3) if n == 1 or family in ("deepseek_v3", "glm4_moe")]
BRINGS.append(("mimo_v2_flash", 2))
"""Pairs of a family and a number of MTP layers that its checkpoints may have."""


def skip_where_none_is_built() -> None:
    if not has_mtp_layers():
        pytest.skip(f"MTP layers need transformers {TRANSFORMERS}")


@torch.random.fork_rng(devices=[])
def write(family: str, folder: Path, mtp: int = 1, vocab: int = 8, seed: int = 0, **sizes: int) -> Path:
    """Write a random checkpoint with `mtp` MTP layers, which are the last layers of a longer target, under the tensor
    names of the family's published checkpoints. It has few ids, so that some draft tokens are accepted. sizes: values
    that replace values of `CONFIGS`."""
    import transformers

    skip_where_none_is_built()
    torch.manual_seed(seed + sorted(CONFIGS).index(family))
    shape = CONFIGS[family](LAYERS + mtp)
    shape.update(sizes | {"vocab_size": vocab})
    longer = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    longer.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in longer.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    longer.save_pretrained(folder)
    d = longer.config.hidden_size
    extra = [
        {n: 1 + 0.2 * torch.randn(d) for n in ("enorm", "hnorm", "post_norm")} | {"eh_proj": torch.randn(d, 2 * d) / 8}
        for _ in range(mtp)
    ]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        match = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        k = int(match[1]) - LAYERS if match else -1
        tensors[name if k < 0 or match is None else _block(family, k, match[2])] = tensor
    for k, parts in enumerate(extra):
        tensors |= {_beside(family, k, part): value for part, value in parts.items() if _beside(family, k, part)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= json.loads(CONFIGS[family](LAYERS).to_json_string())
    config |= sizes | {"vocab_size": vocab}
    config["architectures"] = [type(longer).__name__]
    config.pop("num_mtp_layers", None)
    if family != "mimo_v2_flash":  # its published checkpoints lack this key
        config["num_nextn_predict_layers"] = mtp
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _block(family: str, k: int, name: str) -> str:
    """Return the name of a tensor in the decoder layer of MTP layer k."""
    if family in ("mellum", "qwen3_next"):
        return f"mtp.layers.{k}.{name}"
    if family == "ernie4_5_moe":
        return f"model.mtp_block.{k}.{name}"
    if family == "mimo_v2_flash":
        return f"model.mtp.layers.{k}." + name.replace("post_attention_layernorm", "pre_mlp_layernorm")
    return f"model.layers.{LAYERS + k}.{name}"


def _beside(family: str, k: int, part: str) -> str:
    """Return the name of another tensor of MTP layer k; "" if the family has no such tensor."""
    names = {
        "mellum": {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
                   "post_norm": "mtp.norm"},
        "ernie4_5_moe": {"enorm": f"model.mtp_emb_norm.{k}", "hnorm": f"model.mtp_hidden_norm.{k}",
                         "eh_proj": f"model.mtp_linear_proj.{k}", "post_norm": ""},
        "mimo_v2_flash": {p: f"model.mtp.layers.{k}.{p}" for p in ("enorm", "hnorm", "eh_proj")}
        | {"post_norm": f"model.mtp.layers.{k}.final_layernorm"},
    }  # fmt: skip
    names["qwen3_next"] = names["mellum"]
    numbered = f"model.layers.{LAYERS + k}." + ("shared_head.norm" if part == "post_norm" else part)
    names_of_part = names[family][part] if family in names else numbered
    return names_of_part and names_of_part + ".weight"


@torch.random.fork_rng(devices=[])
def random_drafter(vocab: int, hidden: int, layers: int = 1, seed: int = 7, **options: Any) -> MtpDrafter:
    """Make a drafter with random MTP layers in float64, for a target of `vocab` ids with hidden states of this
    width."""
    skip_where_none_is_built()
    import transformers
    from transformers.modeling_layers import MtpModel

    from slipstream.targets.huggingface.mtp_layers import MtpLayers

    torch.manual_seed(seed)
    config = CONFIGS["glm4_moe"](1)
    config.update({"vocab_size": vocab, "hidden_size": hidden, "num_mtp_layers": layers, "first_k_dense_replace": 0})
    config._experts_implementation = "eager"  # the grouped kernels do not support float64
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).double().eval()
    model = MtpModel(module, layers).double().eval()
    with torch.no_grad():
        for name, weight in (*model.layers.named_parameters(), *model.layers.named_buffers()):
            weight.copy_(torch.randn_like(weight) / 2 + ("norm" in name))
    return MtpDrafter(MtpLayers(model, torch.device("cpu"), 256), vocab, EagleDraftConfig(**options))


def native_drafter(vocab: int, hidden: int, draft_vocab: int | None = None) -> EagleDrafter:
    """Make a drafter with a random MTP layer that our own kernels run, with experts and a gate, for a target of `vocab`
    ids with hidden states of this width."""
    experts = Experts(4, 2, 8, True, (True,), shared=8, shared_gate=True)
    decoder = models.config(1, vocab_size=vocab, hidden_size=hidden, heads=2, head_dim=16, experts=experts)
    decoder = replace(decoder, each=(replace(decoder.described[0], gate="output", qk_norm="head"),))
    layer = decoder.mtp_layer(sparse=True)
    tables = models.executor_of(decoder, models.weights(decoder, spread=0.8)).packed_tables
    runtime = NativeMtp(layer, models.weights(layer, seed=1, spread=0.8), tables, threads=1, vocab=draft_vocab)
    return EagleDrafter(runtime, vocab, name="mtp")
