"""`slipstream doctor --base-url URL`, `slipstream tune --base-url URL`: what a running server's counters say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from slipstream.cli import render
from slipstream.cli.bench_served import check_own_settings, request_fields
from slipstream.cli.contenders import LabModels, values_of
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished
from slipstream.cli.options import SamplingOptions
from slipstream.errors import ParameterError

_PANEL = "A running server"


@dataclass(frozen=True)
class RunningServer:
    """The server, and what is sent to it."""

    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Examine this server instead of models.", rich_help_panel=_PANEL)
    ] = None
    served_model: Annotated[
        str, typer.Option(help="Model name at the server.", rich_help_panel=_PANEL, show_default="the first listed")
    ] = ""
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, a small and a large number.", rich_help_panel=_PANEL)
    ] = "1,8"
    watch: Annotated[
        float | None, typer.Option(min=0, help="Send nothing, watch for so many seconds.", rich_help_panel=_PANEL)
    ] = None
    c: Annotated[
        float, typer.Option("--c", min=0, help="Cost of a draft token, in decode steps.", rich_help_panel=_PANEL)
    ] = 0.05


def examine(
    server: RunningServer, models: LabModels, sampling: SamplingOptions, texts: PromptOptions, rounds: int,
    seconds: float, files: OutputOptions, given: dict[str, bool],
) -> None:  # fmt: skip
    """Measure and print. given: options of this command that have no meaning here, and whether they were given."""
    check_own_settings(models)
    if unused := ", ".join(name for name, is_given in given.items() if is_given):
        raise ParameterError(f"{unused} would be ignored with --base-url", fix="leave it out")
    params, numbers = sampling.params(), values_of("--concurrency", server.concurrency, int)
    files.check()
    entries = texts.check()
    from slipstream.bench.endpoint import Endpoint
    from slipstream.bench.load import Load, LoadArm, LoadConfig, load_test, requests_of
    from slipstream.bench.load_prompts import LoadPrompts
    from slipstream.plan.diagnosis_served import KIND, diagnose_served, watch

    place, c = Endpoint(server.base_url or "", server.served_model), server.c
    config = LoadConfig(rounds=rounds, seconds=seconds, seed=params.seed or 0)
    body = {"temperature": params.temperature, **request_fields(params)}
    asked = LoadPrompts(entries, min(params.max_tokens, 64), body, config.seed, texts.template)
    loads = [Load.of(n, requests=2 * n + 2) for n in sorted(numbers)]
    arms = [LoadArm("the server", place, load, asked.request) for load in loads]
    watched = server.watch
    what, steps = ("asking", requests_of(arms, config)) if watched is None else ("watching", 1)
    render.line(f"{what} {place.base_url}")
    with render.progress(what, steps) as advance:
        result, code = unfinished(
            lambda: load_test(
                arms, config, asked.settings | {"c": c}, files.out, advance, KIND,
                lambda found: {"diagnosis": diagnose_served(found, c)},
            )
            if watched is None
            else watch(place, watched, c, files.out)
        )  # fmt: skip
    finish(result, files)
    raise typer.Exit(code)
