"""`slipstream tune --engine vllm`: measures settings of vLLM's server, one launch each, beside plain decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.bench.vllm_server import VllmServer
from slipstream.cli import render
from slipstream.cli.engines import EngineOptions, compared, started
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished, writable
from slipstream.core.params import SamplingParams
from slipstream.errors import ServedError

if TYPE_CHECKING:
    from slipstream.bench.results import Result
    from slipstream.cli.tune import TuneModels

LENGTHS = (2, 4, 8)
"""Draft lengths that are tried of drafters that are not lookups; lookups learn theirs."""


def tune_vllm(
    models: TuneModels, params: SamplingParams, texts: PromptOptions, batch: int, rounds: int, seconds: float,
    write: Path | None, engine: EngineOptions, files: OutputOptions,
) -> None:  # fmt: skip
    """Measure, print, and write the choice."""
    writable(write=write)
    files.check()
    entries = texts.check()
    from slipstream.bench.endpoint import Endpoint
    from slipstream.bench.load import Load, LoadArm, LoadConfig, load_test, requests_of
    from slipstream.bench.load_prompts import LoadPrompts
    from slipstream.bench.results import write as save, write_text

    servers = compared(models, engine)
    plain, tried = {"plain": servers.pop("plain")}, candidates(servers, models.draft_tokens is not None)
    sampling = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    asked = LoadPrompts(entries, min(params.max_tokens, 64), sampling, params.seed or 0, texts.template)
    config, load = LoadConfig(rounds=rounds, seconds=seconds, seed=params.seed or 0), Load.of(concurrency=batch)
    found: list[Result] = []
    render.line(f"tune: {', '.join(tried)} in vLLM; {render.counted(len(entries), 'prompt')} of {texts.prompts}")

    def compare(name: str, base: Mapping[str, str]) -> None:
        with started({name: tried[name]}, engine) as place:
            arms: list[LoadArm] = []
            for each, url in {**base, **place}.items():
                arms.append(LoadArm(each, Endpoint(url), load, asked.request, arms[0] if arms else None))
            with render.progress(name, requests_of(arms, config)) as advance:
                found.append(load_test(arms, config, asked.settings, None, advance))
            if files.out is not None:
                save(joined(found), files.out)

    def measure() -> Result:
        with started(plain, engine) as base:
            try:
                for i, name in enumerate(tried):
                    try:
                        compare(name, base)
                    except ServedError as fault:  # this setting does not start, or fails; others may do
                        if not found and i == len(tried) - 1:
                            raise
                        render.message("warning", f"{name} was not measured: {fault}")
            except KeyboardInterrupt as stop:
                if found:
                    stop.result = replace(joined(found), complete=False)  # type: ignore[attr-defined]
                raise
        return joined(found)

    result, code = unfinished(measure)
    best = choice(result.data["arms"])
    finish(result, files)
    settings = configuration(models, tried[best], best, engine) if best else {"engine": "vllm", "drafter": "none"}
    render.line(f"choice: {best or 'none: no setting is faster than plain decoding beyond doubt'}")
    if write is not None:
        write_text(write, json.dumps(settings, indent=1) + "\n", "--write")
        render.line(f"wrote {write}; `slipstream serve --config {write}` uses it")
    raise typer.Exit(code)


def candidates(servers: Mapping[str, VllmServer], fixed: bool) -> dict[str, VllmServer]:
    """The settings to measure, by name: of each server whose length is not learned several lengths, unless the user has
    fixed one."""
    found = {}
    for name, server in servers.items():
        if fixed or "additional_config" in server.values or "draft_tokens=" in name:
            found[name] = server
            continue
        for length in LENGTHS:
            found[f"{name}:draft_tokens={length}"] = replace(server, choice=replace(server.choice, draft_tokens=length))
    return found


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


def configuration(models: TuneModels, server: VllmServer, name: str, engine: EngineOptions) -> dict[str, Any]:
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
