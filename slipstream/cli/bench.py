"""`slipstream bench`: compares drafters with plain decoding in one interleaved run, or compares two result files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.bench_served import ServedOptions, bench_served, check_no_server, named
from slipstream.cli.contenders import LabModels, values_of
from slipstream.cli.early import check_contenders
from slipstream.cli.engines import EngineOptions, compared, started
from slipstream.cli.loading import load, on
from slipstream.cli.measuring import Count, OutputOptions, PromptOptions, finish, unfinished
from slipstream.cli.options import grouped
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class BenchPrompts(PromptOptions):
    """More, because intervals are given."""

    count: Count = 8


@grouped
def bench(
    models: LabModels,
    texts: BenchPrompts,
    *,
    tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens generated for each prompt.")
    ] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit in seconds; at least three passes.")] = 60,
    temperature: Annotated[str, typer.Option(help="Sampling temperature, one or several, as in 0,0.8.")] = "0",
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens up to this total probability.")
    ] = 1.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ignore the end-of-text token.")] = False,
    batch: Annotated[str, typer.Option(help="Batch size, one or several, as in 1,4.")] = "1",
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens before the answer, one or several, as in 256,1024: earlier text is put before each prompt.",
            show_default="the prompts alone",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    served: ServedOptions,
    engine_options: EngineOptions,
    files: OutputOptions,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Compare two result files instead of measuring.")
    ] = None,
) -> None:
    """Compare drafters with plain decoding in one interleaved run on the same prompts.

    Exit code 1 if a greedy text differs from plain decoding by more than rounding can explain.

    With --serve, load OpenAI-compatible servers instead: throughput, time to the first text, time per token and gaps,
    each with percentiles, for every --concurrency and --rate. API key: OPENAI_API_KEY. With --engine vllm, these are
    vLLM's, started for plain decoding and for each drafter.
    """
    if compare is not None:
        return show_comparison(*compare, files.as_json)
    if served.serve or engine_options.vllm:
        if batch != "1" or context is not None:
            raise ParameterError("--batch and --context have no meaning for servers", fix="give --concurrency instead")
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "ignore_eos": ignore_eos}
        if not engine_options.vllm:
            servers = named(served, models)
            return bench_served(servers, served, texts, tokens, rounds, seconds, sampling, seed, files)
        if served.serve:
            raise ParameterError("--serve and --engine are given", fix="give one of them")
        with started(compared(models, engine_options), engine_options) as servers:
            return bench_served(servers, served, texts, tokens, rounds, seconds, sampling, seed, files)
    check_no_server(served, "--serve")
    contenders = models.contenders(adaptive=True)
    if not contenders:
        raise ParameterError("there is no drafter to measure", fix="name one: --drafter ngram")
    axes: dict[str, Any] = {
        "temperatures": values_of("--temperature", temperature, float), "batches": values_of("--batch", batch, int),
        "contexts": (None,) if context is None else values_of("--context", context, int),
    }  # fmt: skip
    files.check()
    texts.check()
    from slipstream.bench.benchmark import BenchConfig

    config = BenchConfig(
        tokens=tokens, rounds=rounds, seconds=seconds, seed=seed, **axes,
        sampling={"top_k": top_k, "top_p": top_p, "ignore_eos": ignore_eos},
    )  # fmt: skip
    check_contenders(models, contenders)
    asked = map(config.params, config.temperatures)
    llm = load(models.one("none"), quiet=files.as_json, asked=asked)
    from slipstream.bench import benchmark

    chosen = texts.load(llm, tokens)
    render.line(f"bench: {chosen.size} of {chosen.source}, target={models.target}, {on(llm.target)}")
    with render.progress("measuring (interleaved)", benchmark.steps(llm, contenders, chosen, config)) as advance:
        result, code = unfinished(lambda: benchmark.bench(llm, contenders, chosen, config, files.out, advance))
    finish(result, files)
    raise typer.Exit(code or (1 if any(arm["texts"] == "BUG" for arm in result.data["arms"]) else 0))


def show_comparison(first: str, second: str, as_json: bool) -> None:
    from slipstream.bench.bench_compare import changes, compare

    found = compare(first, second)
    if as_json:
        print(json.dumps(found))
        return
    render.titled(changes(found["rows"]))
    console = render.out()
    for line in found["differences"]:
        console.print(f"- different: {line}.")
    for line in found["missing"]:
        console.print(f"- in only one of the files: {line}.")
