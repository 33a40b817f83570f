"""Broken checkpoints on the command line: one message that names the file and what to do, code 2, no traceback."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import OTHER_TEXTS, Tiny, clone, make_model, make_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def broken(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of the target, to be damaged."""
    return clone(tiny.target, tmp_path / "broken")


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))


def remove_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated safetensors": (truncate, ["model.safetensors is not a readable safetensors file", "truncated", "Fix:"]),
    "unsupported architecture": (
        unknown_architecture,
        ["'mamba' is not supported", "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe", "Fix:"],
    ),
    "missing tokenizer": (remove_tokenizer, ["tokenizer", "Fix:"]),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_broken_checkpoint(cli, broken, name):
    """Of weights, config and tokenizer; `tests/models/test_checkpoint.py` has all that is refused."""
    damage, messages = CHECKPOINTS[name]
    damage(broken)
    result = cli("generate", "for", "-n", "4", "-m", broken, "--executor", "torch")
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
