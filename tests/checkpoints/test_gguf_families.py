"""GGUF files of every family: the metadata and names of tensors that llama.cpp's own converter wrote for our tiny
checkpoints are in gguf_families.json; the weights are the checkpoint's."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gguf.gguf_writer import rotate_rows
from slipstream import LLM, SamplingParams
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_weights import names_in_file
from slipstream.checkpoints.weights import Weights, load_weights
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.backends.native.models import logits, logits_of
from tests.checkpoints.gguf_files import RECORDED, gguf_bytes, model_parts, random_bytes, recorded_shapes
from tests.checkpoints.odd_gguf_files import Tensors
from tests.checkpoints.tiny_hybrids import MODELS
from tests.checkpoints.tiny_wrapped import make
from tests.tiny_checkpoints import rewrite
from tests.tiny_families import FAMILIES

CONVERTED = [family for family in RECORDED if family in FAMILIES and family not in MODELS]
LEFT_OUT_BY_LLAMACPP = {
    "gemma2": {"scale"}, "gemma3": {"scale", "window", "rotary"},  # it knows those of the published sizes only
    "phi3": {"window"}, "llama4": {"window", "growth"}, "starcoder2": {"window"}, "cohere2": {"window", "rotary"},
}  # fmt: skip
"""Parts of layers that a file does not say, and our tiny checkpoints have in an unusual way."""


def converted(family: str, folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of the file that the converter writes of a checkpoint."""
    config, stored = DecoderConfig.load(folder), RECORDED[family]
    weights, shapes = load_weights(folder, config), recorded_shapes(stored)
    held = names_in_file(config, shapes)
    extra = {name: np.array(values) for name, values in stored["values"].items()}
    assert set(held) | set(extra) == set(shapes)
    tensors: Tensors = {}
    for name, parts in held.items():
        values = [rotate_rows(config, part, weights[part].numpy()) for part in parts]
        tensors[name] = np.concatenate(values)
        if "_exps" in name and config.experts is not None:
            tensors[name] = tensors[name].reshape(config.experts.count, -1, *values[0].shape[1:])
        if name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
            tensors[name] = tensors[name].reshape(config.heads, -1, *values[0].shape[1:])
    return stored["metadata"], tensors | extra


