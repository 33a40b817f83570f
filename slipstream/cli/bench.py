"""`slipstream bench`: compares drafters with plain decoding in one interleaved run, or measures servers under load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import typer

from slipstream.cli import render
from slipstream.cli.engines import EngineOptions, is_about_servers, list_servers, request_fields, start_servers
from slipstream.cli.loading import check_drafters, load, name_backend
from slipstream.cli.measuring import LabModels, OutputOptions, PromptOptions, make_contender, parse_values, run
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import check_length
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError
from slipstream.measure.configs import Contender
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.lab_settings import BenchConfig
from slipstream.settings import AUTO

if TYPE_CHECKING:
    from slipstream.measure.traffic import Traffic
    from slipstream.measure.traffic_client import TrafficPrompts


@dataclass(frozen=True)
class BenchModels(LabModels):
    """`LabModels` with several draft lengths."""

    PANEL: ClassVar[str] = "Speculation"
    draft_tokens: str | None = option(
        None, "Draft lengths (K) to measure: one or several, as in 2,4 or 2:8.", "--draft-tokens", "-k", shown=AUTO
    )

    def contenders(self, adaptive: bool = False) -> list[Contender]:
        """Return a contender for each drafter with each draft length."""
        lengths = (
            (None,) if self.draft_tokens is None else parse_values("--draft-tokens", self.draft_tokens, check_length)
        )
        contenders: dict[tuple[str, int | str], Contender] = {}
        for spec, length in product(self.specs(), lengths):
            one = make_contender(self, spec, adaptive, draft_tokens=None if length is None else str(length))
            contenders[one.label, one.length] = one
        return list(contenders.values())


@dataclass(frozen=True)
class BenchPrompts(PromptOptions):
    """Prompts of `bench`: more prompts than in other commands make the confidence intervals narrower."""

    count: int = 8


@dataclass(frozen=True)
class TrafficOptions:
    PANEL: ClassVar[str] = "Servers"
    concurrency: str | None = option(
        None, "Number of concurrent requests, one or several, as in 1,16.", shown="bench: 1,4,16; tune: 1"
    )
    rate: str | None = option(None, "Requests per second, at random times (Poisson): one or several, as in 1,4.")
    requests: int | None = option(None, "Requests in each pass.", shown="16, or twice --concurrency", min=1)
    warm_up: int | None = option(
        None, "Requests before the first pass, which are not measured.", shown="--concurrency", min=0
    )
    timeout: float = option(300.0, "Seconds after which a request counts as failed.")
    served_model: str = option("", "Name of the model at the servers.", shown="the first that /v1/models lists")
    distinct: bool = option(False, "Begin each prompt with a different line, so that no prefix cache helps.")

    def loads(self, at_once: str) -> list[Traffic]:
        """Return the loads to measure. at_once: requests in flight if neither --concurrency nor --rate is given."""
        from slipstream.measure.traffic import LEAST, Traffic

        given = self.concurrency or (None if self.rate else at_once)
        kinds: list[tuple[int | None, float | None]] = []
        kinds += [(n, None) for n in parse_values("--concurrency", given, int)] if given else []
        kinds += [(None, rate) for rate in parse_values("--rate", self.rate, float)] if self.rate else []
        loads = []
        for n, rate in kinds:
            many = self.requests or max(LEAST, 2 * (n or 0))
            loads.append(Traffic(n, rate, many, (n or 2) if self.warm_up is None else self.warm_up))
        return loads

    def make_requests(self, texts: PromptOptions, tokens: int, params: SamplingParams) -> TrafficPrompts:
        """Make the requests to the servers from the chosen prompts."""
        from slipstream.measure.traffic_client import TrafficPrompts

        sampling = {"temperature": params.temperature, **request_fields(params)}
        return TrafficPrompts(texts.check(), tokens, sampling, params.seed or 0, texts.template, self.distinct)


@expand_groups
def bench(
    models: BenchModels,
    texts: BenchPrompts,
    *,
    config: BenchConfig,
    temperature: str = option("0", "Sampling temperature: one or several, as in 0,0.8."),
    top_k: int = option(0, "Sample from the k most likely tokens; 0: all.", min=0),
    top_p: float = option(1.0, "Sample from the most likely tokens up to this total probability."),
    ignore_eos: bool = option(False, "Ignore the end-of-text token."),
    batch: str = option("1", "Batch size: one or several, as in 1,4."),
    context: str | None = option(
        None,
        "Tokens of context before each answer: one or several, as in 256,1024. Other text is put before the prompt.",
        shown="the prompt alone",
    ),
    serve: list[str] | None = option(
        None,
        "Measure this server, as in http://localhost:8000/v1; repeatable: the others are compared with the first.",
        metavar="URL",
        panel=TrafficOptions.PANEL,
    ),
    load_options: TrafficOptions,
    engine: EngineOptions,
    files: OutputOptions,
) -> None:
    """Measure drafters against plain decoding, or servers under load.

    All settings take turns on the same prompts in one interleaved run.

    If options have several values, every draft length, temperature, batch size and context is measured with every
    other, and plotted beside the predictions of the closed forms. There are no predictions for draft lengths that are
    chosen in each step (-k auto, the default).

    Exit code 1 if a greedy text differs from plain decoding by more than rounding can explain.

    With --serve, measure OpenAI-compatible servers under load instead: throughput, time to first text, time per token
    and gaps in the stream, for every --concurrency and --rate. The API key is read from OPENAI_API_KEY. With --engine
    vllm, this command itself starts vLLM's server for plain decoding and for each drafter, and measures these servers.
    """
    temperatures = parse_values("--temperature", temperature, float)
    sampling = {"top_k": top_k, "top_p": top_p, "ignore_eos": ignore_eos}
    local = {"--batch": batch != "1", "--context": context is not None}
    if is_about_servers(serve, "--serve", models, engine, load_options, local):
        if len(temperatures) > 1:
            raise ParameterError("servers are measured at one temperature, but several were given", fix="give one")
        params = replace(config, sampling=sampling | {"seed": config.seed}).params(temperatures[0])
        if serve:
            named = {re.sub(r"^https?://|(/v1)?/*$", "", url): url for url in serve}  # http://host:8000/v1 -> host:8000
            return bench_servers(named, load_options, texts, params, config, files)
        with start_servers(list_servers(models, engine), engine) as servers:
            return bench_servers(servers, load_options, texts, params, config, files)
    contenders = models.contenders(adaptive=True)
    if not contenders:
        raise ParameterError("no drafter was given, only none", fix="give one, as in --drafter ngram")
    batches = parse_values("--batch", batch, int)
    contexts = (None,) if context is None else parse_values("--context", context, int)
    files.check()
    texts.check()
    config = replace(config, temperatures=temperatures, batches=batches, contexts=contexts, sampling=sampling)
    check_drafters(models, [(each.drafter, each.options) for each in contenders])
    asked = list(map(config.params, config.temperatures))
    llm = load(models.one("none", draft_tokens=None), quiet=files.as_json, asked=asked)
    from slipstream.measure import benchmark

    chosen = texts.load(llm, config.tokens)
    render.line(f"bench: {chosen.size} of {chosen.origin}, target={models.target}, {name_backend(llm.target)}")
    passes = benchmark.count_steps(contenders, chosen, config)
    result, code = run(
        files, "measuring (interleaved)", passes,
        lambda advance: benchmark.bench(llm, contenders, chosen, config, files.out, advance),
    )  # fmt: skip
    raise typer.Exit(code or (1 if any(arm.texts == "BUG" for arm in result.data.arms) else 0))


def bench_servers(
    servers: Mapping[str, str], load: TrafficOptions, texts: PromptOptions, params: SamplingParams,
    bench: BenchConfig, files: OutputOptions,
) -> None:  # fmt: skip
    """Measure servers (name -> URL) under each load, and print the result. Ratios are relative to the first server."""
    from slipstream.measure.traffic import TrafficConfig, count_requests, line_up_servers, measure_traffic

    loads, asked = load.loads("1,4,16"), load.make_requests(texts, params.max_tokens, params)
    files.check()
    config = TrafficConfig(rounds=bench.rounds, seconds=bench.seconds, timeout=load.timeout, seed=params.seed or 0)
    arms = line_up_servers({name: Endpoint(url, load.served_model) for name, url in servers.items()}, loads, asked)
    render.line(f"bench: {render.spell(len(asked.entries), 'prompt')} of {texts.prompts}, {', '.join(servers)}")
    _, code = run(
        files, "asking", count_requests(arms, config),
        lambda advance: measure_traffic(arms, config, asked.settings, files.out, advance),
    )  # fmt: skip
    raise typer.Exit(code)
