"""What `slipstream serve` understands of an example's arguments, without running it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from slipstream.cli.engines import EngineOptions, make_vllm_server
from slipstream.cli.main import parser
from slipstream.cli.options import ModelOptions
from slipstream.measure.vllm_server import VllmServer

EXAMPLES = Path(__file__).parents[2] / "examples"


def options(arguments: list[str]) -> dict[str, Any]:
    """Every option of the command with its value. Raises typer's errors for what it does not have."""
    command, *rest = arguments
    assert command == "serve"
    serve = parser().commands[command]  # type: ignore[attr-defined]
    return dict(serve.make_context(command, rest).params)


def documents(path: str) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((EXAMPLES / path).read_text(encoding="utf-8")))


def vllm_of(config: Path) -> VllmServer:
    """The server of `slipstream serve --config`, whose engine is vLLM."""
    settings = options(["serve", "--config", str(config)])
    models, engine = (
        kind(**{each.name: settings[each.name] for each in fields(kind) if each.name in settings})
        for kind in (ModelOptions, EngineOptions)
    )
    assert engine.vllm
    return make_vllm_server(models, engine)
