"""Commands on servers, named by a URL or started by `--engine vllm`: the load on them, and options that are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from slipstream.cli import render
from slipstream.cli.engines import EngineOptions
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished, values_of
from slipstream.cli.option_groups import option
from slipstream.core.parameter_declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.bench.load import Load
    from slipstream.bench.load_client import LoadPrompts


@dataclass(frozen=True)
class LoadOptions:
    PANEL: ClassVar[str] = "Servers"
    concurrency: str | None = option(None, "Requests in flight, one or several, as in 1,16.", shown="1,4,16")
    rate: str | None = option(None, "Requests a second, arriving at random (Poisson), one or several.")
    requests: int | None = option(None, "Requests of a pass.", shown="16, or twice as many as are in flight", min=1)
    warm_up: int | None = option(
        None, "Requests before the first pass, which do not count.", shown="as many as are in flight", min=0
    )
    timeout: float = option(300.0, "Seconds that a request may take.")
    served_model: str = option("", "Model name at the servers.", shown="the first listed")
    distinct: bool = option(False, "Begin each prompt with a line of its own: no prefix cache has it.")

    def loads(self) -> list[Load]:
        from slipstream.bench.load import LEAST, Load

        given = self.concurrency or (None if self.rate else "1,4,16")
        kinds: list[tuple[int | None, float | None]] = []
        kinds += [(n, None) for n in values_of("--concurrency", given, int)] if given else []
        kinds += [(None, rate) for rate in values_of("--rate", self.rate, float)] if self.rate else []
        loads = []
        for n, rate in kinds:
            many = self.requests or max(LEAST, 2 * (n or 0))
            loads.append(Load(n, rate, many, (n or 2) if self.warm_up is None else self.warm_up))
        return loads

    def asked(self, texts: PromptOptions, tokens: int, params: SamplingParams) -> LoadPrompts:
        """The chosen prompts as requests."""
        from slipstream.bench.load_client import LoadPrompts

        sampling = {"temperature": params.temperature, **request_fields(params)}
        return LoadPrompts(texts.check(), tokens, sampling, params.seed or 0, texts.template, self.distinct)


def of_servers(
    url: object,
    flag: str,
    models: Any,
    engine: EngineOptions,
    load: Any = None,
    local: Mapping[str, bool] | None = None,
) -> bool:
    """Whether a command is about servers: `url` is what the option `flag` names, or vLLM's are started. Raises
    ParameterError for options that would be ignored. models, load: groups of options, for models and for servers;
    local: options that have no meaning for servers, and whether they were given."""
    if url and engine.vllm:
        raise ParameterError(f"{flag} and --engine are given", fix="give one of them")
    if not url and not engine.vllm:
        if load is not None and (given := changed(load)):
            raise ParameterError(f"{given} is given without a server", fix=f"name one: {flag} URL")
        return False
    if url and (given := changed(models)):
        raise ParameterError(f"{given} would be ignored: a server brings its own settings", fix="leave these out")
    if unused := ", ".join(name for name, is_given in (local or {}).items() if is_given):
        raise ParameterError(f"{unused} would be ignored: it has no meaning for servers", fix="leave it out")
    return True


def changed(options: Any) -> str:
    return ", ".join(each.name for each in fields(options) if getattr(options, each.name) != each.default)


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of requests for the sampling parameters that are not at their defaults, but for those of every request."""
    every = ("max_tokens", "temperature", "seed", "logprobs", "draft_tokens")
    values = {name: (getattr(params, name), known.default) for name, known in declared(type(params)).items()}
    return {name: value for name, (value, default) in values.items() if name not in every and value != default}


def short(url: str) -> str:
    """http://localhost:8000/v1 -> localhost:8000"""
    return re.sub(r"^https?://|(/v1)?/*$", "", url)


def bench_servers(
    servers: Mapping[str, str], load: LoadOptions, texts: PromptOptions, params: SamplingParams, rounds: int,
    seconds: float, files: OutputOptions,
) -> None:  # fmt: skip
    """Measure each server under each load, and print; the others are compared with the first. servers: name -> URL."""
    from slipstream.bench.endpoint import Endpoint
    from slipstream.bench.load import LoadArm, LoadConfig, load_test, requests_of

    loads, asked = load.loads(), load.asked(texts, params.max_tokens, params)
    files.check()
    config = LoadConfig(rounds=rounds, seconds=seconds, timeout=load.timeout, seed=params.seed or 0)
    arms: list[LoadArm] = []
    for each in loads:
        base: LoadArm | None = None
        for name, url in servers.items():
            arms.append(LoadArm(name, Endpoint(url, load.served_model), each, asked.request, base))
            base = base or arms[-1]
    render.line(f"bench: {render.counted(len(asked.entries), 'prompt')} of {texts.prompts}, {', '.join(servers)}")
    with render.progress("asking", requests_of(arms, config)) as advance:
        result, code = unfinished(lambda: load_test(arms, config, asked.settings, files.out, advance))
    finish(result, files)
    raise typer.Exit(code)