@pytest.mark.parametrize("family", CONVERTED)
def test_a_converted_file_describes_the_checkpoint(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    config, file = DecoderConfig.load(checkpoint(family)), tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(*converted(family, checkpoint(family))))
    read, weights = DecoderConfig.load(file), load_weights(checkpoint(family), config)
    other = LEFT_OUT_BY_LLAMACPP.get(family, set())
    for ours, theirs in zip(config.described, read.described, strict=True):
        differing = {key for key, value in vars(ours).items() if vars(theirs)[key] != pytest.approx(value)}
        assert differing <= other | {"scale"}, (ours, theirs)
        assert ours.score_scale == pytest.approx(theirs.score_scale) or "scale" in other
    for name in ("embedding_scale", "residual_scale", "logits_scale", "logits_cap", "activation", "norm", "growth"):
        assert name in other or getattr(read, name) == pytest.approx(getattr(config, name)), name
    assert read.experts == config.experts
    if family not in ("phi4-mini", "gpt-oss"):  # llama.cpp rounds the limits of gpt-oss's YaRN
        for number in range(len(config.rotaries)):
            assert torch.allclose(read.rope(number)[0], config.rope(number)[0])
            assert read.rope(number)[1] == pytest.approx(config.rope(number)[1])
    same = load_weights(file, read)
    assert set(same) == set(weights)
    assert all(torch.equal(same[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("family", "architecture", "keys"),
    [
        ("qwen3", "qwen3vl", {"n_deepstack_layers": 3, "rope.dimension_sections": [6, 5, 5, 0]}),
        ("qwen2", "qwen2vl", {"rope.dimension_sections": [2, 3, 3, 0]}),
        ("qwen3-moe", "qwen3vlmoe", {"n_deepstack_layers": 3, "rope.dimension_sections": [3, 3, 2, 0]}),
    ],
)
def test_files_of_qwen_vl_without_their_pictures_are_those_of_qwen(
    family: str, architecture: str, keys: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / family))
    config = DecoderConfig.load(rewrite(folder, mlp_only_layers=None, rope_parameters=None))
    metadata, tensors, kinds, _ = model_parts(config)
    name = str(metadata["general.architecture"])
    renamed = {key.replace(f"{name}.", f"{architecture}."): value for key, value in metadata.items()}
    renamed |= {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}
    texts = []
    for each in (metadata, renamed):
        file = tmp_path / f"{each['general.architecture']}.gguf"
        file.write_bytes(gguf_bytes(each, tensors, kinds=kinds))
        llm = LLM(file, threads=1)
        texts.append(llm.generate([[5, 9, 33]], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids)
    assert texts[0] == texts[1]
    assert "without an effect" not in caplog.text


def test_files_of_llama_4_give_the_logits_of_a_checkpoint_with_the_published_chunks(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp knows no other chunks and growth; a window of 0 leaves both out, and all layers have positions."""
    folder, file = Path(shutil.copytree(checkpoint("llama4"), tmp_path / "llama4")), tmp_path / "model.gguf"
    published: dict[str, Any] = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
    metadata, tensors = converted("llama4", rewrite(folder, **published))
    file.write_bytes(gguf_bytes(metadata, tensors))
    assert torch.equal(logits(file), logits(folder))
    plain = {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1] * 4, "attn_temperature_tuning": False}
    _, tensors = converted("llama4", rewrite(folder, **plain))
    file.write_bytes(gguf_bytes(metadata | {"llama4.attention.sliding_window": 0}, tensors))
    assert torch.equal(logits(file), logits(folder))
    assert DecoderConfig.load(file).described == DecoderConfig.load(folder).described


def test_files_of_muse_glimmer_have_a_factor_as_weights_of_norms(tmp_path: Path) -> None:
    make(name := "muse_glimmer", folder := tmp_path / name)
    weights, file = load_weights(folder, config := DecoderConfig.load(folder)), tmp_path / "model.gguf"
    parts = names_in_file(config).items()
    tensors: Tensors = {
        name: np.concatenate([rotate_rows(config, one, weights[one].numpy()) for one in each]) for name, each in parts
    }
    for i, layer in enumerate(config.described):
        tensors[f"blk.{i}.attn_q_norm.weight"] = np.full(layer.head_dim, layer.query_scale, np.float32)
        tensors[f"blk.{i}.attn_k_norm.weight"] = np.ones(layer.head_dim, np.float32)
    stored = RECORDED["muse-glimmer"]
    assert set(tensors) == set(recorded_shapes(stored))
    file.write_bytes(gguf_bytes(stored["metadata"], tensors))
    read = DecoderConfig.load(file)
    assert [(layer.window, layer.rotary) for layer in read.described] == [(6, 0)] * 3 + [(None, None)]
    assert torch.equal(logits(file), logits(folder))
    uncapped = {key: value for key, value in stored["metadata"].items() if "final" not in key}
    file.write_bytes(gguf_bytes(uncapped, tensors))  # as in llama.cpp, the key says so
    assert DecoderConfig.load(file).logits_cap == 0


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe", "gemma4-shared"])
def test_files_of_gemma_4_give_the_logits_of_their_checkpoint(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys and values of layers that read those of others are left over from training."""
    (metadata, tensors), file = converted(family, checkpoint(family)), tmp_path / "model.gguf"
    for name in [name for name in tensors if family == "gemma4-shared" and re.search(r"blk\.[01]\.attn_[kv]", name)]:
        tensors[name.replace("blk.0", "blk.4").replace("blk.1", "blk.5")] = tensors[name] + 1
    file.write_bytes(gguf_bytes(metadata, tensors))
    assert torch.equal(logits(file), logits(checkpoint(family)))
    assert LLM(file, threads=1).generate([[5, 9]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
    assert not caplog.records


def test_gate_and_up_of_all_experts_may_be_one_tensor(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    metadata, tensors = converted("gemma4-moe", checkpoint("gemma4-moe"))
    file, apart, rows = tmp_path / "model.gguf", dict(tensors), []
    for name in [name for name in tensors if "gate_up" in name]:
        blocks = tensors[name] = random_bytes("Q8_0", 4 * 64, 2, scale=0.0015).reshape(4, 64, 2, -1)
        del apart[name]
        apart |= {name.replace("_up", ""): blocks[:, :32], name.replace("gate_", ""): blocks[:, 32:]}
    for each in (tensors, apart):
        kinds = {name: "Q8_0" for name, values in each.items() if values.dtype == np.uint8}
        file.write_bytes(gguf_bytes(metadata, each, kinds=kinds))
        rows.append(logits(file))
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.sliding_window_pattern", [1, 0, 1, 0, 1, 1], "last layer has a sliding window"),
        ("attention.sliding_window_pattern", [1, 0], "by layer do not have 6"), ("rope.dimension_count_swa", 8, "is 8"),
        ("feed_forward_length", [96, 96, 192, 192, 192, 192], "doubled in layers"),
        ("attention.value_length", 16, "value_length is 16"), ("attention.shared_kv_layers", 3, "no rope_freqs"),
    ],
)  # fmt: skip
def test_odd_files_of_gemma_4_are_refused_by_name(key, value, says, checkpoint, tmp_path):
    metadata, tensors = converted("gemma4-shared", checkpoint("gemma4-shared"))
    if "rope_freqs" in says:
        del tensors["rope_freqs.weight"]
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata | {f"gemma4.{key}": value}, tensors))
    with pytest.raises(UnsupportedModelError, match=says):
        DecoderConfig.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite"])
def test_files_of_latent_attention_give_the_logits_of_their_checkpoint(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(*converted(family, checkpoint(family))))
    assert torch.equal(logits(file), logits(checkpoint(family)))
    assert not caplog.records


def test_the_epsilon_of_rms_norms_is_that_of_their_key(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    metadata, tensors = converted("deepseek-v3", checkpoint("deepseek-v3"))
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(metadata | {"deepseek2.attention.layer_norm_epsilon": 0.5}, tensors))
    assert DecoderConfig.load(file).norm_eps == pytest.approx(1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_keys_and_values_of_heads_stay_as_a_file_stores_them(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    metadata, tensors = converted("deepseek-v3", checkpoint("deepseek-v3"))
    file, kinds = tmp_path / "model.gguf", {}
    for name in [name for name in tensors if name.endswith(("attn_k_b.weight", "attn_v_b.weight"))]:
        heads, outs, columns = tensors[name].shape
        blocks = random_bytes(kind, heads * outs, columns // 32, scale=0.0015)
        tensors[name], kinds[name] = blocks.reshape(heads, outs, columns // 32, -1), kind
    file.write_bytes(gguf_bytes(metadata, tensors, kinds=kinds))
    stored = load_weights(file, DecoderConfig.load(file))
    assert stored.blocks("layers.1.self_attn.k_up_proj.weight") is not None
    wide = {name: stored[name].clone() for name in stored}
    exact = Weights({n: (n, t.__getitem__) for n, t in wide.items()}, stored.config, torch.float32)
    rows, wanted = logits(file), logits_of(stored.config, exact)
    assert (rows - wanted).abs().amax(
        1
    ).median() < 0.05 * wanted.abs().max()  # in a few, rounding chooses other experts


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.key_length_mla", None, "has no deepseek2.attention.key_length_mla.*convert the model again"),
        ("attention.kv_lora_rank", None, "kv_lora_rank is 0"),
        ("attention.q_lora_rank", None, "lacks blk.0.attn_q.weight"),
        ("attention.value_length_mla", 128, "attn_v_b.weight.* but .4, 128, 64. is expected"),
        ("expert_gating_func", 1, "norm_topk_prob is True"),
        ("expert_used_count", None, "has no expert_used_count"),
        ("expert_group_used_count", None, "has no expert_group_used_count"),
        ("rope.freq_base", 1.0, "rope_theta is 1.0"),
        ("nextn_predict_layers", 1, "holds blk.3.attn_k_b.weight, .* which its metadata do not describe"),
    ],
)
def test_odd_files_of_latent_attention_are_refused_by_name(
    key: str, value: int | None, says: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    metadata, tensors = converted("deepseek-v3", checkpoint("deepseek-v3"))
    file = tmp_path / "model.gguf"
    changed = {name: each for name, each in (metadata | {f"deepseek2.{key}": value}).items() if each is not None}
    file.write_bytes(gguf_bytes(changed, tensors))
    with pytest.raises((CheckpointError, ConfigError, UnsupportedModelError), match=says):
        load_weights(file, DecoderConfig.load(file))
