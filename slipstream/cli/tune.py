"""`slipstream tune`: chooses drafter and draft length for given prompts on this machine, reads the metrics of a
running server, or starts vLLM's server with each of several settings and compares them."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import typer

from slipstream.checkpoints.load_settings import DEFAULTS
from slipstream.checkpoints.weight_formats import BY_ROLE
from slipstream.cli import render
from slipstream.cli.bench import TrafficOptions
from slipstream.cli.engines import EngineOptions, is_about_servers, list_changed, list_servers, start_servers
from slipstream.cli.loading import check_drafters, load, name_backend
from slipstream.cli.measuring import LabModels, OutputOptions, PromptOptions, finish, keep_unfinished, run
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import SamplingOptions
from slipstream.core.params import SamplingParams
from slipstream.core.strict import JsonObject
from slipstream.drafters.draft_plan import WITH_DRAFT
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import LoadError, ParameterError, ServedError
from slipstream.measure.configs import Contender, DrafterChoice, slipstream
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.lab_settings import TuneConfig
from slipstream.measure.measurements import ServedArm, TrafficData
from slipstream.measure.results import Result, check_writable, write as save, write_text
from slipstream.measure.vllm_server import VllmServer

LONGEST = 8
"""Maximum draft length considered for drafters that are not lookups."""


@dataclass(frozen=True)
class TuneModels(LabModels):
    """`LabModels` that by default try all tunable drafters, and the target's default drafters."""

    def specs(self) -> list[str]:
        if self.drafter:
            return super().specs()
        tried = {name: spec for name, spec in DRAFTERS.items() if spec.tuned}
        names = [name for name, spec in tried.items() if self.draft_model or not spec.reads_draft]
        return list(dict.fromkeys((*names, self.usual)))

    def longest(self) -> list[Contender]:
        """Return contenders with the longest draft length to consider; by default, the draft model in more formats."""
        given = self.contenders()
        if self.draft_tokens is None:
            given = [
                c if "draft_tokens=" in spec else replace(c, draft_tokens=max(c.draft_tokens, LONGEST))
                for spec, c in zip(self.specs(), given, strict=True)
            ]
        for name in () if self.drafter or self.draft_quantize else ("none", *BY_ROLE):
            given += [
                replace(c, label=f"{c.label} quantize={name}", options=c.options | {"quantize": name})
                for c in given
                if c.label == WITH_DRAFT and name != (self.of_draft().quantize or "none") and self._runs(name)
            ]
        return given

    def _runs(self, quantize: str) -> bool:
        """Return whether our own kernels run the draft in this format."""
        from slipstream.targets.describe import describe

        assert self.draft_model is not None
        with suppress(LoadError, ParameterError):
            return describe(self.draft_model, replace(self, draft_quantize=quantize).of_draft()).runner == "native"
        return False


@dataclass(frozen=True)
class RunningServer:
    PANEL: ClassVar[str] = "A running server"
    base_url: str | None = option(None, "Watch the metrics of this server instead of measuring models.", metavar="URL")
    watch: float = option(10.0, "Seconds to watch the server; no requests are sent to it.", min=0)
    c: float = option(0.05, "Time of drafting a token, relative to a decode step.", "--c", min=0)
    follow: bool = option(False, "Keep watching, and report when speculation stops paying and when it pays again.")
    limit: float = option(0.0, "Seconds after which --follow stops; 0: at Ctrl-C.", "--for", min=0)


