"""Commands on GGUF files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream.cli.loading import describe_target
from slipstream.cli.options import ModelOptions
from slipstream.cli.serve import kv_tokens
from slipstream.drafters.draft_plan import DraftPlan
from tests.targets.huggingface.architectures import random_model
from tests.tiny_checkpoints import Tiny

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target in float32."""
    return convert_to_gguf(tiny.target, tmp_path_factory.mktemp("converted") / "tiny.gguf", "f32").file


def test_every_command_takes_the_file(cli, tiny, file: Path) -> None:
    info = json.loads(cli("info", file, "--json").out)
    assert (info["executor"], info["architecture"], info["parameters"]) == ("native", "llama", 67824)
    assert (info["stored_bytes"], info["loaded_bytes"]) == ({"F32": 271296}, 271296)
    wanted = cli("generate", "-m", tiny.target, "--executor", "torch", "--drafter", "none", "def add(", "-n", "12")
    for arguments in (["--drafter", "suffix"], ["-md", file], ["-md", tiny.draft], ["--drafter", "none"]):
        done = cli("generate", "-m", file, "--threads", "1", *arguments, "def add(", "-n", "12", code=0)
        assert done.out == wanted.out
        assert "native on cpu" in done.said


@pytest.mark.parametrize(("settings", "tokens"), [({"kv_tokens": 512}, 512), ({}, 8 * 192)])
def test_a_server_reserves_what_is_usual(file: Path, settings: dict[str, Any], tokens: int) -> None:
    models = replace(ModelOptions(target=str(file)), **settings)
    assert kv_tokens(models, describe_target(models), DraftPlan.of("suffix"), 8) == tokens


def test_a_server_keeps_the_size_of_the_cache_that_was_asked_for(tmp_path: Path) -> None:
    """Also where nothing is foretold: over several devices, and for a model that only transformers runs."""
    random_model("stablelm").save_pretrained(tmp_path)
    for given in ({"device_map": "auto"}, {"target": str(tmp_path), "drafter": "ngram"}):
        for tokens in (640, None):
            models = ModelOptions(**given, kv_tokens=tokens)  # type: ignore[arg-type]
            assert kv_tokens(models, describe_target(models), DraftPlan.of("ngram"), 4) == tokens
