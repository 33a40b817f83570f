"""`slipstream convert` for draft heads. `test_bad_input` has what cannot be converted."""

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
