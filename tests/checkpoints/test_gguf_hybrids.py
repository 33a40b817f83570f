"""GGUF files of models with recurrent layers. `hybrids/` holds files that llama.cpp's own converter wrote of the tiny
checkpoints below, whose weights depend on their names only."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.backends.native.kernels.records import LAYER
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import read_tensor, refusal
from slipstream.checkpoints.gguf_header import GgufHeader, read_header
from slipstream.checkpoints.gguf_weights import GgufTensors
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import Weights, load_weights
from slipstream.errors import CheckpointError, ConfigError
from tests.backends.native.models import chain
from tests.checkpoints.gguf_files import SIZES, gguf_bytes, random_bytes
from tests.tiny_checkpoints import config_of, rewrite

FILES = Path(__file__).with_name("hybrids")
TOKENS = [3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9, 3, 23, 8, 4, 6]

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
"""Powers of two, which the converter can apply to weights in float16."""

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
"""File -> kind of its configuration in transformers, and the configuration."""


_STORED = {
    "experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}  # fmt: skip
"""Names of parameters in transformers -> in published checkpoints."""


def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight that depends on its name only, exact in float16."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    low, high = (0, 90) if name.endswith(("A_log", "norm.weight", "layernorm.weight")) else (-127, 128)
    return torch.from_numpy(rng.integers(low, high, shape).astype(np.float32) / (64 if low == 0 else 512))


def make_checkpoint(folder: Path, name: str) -> Path:
    """Write the checkpoint of a file. Qwen3-Next and Qwen3.5 have a layer that predicts a further token."""
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


def logits(checkpoint: Path) -> Tensor:
    config = DecoderConfig.load(checkpoint)
    return logits_of(config, load_weights(checkpoint, config))


def logits_of(config: DecoderConfig, weights: Weights, threads: int = 1, prompt: int = 13) -> Tensor:
    """[n, V] of TOKENS: a prompt, then single tokens."""
    executor = NativeExecutor(config, weights, LoadSettings(threads=threads))
    parts = [executor.forward(chain(0, 0, TOKENS[:prompt])).logits.clone()]
    parts += [executor.forward(chain(0, at, [TOKENS[at]])).logits.clone() for at in range(prompt, len(TOKENS))]
    return torch.cat(parts)[:, : config.vocab_size].double()


def changed(file: Path, folder: Path, kinds: Mapping[str, str], **metadata: Any) -> tuple[Path, GgufHeader]:
    """A copy of a file, with tensors whose name ends so stored in these kinds, random; None leaves a key out."""
    header = read_header(file)
    tensors, stored = dict[str, np.ndarray](), dict[str, str]()
    for tensor in header.tensors:
        kind = next((kind for end, kind in kinds.items() if tensor.name.endswith(f"{end}.weight")), tensor.type)
        stored[tensor.name] = kind
        count = SIZES[kind][0]
        if count > 1:
            raw = random_bytes(kind, int(np.prod(tensor.shape[:-1])), tensor.shape[-1] // count, len(tensors), 0.003)
            tensors[tensor.name] = raw.reshape(*tensor.shape[:-1], *raw.shape[1:])
        else:
            values = read_tensor(header, tensor).view("<f2" if tensor.type == "F16" else "<f4")
            tensors[tensor.name] = values.reshape(tensor.shape)
    whole = {key: value for key, value in (dict(header.metadata) | metadata).items() if value is not None}
    whole = {key: int(value) if isinstance(value, np.integer) else value for key, value in whole.items()}
    (folder / "changed.gguf").write_bytes(gguf_bytes(whole, tensors, kinds=stored))
    return folder / "changed.gguf", read_header(folder / "changed.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_file_gives_the_logits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    file, checkpoint = FILES / f"{name}.gguf", make_checkpoint(tmp_path, name)
    assert refusal(read_header(file)) is None
    ours, theirs = DecoderConfig.load(checkpoint), DecoderConfig.load(file)
    for one, other in zip(ours.described, theirs.described, strict=True):
        assert (one.recurrence is None) == (other.recurrence is None)
        if one.recurrence is not None:
            tiled = name in ("qwen35", "qwen35moe")
            assert replace(one.recurrence, tiled=tiled) == other.recurrence
    assert theirs.experts == ours.experts
    wanted = logits(checkpoint)
    assert torch.allclose(logits(file), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())


MIXED = {
    "attn_qkv": "Q8_0", "attn_gate": "Q4_0", "ssm_out": "Q4_0", "attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q4_0",
    "attn_output": "Q4_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q4_0", "token_embd": "Q8_0",
    "output": "Q8_0",
}  # fmt: skip
"""As published files of 4 bits: ssm_alpha and ssm_beta stay floating-point numbers."""


def layer_record(executor: NativeExecutor, number: int) -> np.ndarray:
    """The LAYER record of a layer."""
    layers = next(array for array in executor._layout.arrays if array.dtype == LAYER)
    return layers[number]


@pytest.mark.parametrize(("name", "kind"), [("qwen35", "qwen3_5"), ("qwen35moe", "qwen3_5_moe")])
def test_the_text_part_of_a_multimodal_checkpoint_runs_alone(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, name)
    wanted, text = logits(folder), json.loads((folder / "config.json").read_text())

    rope = text["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False}
    text |= {"rope_parameters": rope, "mlp_only_layers": []}

    def inside(state: dict[str, Tensor]) -> None:
        for stored in [stored for stored in state if stored.startswith("model.")]:
            state[stored.replace("model.", "model.language_model.", 1)] = state.pop(stored)
        state["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)

    outside = {"image_token_id": 7, "video_token_id": 8, "vision_config": {"depth": 2, "hidden_size": 4}}
    architecture = {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": False}
    rewrite(folder, inside, **dict.fromkeys(text) | {"model_type": kind, "text_config": text} | outside | architecture)
    assert torch.equal(logits(folder), wanted)
    assert LLM(folder, threads=1).generate([[5, 9]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
    assert "model.visual.patch_embed.proj.weight" in caplog.text
    assert "left out. Texts differ" not in caplog.text


@pytest.mark.parametrize("small", ["F16", "F32", "Q8_0"])
def test_small_tensors_in_other_formats_leave_the_large_ones_in_their_blocks(small: str, tmp_path: Path) -> None:
    file, header = changed(FILES / "qwen35.gguf", tmp_path, MIXED | {"ssm_alpha": small, "ssm_beta": small})
    config = DecoderConfig.load(file)
    layer = layer_record(NativeExecutor(config, load_weights(file, config)), 0)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for part, name in (("qkv", "attn_qkv"), ("gates", "attn_gate"), ("o", "ssm_out")):
        tensor = tensors[f"blk.0.{name}.weight"]
        assert tensor.nbytes is not None
        assert layer[part]["out_bytes"] * tensor.shape[0] <= 1.12 * tensor.nbytes, part  # Q4_0 gets minima
    assert 0 < layer["per_head"]["out_bytes"] <= 4 * config.hidden_size


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next"])
def test_products_in_several_formats_compute_what_floats_compute(name: str, tmp_path: Path) -> None:
    """Rounding of activations to 8 bits is all that differs."""
    file, header = changed(FILES / f"{name}.gguf", tmp_path, MIXED)
    config = DecoderConfig.load(file)
    floats = Weights(GgufTensors(header, config).readers, config, torch.float32)  # without its blocks
    wanted = logits_of(config, floats)
    ours = logits(file)
    assert 0 < (ours - wanted).square().mean().sqrt() / wanted.std() < 0.05
    assert torch.equal(logits_of(config, load_weights(file, config), threads=2, prompt=3), ours)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_text_of_a_file(name: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = LLM(FILES / f"{name}.gguf", threads=1)
    texts = [one.token_ids for one in plain.generate([[5, 9, 5, 9, 5], [7]], params)]
    plain.use("suffix")
    assert [one.token_ids for one in plain.generate([[5, 9, 5, 9, 5], [7]], params)] == texts


def test_granite_has_positions_where_a_file_says_so(tmp_path: Path) -> None:
    """As in llama.cpp, which rotates neighbours."""
    file, _ = changed(FILES / "granitehybrid.gguf", tmp_path, {}, **{"granitehybrid.rope.scaling.finetuned": True})
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "granitehybrid")
    without, wanted = logits(checkpoint), logits(rewrite(checkpoint, position_embedding_type="rope"))
    assert not torch.allclose(without, wanted, rtol=1e-3)
    assert torch.allclose(logits(file), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())


@pytest.mark.parametrize("key", ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"])
def test_a_file_without_the_size_of_its_state_is_refused_with_the_key(key: str, tmp_path: Path) -> None:
    file, _ = changed(FILES / "qwen35.gguf", tmp_path, {}, **{f"qwen35.ssm.{key}": None})
    with pytest.raises(ConfigError, match=r"linear_\w+ is 0"):
        DecoderConfig.load(file)


def test_older_files_name_recurrent_layers_by_their_interval(tmp_path: Path) -> None:
    keys = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 2}
    file, _ = changed(FILES / "qwen35.gguf", tmp_path, {}, **keys)
    assert torch.equal(logits(file), logits(FILES / "qwen35.gguf"))


def test_a_file_with_a_state_of_unknown_layout_is_refused_by_its_tensor(tmp_path: Path) -> None:
    file, _ = changed(FILES / "qwen35.gguf", tmp_path, {}, **{"qwen35.ssm.state_size": 32})
    with pytest.raises(CheckpointError, match=r"blk\.0\.\w+"):
        load_weights(file, DecoderConfig.load(file))
