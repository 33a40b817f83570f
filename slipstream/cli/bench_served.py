"""`slipstream bench --serve URL`: load on OpenAI-compatible servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.contenders import LabModels, values_of
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished
from slipstream.cli.options import ModelOptions
from slipstream.core.parameter_declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError

_PANEL = "Servers"


@dataclass(frozen=True)
class ServedOptions:
    """Servers and the load on them."""

    serve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Load this server, as in http://localhost:8000/v1; repeatable: others are compared with the first.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight, one or several, as in 1,16.", rich_help_panel=_PANEL, show_default="1,4,16"
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(help="Requests a second, arriving at random (Poisson), one or several.", rich_help_panel=_PANEL),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of a pass.",
            rich_help_panel=_PANEL,
            show_default="16, or twice as many as are in flight",
        ),
    ] = None
    warm_up: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Requests before the first pass, which do not count.",
            rich_help_panel=_PANEL,
            show_default="as many as are in flight",
        ),
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.", rich_help_panel=_PANEL)] = 300.0
    served_model: Annotated[
        str, typer.Option(help="Model name at the servers.", rich_help_panel=_PANEL, show_default="the first listed")
    ] = ""
    distinct: Annotated[
        bool,
        typer.Option(
            "--distinct", help="Begin each prompt with a line of its own: no prefix cache has it.",
            rich_help_panel=_PANEL,
        ),
    ] = False  # fmt: skip


def short(url: str) -> str:
    """http://localhost:8000/v1 -> localhost:8000"""
    return re.sub(r"^https?://|(/v1)?/*$", "", url)


def changed(options: Any) -> str:
    """Names of the options that are not at their defaults."""
    return ", ".join(each.name for each in fields(options) if getattr(options, each.name) != each.default)


def check_own_settings(models: ModelOptions) -> None:
    """Raise ParameterError for options of models where a running server is named: they have no effect."""
    if given := changed(models):
        raise ParameterError(f"{given} would be ignored: a server brings its own settings", fix="leave these out")


def check_no_server(options: Any, names_one: str) -> None:
    """Raise ParameterError for options of servers where no server is named. names_one: the option that does."""
    if given := changed(options):
        raise ParameterError(f"{given} is given without a server", fix=f"name one: {names_one} URL")


def named(served: ServedOptions, models: LabModels) -> dict[str, str]:
    """Name -> URL of the servers of `--serve`. Raises ParameterError for options of models."""
    check_own_settings(models)
    return {short(url): url for url in served.serve or ()}


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of requests for the sampling parameters that are not at their defaults, but for those of every request."""
    every = ("max_tokens", "temperature", "seed", "logprobs", "draft_tokens")
    values = {name: (getattr(params, name), known.default) for name, known in declared(type(params)).items()}
    return {name: value for name, (value, default) in values.items() if name not in every and value != default}


def bench_served(
    servers: Mapping[str, str],
    served: ServedOptions,
    texts: PromptOptions,
    tokens: int,
    rounds: int,
    seconds: float,
    sampling: Mapping[str, Any],
    seed: int,
    files: OutputOptions,
) -> None:
    """Measure and print. servers: name -> URL. sampling: of the command line; no value of it that changes nothing is
    sent."""
    temperatures = values_of("--temperature", sampling["temperature"], float)
    if len(temperatures) > 1:
        raise ParameterError("a load has one temperature", fix="run the command for each")
    from slipstream.bench.endpoint import Endpoint
    from slipstream.bench.load import Load, LoadArm, LoadConfig, load_test, requests_of
    from slipstream.bench.load_prompts import LoadPrompts

    own = {"requests": served.requests, "warm_up": served.warm_up}
    at_once = served.concurrency or (None if served.rate else "1,4,16")
    loads = [Load.of(concurrency=n, **own) for n in values_of("--concurrency", at_once, int)] if at_once else []
    loads += [Load.of(rate=r, **own) for r in values_of("--rate", served.rate, float)] if served.rate else []
    entries = texts.check()
    files.check()
    config = LoadConfig(rounds=rounds, seconds=seconds, timeout=served.timeout, seed=seed)
    asked = LoadPrompts(
        entries, tokens, {**sampling, "temperature": temperatures[0]}, seed, texts.template, served.distinct
    )
    places = {name: Endpoint(url, served.served_model) for name, url in servers.items()}
    arms: list[LoadArm] = []
    for load in loads:
        base: LoadArm | None = None
        for name, place in places.items():
            arms.append(LoadArm(name, place, load, asked.request, base))
            base = base or arms[-1]
    render.line(f"bench: {render.counted(len(entries), 'prompt')} of {texts.prompts}, {', '.join(servers)}")
    with render.progress("asking", requests_of(arms, config)) as advance:
        result, code = unfinished(lambda: load_test(arms, config, asked.settings, files.out, advance))
    finish(result, files)
    raise typer.Exit(code)
