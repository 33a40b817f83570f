"""`slipstream tune` on servers: what the counters of a running one say, and settings of vLLM's, a launch each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from slipstream.bench.vllm_server import VllmServer
from slipstream.cli import render
from slipstream.cli.engines import EngineOptions, compared, started
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished, writable
from slipstream.cli.option_groups import option
from slipstream.cli.servers import LoadOptions, arms_of
from slipstream.core.params import SamplingParams
from slipstream.errors import ServedError

if TYPE_CHECKING:
    from slipstream.bench.results import Result
    from slipstream.cli.tune import TuneModels

LENGTHS = (2, 4, 8)
"""Draft lengths that are tried of drafters that are not lookups; lookups learn theirs."""
MOST_TOKENS = 64
"""Most new tokens of a request."""


@dataclass(frozen=True)
class RunningServer:
    """A running server."""

    PANEL: ClassVar[str] = "A running server"
    base_url: str | None = option(None, "Watch the counters of this server instead of models.", metavar="URL")
    watch: float = option(10.0, "Seconds to watch; nothing is sent.", min=0)
    c: float = option(0.05, "Cost of a draft token, in decode steps.", "--c", min=0)


def examine(server: RunningServer, files: OutputOptions) -> None:
    """Watch a running server, and print what its counters say."""
    files.check()
    from slipstream.bench.endpoint import Endpoint
    from slipstream.plan.diagnosis_served import watch

    place = Endpoint(server.base_url or "")
    render.line(f"watching {place.base_url} for {server.watch:g} s; nothing is sent")
    result, code = unfinished(lambda: watch(place, server.watch, server.c, files.out))
    finish(result, files)
    raise typer.Exit(code)


def tune_vllm(
    models: TuneModels, load: LoadOptions, params: SamplingParams, texts: PromptOptions, rounds: int, seconds: float,
    write: Path | None, engine: EngineOptions, files: OutputOptions,
) -> None:  # fmt: skip
    """Measure settings of vLLM's server beside plain decoding, print, and write the choice."""
    writable(write=write)
    files.check()
    loads, asked = load.loads("1"), load.asked(texts, min(params.max_tokens, MOST_TOKENS), params)
    from slipstream.bench.endpoint import Endpoint
    from slipstream.bench.load import LoadConfig, load_test, requests_of
    from slipstream.bench.results import write as save, write_text

    servers = compared(models, engine)
    plain, tried = {"plain": servers.pop("plain")}, candidates(servers, models.draft_tokens is not None)
    config = LoadConfig(rounds=rounds, seconds=seconds, timeout=load.timeout, seed=params.seed or 0)
    done: list[Result] = []
    prompts = render.counted(len(asked.entries), "prompt")
    render.line(f"tune: {', '.join(tried)} in vLLM; {prompts} of {texts.prompts}")

    def compare(name: str, base: Mapping[str, str]) -> None:
        with started({name: tried[name]}, engine) as place:
            arms = arms_of({each: Endpoint(url) for each, url in {**base, **place}.items()}, loads, asked)
            with render.progress(name, requests_of(arms, config)) as advance:
                done.append(load_test(arms, config, asked.settings, None, advance))
            if files.out is not None:
                save(joined(done), files.out)

    def measure() -> Result:
        with started(plain, engine) as base:
            try:
                for i, name in enumerate(tried):
                    try:
                        compare(name, base)
                    except ServedError as fault:  # this setting does not start, or fails; others may do
                        if not done and i == len(tried) - 1:
                            raise
                        render.message("warning", f"{name} was not measured: {fault}")
            except KeyboardInterrupt as stop:
                if done:
                    stop.result = replace(joined(done), complete=False)  # type: ignore[attr-defined]
                raise
        return joined(done)

    result, code = unfinished(measure)
    best = choice(result.data["arms"])
    finish(result, files)
    settings = configuration(models, tried[best], engine) if best else {"engine": "vllm", "drafter": "none"}
    render.line(f"choice: {best or 'none: no setting is faster than plain decoding beyond doubt'}")
    if write is not None:
        write_text(write, json.dumps(settings, indent=1) + "\n", "--write")
        render.line(f"wrote {write}; `slipstream serve --config {write}` uses it")
    raise typer.Exit(code)


def candidates(servers: Mapping[str, VllmServer], fixed: bool) -> dict[str, VllmServer]:
    """The settings to measure, by name: of each server whose length is not learned several lengths, unless the user has
    fixed one."""
    tried = {}
    for name, server in servers.items():
        if fixed or "additional_config" in server.values or "draft_tokens=" in name:
            tried[name] = server
            continue
        for length in LENGTHS:
            tried[f"{name}:draft_tokens={length}"] = replace(server, choice=replace(server.choice, draft_tokens=length))
    return tried


def joined(results: list[Result]) -> Result:
    """The comparisons of all settings as one result, each with the plain decoding that was measured beside it."""
    whole = replace(results[0], data={"arms": []}, warnings=[])
    for result in results:
        first = len(whole.data["arms"])
        whole.data["arms"] += [
            arm | {"against": None if arm["against"] is None else arm["against"] + first} for arm in result.data["arms"]
        ]
        whole.warnings += [warning for warning in result.warnings if warning not in whole.warnings]
        whole.complete = whole.complete and result.complete
    return whole


def choice(arms: list[dict[str, Any]]) -> str | None:
    """The fastest setting whose 95 % interval is above 1; None if there is none."""
    paying = [arm for arm in arms if arm["ratio"] and (arm["ratio"]["low"] or 0) > 1]
    best = max(paying, key=lambda arm: float(arm["ratio"]["value"]), default=None)
    return None if best is None else str(best["name"])


def configuration(models: TuneModels, server: VllmServer, engine: EngineOptions) -> dict[str, Any]:
    """What `--config` reads to start this server again."""
    used = server.choice
    made: dict[str, Any] = {"engine": "vllm", "target": models.target, "drafter": used.drafter.replace("+", ",")}
    if used.draft is not None and "additional_config" not in server.values:
        made["draft"] = models.draft_model
    made["draft_tokens"] = used.draft_tokens
    if used.options:
        made["drafter_option"] = [f"{key}={value}" for key, value in used.options.items()]
    if engine.vllm_option:
        made["vllm_option"] = list(engine.vllm_option)
    return made
