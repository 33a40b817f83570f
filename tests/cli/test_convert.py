"""`slipstream convert` for draft heads."""

import json
from pathlib import Path

import pytest

from slipstream import zoo


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_embedded_heads_are_written_with_the_command_that_uses_them(cli, folder: Path) -> None:
    written = json.loads(cli("convert", "embedded", "--to", "speculators", "--json", code=0).out)
    assert written == {
        "folder": "embedded-speculators", "dtype": "float16", "method": "eagle3", "draft_tokens": 4, "parallel": False,
        "stored_bytes": (folder / "embedded-speculators" / "model.safetensors").stat().st_size,
    }  # fmt: skip
    config = json.loads((folder / "embedded-speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(zoo.target_dir())
    said = cli("convert", "embedded", "--to", "medusa", "--out", "heads", code=0).said
    assert 'vllm serve TARGET --speculative-config \'{"method": "medusa", "model": "heads"' in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["embedded", "--to", "eagle"], "--to is 'eagle', must be one of eagle3, speculators, specforge, medusa"),
        (["embedded", "--to", "gguf"], "convert_hf_to_gguf.py"),
        (["embedded", "--to", "eagle3", "--out", "."], "'.' is there already"),
        ([str(zoo.target_dir()), "--to", "eagle3"], "holds no EAGLE head"),
        ([str(zoo.target_dir()), "--to", "medusa"], "holds tensors that Medusa heads do not have"),
        ([str(zoo.head_dir("eagle3", zoo.target_dir())), "--to", "medusa"], "holds an EAGLE-3 head"),
        ([str(zoo.head_dir("eagle3", zoo.target_dir())), "--to", "speculators"], "add --target"),
    ],
)
def test_what_cannot_be_converted_is_one_message(refused, arguments: list[str], said: str) -> None:
    message = refused("convert", *arguments)
    assert said in message
    assert "Fix:" in message
