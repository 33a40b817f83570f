"""The conversion for llama.cpp, with a writer that only records: llama.cpp is not needed."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1, "intermediate_size": 12, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "vocab_size": 6, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
}


class Writer:
    """Records what a GGUFWriter would write."""

    last: Any = None

    def __init__(self, file: str, arch: str):
        self.facts: dict[str, Any] = {"arch": arch}
        self.tensors: dict[str, np.ndarray] = {}
        Writer.last = self

    def add_tensor(self, name: str, data: np.ndarray) -> None:
        self.tensors[name] = data

    def __getattr__(self, name: str) -> Any:
        return lambda *value: self.facts.update({name: value[0] if value else True})


@pytest.fixture
def export(monkeypatch):
    names = SimpleNamespace(get_name=lambda name, try_suffixes: NAMES.get(name))
    fake = SimpleNamespace(
        GGUFWriter=Writer, LlamaFileType=SimpleNamespace(ALL_F32=0), MODEL_ARCH=SimpleNamespace(LLAMA=1),
        get_tensor_name_map=lambda arch, layers: names,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "gguf", fake)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.gguf_export", raising=False)
    from benchmarks.peers import gguf_export

    yield gguf_export
    sys.modules.pop("benchmarks.peers.gguf_export", None)


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint with the given changes to its settings; returns its folder and its weights."""
    rng = np.random.default_rng(0)
    shapes = {"embed_tokens": (6, 8), "q": (8, 8), "k": (4, 8), "v": (4, 8)}
    drawn = [rng.normal(size=shape).astype(np.float16) for shape in shapes.values()]
    weights = dict(zip(NAMES, drawn, strict=True))

    def inner(extra: dict[str, np.ndarray] | None = None, **changes: Any):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        save_file({**weights, **(extra or {})}, tmp_path / "model.safetensors")
        return tmp_path, weights

    return inner


def test_rows_are_reordered_so_that_both_rotary_embeddings_agree(export):
    heads, width, hidden = 3, 8, 5
    rng = np.random.default_rng(1)
    weight, x, angle = rng.normal(size=(heads * width, hidden)), rng.normal(size=hidden), rng.normal(size=width // 2)
    halves = (weight @ x).reshape(heads, 2, -1)  # the pair (i, i + d/2) of Hugging Face
    pairs = (export.paired(weight, heads) @ x).reshape(heads, -1, 2)  # the pair (2i, 2i + 1) of llama.cpp
    cos, sin = np.cos(angle), np.sin(angle)
    a = np.stack([halves[:, 0] * cos - halves[:, 1] * sin, halves[:, 1] * cos + halves[:, 0] * sin], axis=1)
    b = np.stack([pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], axis=-1)
    np.testing.assert_allclose(a.swapaxes(1, 2), b)


def test_weights_keep_their_values_and_the_settings_their_meaning(export, checkpoint, tmp_path):
    folder, weights = checkpoint()
    export.convert(folder, tmp_path / "out.gguf")
    written, facts = Writer.last.tensors, Writer.last.facts
    assert written.keys() == set(NAMES.values())
    assert {tensor.dtype for tensor in written.values()} == {np.dtype("float32")}
    for checkpoint_name, gguf_name in NAMES.items():
        assert np.array_equal(
            np.sort(written[gguf_name], axis=None), np.sort(weights[checkpoint_name].astype(np.float32), axis=None)
        )
    assert np.array_equal(written["blk.0.attn_v.weight"], weights["model.layers.0.self_attn.v_proj.weight"])
    assert (facts["add_head_count"], facts["add_head_count_kv"], facts["add_key_length"]) == (2, 1, 4)
    assert (facts["add_rope_freq_base"], facts["add_tokenizer_model"], facts["add_vocab_size"]) == (500.0, "none", 6)


def test_a_tied_output_matrix_is_left_out(export, checkpoint, tmp_path):
    folder, _ = checkpoint({"lm_head.weight": np.zeros((6, 8), np.float16)})
    export.convert(folder, tmp_path / "out.gguf")
    assert Writer.last.tensors.keys() == set(NAMES.values())


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "gpt2"}, {"attention_bias": True}, {"rope_parameters": {"rope_type": "llama3", "factor": 8}}],
)
def test_other_models_than_plain_llamas_are_refused(export, checkpoint, tmp_path, changes):
    folder, _ = checkpoint(**changes)
    with pytest.raises(ValueError, match="no plain Llama"):
        export.convert(folder, tmp_path / "out.gguf")


def test_an_unknown_tensor_is_refused(export, checkpoint, tmp_path):
    folder, _ = checkpoint({"model.layers.0.extra.weight": np.zeros(2, np.float16)})
    with pytest.raises(ValueError, match=r"layers\.0\.extra"):
        export.convert(folder, tmp_path / "out.gguf")
