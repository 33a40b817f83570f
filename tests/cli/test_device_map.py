"""`--device-map`: where transformers puts the layers of the target."""

from pathlib import Path

import pytest
import typer

from slipstream.cli.loading import checked_arguments
from slipstream.cli.main import app
from slipstream.cli.options import ModelOptions
from slipstream.cli.serve import kv_tokens
from slipstream.drafters.draft_plan import DraftPlan
from tests.targets.huggingface.architectures import random_model

COMMANDS = ("generate", "chat", "serve", "bench", "verify", "demo", "trace", "tune")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_loads_a_target_has_the_options_of_models(command: str) -> None:
    known = {p.opts[0] for p in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    assert {"--device-map", "--trust-remote-code"} <= known


def test_the_map_is_for_the_target_and_code_is_never_trusted_for_a_draft() -> None:
    _, given = checked_arguments(ModelOptions(device_map="auto", trust_remote_code=True))
    assert (given["device_map"], given["trust_remote_code"]) == ("auto", True)
    assert not any(name.startswith("draft") and ("map" in name or "remote" in name) for name in given)


def test_a_server_keeps_the_size_of_the_cache_that_was_asked_for(tmp_path: Path) -> None:
    """Also where nothing is foretold: over several devices, and for a model that only transformers runs."""
    random_model("stablelm").save_pretrained(tmp_path)
    for models in ({"device_map": "auto"}, {"target": str(tmp_path), "drafter": "ngram"}):
        assert kv_tokens(ModelOptions(**models, kv_tokens=640), DraftPlan.of("ngram"), 4) == 640  # type: ignore[arg-type]
        assert kv_tokens(ModelOptions(**models), DraftPlan.of("ngram"), 4) is None  # type: ignore[arg-type]


def test_a_target_that_transformers_places_writes_what_our_decoder_writes(cli, pair: list[str]) -> None:
    pytest.importorskip("accelerate")
    command = ["generate", "def add(", "-n", "8", "-m", pair[1], "--drafter", "ngram", "--dtype", "float64"]
    wanted, placed = cli(*command, "--executor", "torch"), cli(*command, "--device-map", "cpu")
    assert (wanted.code, placed.code) == (0, 0), placed.err
    assert placed.out == wanted.out
    assert "a device_map was given: transformers runs it instead" in placed.said
