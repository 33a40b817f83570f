"""Broken checkpoints on the command line: one message that names the file and what to do, code 2, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from tests.checkpoints import OTHER_TEXTS, Tiny, clone, make_model, make_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def broken(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of the target, to be damaged."""
    return clone(tiny.target, tmp_path / "broken")


@pytest.fixture(scope="module")
def compiled(tiny: Tiny) -> None:
    """Compile the kernels first, so that no message about it appears."""
    LLM(tiny.target, executor="native", draft_tokens=4)


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def lose_a_shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[: len(names) // 2]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / WEIGHTS)


def poison(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / WEIGHTS)


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def wrong_shape(folder: Path) -> None:
    edit_config(folder, hidden_size=64)


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])


def unknown_rope(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})


def garble_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def remove_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing safetensors": (remove_weights, ["holds no model.safetensors", "there are no weights to load", "Fix:"]),
    "truncated safetensors": (truncate, ["model.safetensors is not a readable safetensors file", "truncated", "Fix:"]),
    "empty safetensors": (empty, ["model.safetensors is not a readable safetensors file", "Fix:"]),
    "missing shard": (lose_a_shard, ["lacks 1 of 2 shards: model-00002-of-00002.safetensors", "Fix: download"]),
    "missing tensor": (lose_a_tensor, ["lacks 1 of", "norm.weight", "Fix:"]),
    "NaN weights": (poison, ["model.norm.weight", "holds NaN", "meaningless", "Fix:"]),
    "pickle weights": (pickle_weights, ["pickle", "pytorch_model.bin", "can run any code", "save_pretrained"]),
    "shapes that contradict": (wrong_shape, ["shape", "config.json says", "belong to different models", "Fix:"]),
    "unreadable config": (garble_config, ["config.json cannot be read as JSON", "Fix:"]),
    "missing config": (remove_config, ["config.json does not exist", "Fix:"]),
    "unsupported architecture": (
        unknown_architecture,
        ["'mamba' is not supported", "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe", "Fix:"],
    ),
    "unsupported rotary scaling": (
        unknown_rope,
        ["'longrope' is not supported", "default, linear, llama3, yarn", "Fix:"],
    ),
    "unreadable tokenizer": (garble_tokenizer, ["tokenizer", "broken", "Fix:"]),
    "missing tokenizer": (remove_tokenizer, ["tokenizer", "Fix:"]),
}


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_broken_checkpoint(cli, compiled, broken, name, executor):
    damage, messages = CHECKPOINTS[name]
    damage(broken)
    result = cli("generate", "for", "-n", "4", "-m", broken, "--executor", executor)
    assert (result.code, result.out) == (2, ""), result.err
    assert result.said.startswith("error: ")
    for message in messages:
        assert message in result.said


def test_a_broken_draft_is_named(cli, tiny, broken):
    truncate(broken)
    result = cli("generate", "for", "-m", tiny.target, "-md", broken)
    assert result.code == 2
    assert str(broken) in result.said


def test_vocabulary_mismatch(cli, tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    result = cli("generate", "for", "-m", tiny.target, "-md", tmp_path)
    assert result.code == 2
    assert f"target '{tiny.target}' and draft '{tmp_path}' do not share a vocabulary" in result.said
    assert "(id: target / draft): 260: " in result.said
    assert result.said.count(" / '") == 5, "the first five ids are listed"
    assert "would be rejected" in result.said
    assert "slipstream info TARGET DRAFT" in result.said
    assert "ngram" in result.said
