"""GGUF files of models with recurrent layers, which llama.cpp's own converter wrote of tiny checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.backends.native.kernels.formats import FORMATS
from slipstream.backends.native.kernels.records import LAYER
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import read_tensor, refusal
from slipstream.checkpoints.gguf_header import GgufHeader, read_header
from slipstream.checkpoints.gguf_weights import GgufTensors
from slipstream.checkpoints.weight_blocks import TYPES
from slipstream.checkpoints.weights import Weights, load_weights
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.backends.native.models import logits, logits_of
from tests.checkpoints.gguf_files import SIZES, family_config, gguf_bytes, gguf_model, random_bytes
from tests.checkpoints.tiny_hybrids import FILES, MODELS, make_checkpoint
from tests.tiny_checkpoints import rewrite


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
    assert "ignored because unknown" not in caplog.text


@pytest.mark.parametrize("small", ["F16", "F32", "Q8_0"])
def test_small_tensors_in_other_formats_leave_the_large_ones_in_their_blocks(small: str, tmp_path: Path) -> None:
    file, header = changed(FILES / "qwen35.gguf", tmp_path, MIXED | {"ssm_alpha": small, "ssm_beta": small})
    config = DecoderConfig.load(file)
    layer = layer_record(NativeExecutor(config, load_weights(file, config)), 0)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    gates = "second" if small == MIXED["attn_qkv"] else "third"  # neighbours in one format are one product
    for part, name in (("qkv", "attn_qkv"), (gates, "attn_gate"), ("o", "ssm_out")):
        tensor = tensors[f"blk.0.{name}.weight"]
        assert tensor.nbytes is not None
        assert layer[part]["out_bytes"] * tensor.shape[0] == tensor.nbytes, part
    assert 0 < layer["second"]["out_bytes"] <= 4 * config.hidden_size


def test_each_projection_of_attention_keeps_its_format_beside_others(tmp_path: Path) -> None:
    """In one matrix Q4_K would take as many bits as Q6_K beside it."""
    file, _ = gguf_model(tmp_path, family_config("llama"), ("Q4_K", "Q5_K", "Q6_K"))
    config = DecoderConfig.load(file)
    layer, types = layer_record(NativeExecutor(config, load_weights(file, config)), 0), TYPES.values()
    types_of = {tensor.name: tensor.type for tensor in read_header(file).tensors}
    stored = [each.format for x in "qkv" for each in types if each.name == types_of[f"blk.0.attn_{x}.weight"]]
    assert [FORMATS[layer[part]["format"]].name for part in ("qkv", "second", "third")] == stored
    assert len(set(stored)) == 3


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


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("nemotron_h_moe", "moe_latent_size", 16, "moe_latent_size is 16"),
        ("nemotron_h_moe", "expert_shared_count", 2, "n_shared_experts is 2"),
        ("lfm2moe", "expert_gating_func", 1, "expert_gating_func is 1"),
    ],
)
def test_a_file_that_computes_something_else_is_refused(
    name: str, key: str, value: int, says: str, tmp_path: Path
) -> None:
    file, _ = changed(FILES / f"{name}.gguf", tmp_path, {}, **{f"{name}.{key}": value})
    with pytest.raises(UnsupportedModelError, match=says):
        DecoderConfig.load(file)


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("falcon-h1", {"mamba_n_groups": 3}, "4 recurrent heads cannot be divided into 3 groups"),
        (
            "falcon-h1",
            {"mamba_d_ssm": 100},
            "4 Mamba-2 heads of 16 outputs need the width 64, but config.json says 100",
        ),
        ("falcon-h1", {"ssm_multipliers": [1, 2]}, "ssm_multipliers must be a list of 5 numbers"),
        ("nemotron_h", {"hybrid_override_pattern": "M-Z*E"}, "layers_block_type must name one of .* but is 'M-Z"),
    ],
)
def test_a_configuration_with_states_that_fit_no_layer_is_refused(
    name: str, wrong: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = rewrite(make_checkpoint(tmp_path, name), **wrong)
    with pytest.raises(ConfigError, match=says):
        DecoderConfig.load(folder)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_text_of_a_file(name: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = LLM(FILES / f"{name}.gguf", threads=1)
    texts = [one.token_ids for one in plain.generate([[5, 9, 5, 9, 5], [7]], params)]
    plain.use("suffix")
    assert [one.token_ids for one in plain.generate([[5, 9, 5, 9, 5], [7]], params)] == texts


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_an_mtp_layer_drafts_in_the_blocks_of_its_file(name: str, tmp_path: Path) -> None:
    file, header = changed(FILES / f"{name}.gguf", tmp_path, MIXED | {"nextn.eh_proj": "Q4_0"})
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM(file, "mtp", draft_tokens=3, threads=1)
    matrix, stored = llm.drafter.runtime._head["fc"], next(t for t in header.tensors if "eh_proj" in t.name)  # type: ignore[attr-defined]
    assert stored.nbytes is not None
    assert matrix["out_bytes"] * stored.shape[0] == stored.nbytes
    drafted = llm.generate([[5, 9, 5, 9, 5], [7]], params)
    assert all(one.stats.proposed and not one.stats.drafter_faults for one in drafted)
    llm.use(None)
    assert [one.token_ids for one in llm.generate([[5, 9, 5, 9, 5], [7]], params)] == [one.token_ids for one in drafted]


def test_granite_has_positions_where_a_file_says_so(tmp_path: Path) -> None:
    """As in llama.cpp, which rotates neighbours."""
    file, _ = changed(FILES / "granitehybrid.gguf", tmp_path, {}, **{"granitehybrid.rope.scaling.finetuned": True})
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "granitehybrid")
    without, wanted = logits(checkpoint), logits(rewrite(checkpoint, position_embedding_type="rope"))
    assert not torch.allclose(without, wanted, rtol=1e-3)
    assert torch.allclose(logits(file), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "nemotron_h_moe", "falcon-h1"])
@pytest.mark.parametrize("key", ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"])
def test_a_file_without_the_size_of_its_state_is_refused_with_the_key(name: str, key: str, tmp_path: Path) -> None:
    file, _ = changed(FILES / f"{name}.gguf", tmp_path, {}, **{f"{name}.ssm.{key}": None})
    with pytest.raises(ConfigError, match=r"(linear|mamba)_\w+ is 0"):
        DecoderConfig.load(file)


def test_older_files_name_recurrent_layers_by_their_interval(tmp_path: Path) -> None:
    keys = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 2}
    file, _ = changed(FILES / "qwen35.gguf", tmp_path, {}, **keys)
    assert torch.equal(logits(file), logits(FILES / "qwen35.gguf"))


def test_a_file_with_a_state_of_unknown_layout_is_refused_by_its_tensor(tmp_path: Path) -> None:
    file, _ = changed(FILES / "qwen35.gguf", tmp_path, {}, **{"qwen35.ssm.state_size": 32})
    with pytest.raises(CheckpointError, match=r"blk\.0\.\w+"):
        load_weights(file, DecoderConfig.load(file))
