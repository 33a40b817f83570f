"""`--device-map`: where transformers puts the layers of the target."""

import json
from pathlib import Path

import pytest
import typer

from slipstream.cli.loading import checked_arguments
from slipstream.cli.main import app
from slipstream.cli.options import ModelOptions
from slipstream.cli.serve import kv_tokens
from slipstream.drafters.draft_plan import DraftPlan
from slipstream.errors import ParameterError
from slipstream.models.load_settings import LoadSettings
from tests.cli.conftest import Result
from tests.targets.huggingface.architectures import random_model

COMMANDS = ("generate", "chat", "serve", "bench", "verify", "demo", "trace", "tune")
MAP = {
    "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_loads_a_target_has_the_options_of_models(command: str) -> None:
    known = {p.opts[0] for p in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    assert {"--device-map", "--trust-remote-code"} <= known


def test_a_map_is_a_word_or_a_json_object() -> None:
    assert LoadSettings(device_map="auto").device_map == "auto"
    assert LoadSettings(device_map=' {"model": 0, "lm_head": "cpu"}').device_map == {"model": 0, "lm_head": "cpu"}


@pytest.mark.parametrize("text", ["{", '{"model": null}', '{"model": true}', '{"model": -1}', '{"a": {}}', "{}"])
def test_a_map_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ParameterError, match="write auto, or each module's device"):
        LoadSettings(device_map=text)


def test_the_map_is_for_the_target_and_code_is_never_trusted_for_a_draft() -> None:
    _, given = checked_arguments(ModelOptions(device_map=json.dumps(MAP), trust_remote_code=True))
    assert (given["device_map"], given["trust_remote_code"]) == (MAP, True)
    assert not any(name.startswith("draft") and ("map" in name or "remote" in name) for name in given)


def test_a_server_keeps_the_size_of_the_cache_that_was_asked_for(tmp_path: Path) -> None:
    """Also where nothing is foretold: over several devices, and for a model that only transformers runs."""
    random_model("stablelm").save_pretrained(tmp_path)
    for models in ({"device_map": "auto"}, {"target": str(tmp_path), "drafter": "ngram"}):
        assert kv_tokens(ModelOptions(**models, kv_tokens=640), DraftPlan.of("ngram"), 4) == 640  # type: ignore[arg-type]
        assert kv_tokens(ModelOptions(**models), DraftPlan.of("ngram"), 4) is None  # type: ignore[arg-type]


def test_an_offloaded_target_writes_what_it_writes_in_memory(cli, pair: list[str], tmp_path: Path) -> None:
    """The map is given on the command line, and in a file of options."""
    pytest.importorskip("accelerate")
    target = pair[1]
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"device_map": MAP}))

    def text(*more: object) -> Result:
        command = ["generate", "def add(", "-n", "8", "-m", target, "--drafter", "ngram", "--dtype", "float64"]
        done: Result = cli(*command, *more)
        assert done.code == 0, done.err
        return done

    wanted = text("--executor", "torch").out
    for more in (["--device-map", json.dumps(MAP)], ["--config", file]):
        done = text(*more)
        assert done.out == wanted
        assert "a device_map was given: transformers runs it instead" in done.said