@expand_groups
def tune(
    models: TuneModels,
    sampling: SamplingOptions,
    texts: PromptOptions,
    *,
    config: TuneConfig,
    write: Path | None = option(None, "Write the best setting to this file, for --config of generate, chat and serve."),
    engine: EngineOptions,
    files: OutputOptions,
    server: RunningServer,
    load_options: TrafficOptions,
) -> None:
    """Choose drafter and draft length for your prompts on this machine.

    A drafter that is slower than plain decoding is never chosen. Each drafter runs once at the maximum draft length
    (--draft-tokens). A formula predicts shorter drafts, and the best settings are timed against plain decoding. The
    report says what limits each drafter (an expensive draft, low acceptance, the cost of verifying, the host), and what
    helps.

    With --base-url, watch the metrics of a running server of vLLM, SGLang, llama.cpp or Slipstream under its present
    load, and recommend a draft length. --follow keeps watching and prints a line for each change (--json: as JSON); the
    exit code is 1 if speculation does not pay at the end. The API key is read from OPENAI_API_KEY.

    With --engine vllm, start vLLM's server for each drafter and length, and compare it with vLLM's plain decoding.
    """
    local = {"--batch": config.batch != 1, "--confirm": config.confirm != 3}
    if server.base_url is not None:
        local |= {"--write": write is not None, "--rounds": config.rounds != 5, "--seconds": config.seconds != 45}
        local |= {given: True for group in (sampling, texts, load_options) if (given := list_changed(group))}
    elif given := list_changed(server):
        raise ParameterError(f"{given} was given, but it has an effect only for servers", fix="add --base-url URL")
    if is_about_servers(server.base_url, "--base-url", models, engine, load_options, local):
        if server.base_url is not None:
            return examine(server, files)
        params = sampling.params()
        return tune_vllm(models, load_options, params, texts, config, write, engine, files)
    params = sampling.params()
    if write is not None:
        check_writable(write, "--write")
    files.check()
    texts.check()
    contenders = models.longest()
    config = replace(config, tokens=min(params.max_tokens, 64), seed=params.seed or 0, params=params)
    if not contenders:
        raise ParameterError("no drafter was given, only none", fix="give some: --drafter model --drafter ngram")
    from slipstream.measure import tuning

    check_drafters(models, [(each.drafter, each.options) for each in contenders])
    llm = load(models.one("none"), quiet=files.as_json, asked=[params])
    chosen = texts.load(llm, config.tokens)
    names = ", ".join(c.label for c in contenders)
    render.line(f"tune: {names}; {chosen.size} of {chosen.origin}, target={models.target}, {name_backend(llm.target)}")
    settings = {name: value for name, value in models.keywords.items() if value != getattr(DEFAULTS, name)}
    settings |= {} if models.rule == TuneModels.rule else {"rule": models.rule}
    origin = DrafterChoice("none", target=models.target, draft=models.draft_model, engine=settings)
    result, code = run(
        files, "measuring (interleaved)", tuning.count_steps(llm, contenders, chosen, config),
        lambda advance: tuning.tune(llm, contenders, chosen, config, files.out, advance, origin),
    )  # fmt: skip
    configs = result.data.configs
    if write is not None and configs is not None:
        write_text(write, json.dumps(configs.slipstream, indent=1) + "\n", "--write")
        render.line(f'wrote {write}; `slipstream generate --config {write} "..."` uses it')
    raise typer.Exit(code)


LENGTHS = (2, 4, 8)
"""Draft lengths to try for drafters with a model; drafters without a model learn their draft length."""
MOST_TOKENS = 64
"""Largest number of new tokens of a request."""


def examine(server: RunningServer, files: OutputOptions) -> None:
    files.check()
    place = Endpoint(server.base_url or "")
    if server.follow:
        raise typer.Exit(asyncio.run(follow_changes(place, server, files)))
    if server.limit:
        raise ParameterError("--for was given without --follow", fix="add --follow, or give --watch SECONDS")
    from slipstream.measure.diagnosis_served import watch

    render.line(f"watching {place.base_url} for {server.watch:g} s; nothing is sent")
    result, code = keep_unfinished(lambda: watch(place, server.watch, server.c, files.out))
    finish(result, files)
    raise typer.Exit(code)


async def follow_changes(place: Endpoint, server: RunningServer, files: OutputOptions) -> int:
    """Print a line for each change. Return the exit code: 1 if speculation does not pay in the end."""
    if files.out is not None or not server.watch:
        given = "--out" if files.out is not None else "--watch 0"
        raise ParameterError(
            f"{given} cannot be used with --follow",
            fix="give --json for JSON lines, and --watch SECONDS for the time of each verdict",
        )
    from slipstream.measure.served_watch import COSTS, follow, line_of

    render.line(f"following {place.base_url}, a verdict every {server.watch:g} s; nothing is sent")
    state = ""
    async for event in follow(place, server.watch, server.c, server.limit):
        state = event["event"]
        print(json.dumps(event) if files.as_json else line_of(event), flush=True)
    return int(state == COSTS)


