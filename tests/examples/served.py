"""Parses the arguments of examples as `slipstream serve` does, without running the server."""

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
    """Return every option of the command with its value. Raises typer's errors for unknown options."""
    command, *rest = arguments
    assert command == "serve"
    serve = parser().commands[command]  # type: ignore[attr-defined]
    return dict(serve.make_context(command, rest).params)


def documents(path: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all((EXAMPLES / path).read_text(encoding="utf-8")))


def vllm_of(config: Path) -> VllmServer:
    """Return the vLLM server that `slipstream serve --config` would start."""
    settings = options(["serve", "--config", str(config)])
    models, engine = (
        kind(**{each.name: settings[each.name] for each in fields(kind) if each.name in settings})
        for kind in (ModelOptions, EngineOptions)
    )
    assert engine.vllm
    return make_vllm_server(models, engine)