def tune_vllm(
    models: TuneModels, load: TrafficOptions, params: SamplingParams, texts: PromptOptions, passes: TuneConfig,
    write: Path | None, engine: EngineOptions, files: OutputOptions,
) -> None:  # fmt: skip
    """Compare settings of vLLM's server with plain decoding, print the results, and write the best setting."""
    if write is not None:
        check_writable(write, "--write")
    files.check()
    loads, asked = load.loads("1"), load.make_requests(texts, min(params.max_tokens, MOST_TOKENS), params)
    from slipstream.measure.traffic import TrafficConfig, count_requests, line_up_servers, measure_traffic
    from slipstream.measure.tuning import choose

    servers = list_servers(models, engine)
    plain, tried = {"plain": servers.pop("plain")}, list_candidates(servers, models.draft_tokens is not None)
    config = TrafficConfig(rounds=passes.rounds, seconds=passes.seconds, timeout=load.timeout, seed=params.seed or 0)
    done: list[Result] = []
    prompts = render.spell(len(asked.entries), "prompt")
    render.line(f"tune: {', '.join(tried)} in vLLM; {prompts} of {texts.prompts}")

    def compare(name: str, base: Mapping[str, str]) -> None:
        with start_servers({name: tried[name]}, engine) as place:
            arms = line_up_servers({each: Endpoint(url) for each, url in {**base, **place}.items()}, loads, asked)
            with render.progress(name, count_requests(arms, config)) as advance:
                done.append(measure_traffic(arms, config, asked.settings, None, advance))
            if files.out is not None:
                save(join_results(done), files.out)

    def measure() -> Result:
        with start_servers(plain, engine) as base:
            try:
                for i, name in enumerate(tried):
                    try:
                        compare(name, base)
                    except ServedError as fault:  # a server with this setting fails; others may run
                        if not done and i == len(tried) - 1:
                            raise
                        render.message("warning", f"{name} was not measured: {fault}")
            except KeyboardInterrupt as stop:
                if done:
                    stop.result = replace(join_results(done), complete=False)  # type: ignore[attr-defined]
                raise
        return join_results(done)

    result, code = keep_unfinished(measure)
    paid = [arm for arm in result.data.arms if arm.ratio and (arm.counters or {}).get("accepted_tokens", True)]
    best = choose(paid, lambda arm: arm.ratio)
    finish(result, files)
    settings = write_configuration(models, tried[best.name], engine) if best else {"engine": "vllm", "drafter": "none"}
    name = best.name if best else "none: no setting is significantly faster than plain decoding"
    render.line(f"choice: {name}")
    if write is not None:
        write_text(write, json.dumps(settings, indent=1) + "\n", "--write")
        render.line(f"wrote {write}; `slipstream serve --config {write}` uses it")
    raise typer.Exit(code)


def list_candidates(servers: Mapping[str, VllmServer], fixed: bool) -> dict[str, VllmServer]:
    """Return name -> server, for each setting to measure. A server that does not learn its draft length is measured
    with several lengths, or only with the length that the user fixed."""
    tried = {}
    for name, server in servers.items():
        if fixed or "additional_config" in server.values or "draft_tokens=" in name:
            tried[name] = server
            continue
        for length in LENGTHS:
            tried[f"{name}:draft_tokens={length}"] = replace(server, choice=replace(server.choice, draft_tokens=length))
    return tried


def join_results(results: list[Result]) -> Result:
    """Join the comparisons into one result. Each setting is compared with plain decoding in its own run."""
    arms: list[ServedArm] = []
    for result in results:
        first = len(arms)
        arms += [replace(a, against=None if a.against is None else a.against + first) for a in result.data.arms]
    warnings = dict.fromkeys(warning for result in results for warning in result.warnings)
    complete = all(result.complete for result in results)
    return replace(results[0], data=TrafficData(arms), warnings=list(warnings), complete=complete)


def write_configuration(models: TuneModels, server: VllmServer, engine: EngineOptions) -> JsonObject:
    """Write the configuration with which `--config` starts this server again, with the names that the user gave."""
    options = {"vllm_option": list(engine.vllm_option)} if engine.vllm_option else {}
    return {
        "engine": "vllm",
        **slipstream(replace(server.choice, target=models.target, draft=models.draft_model)),
        **options,
    }
