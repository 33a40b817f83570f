"""`slipstream verify`: checks that speculation does not change the target's output."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from slipstream.cli import render
from slipstream.cli.engines import EngineOptions, is_about_servers, make_vllm_server, request_fields, start_servers
from slipstream.cli.loading import banner, load
from slipstream.cli.measuring import OutputOptions, PromptOptions, run
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import ModelOptions, SamplingOptions
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError, ServedError
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.results import Result, check_writable


@dataclass(frozen=True)
class VerifyPrompts(PromptOptions):
    """Options of prompts; by default, prompts of every built-in kind."""

    prompts: str = "code,edit,varied"
    count: int = 9


@expand_groups
def verify(
    models: ModelOptions,
    sampling: SamplingOptions,
    prompts: VerifyPrompts,
    *,
    check: list[str] | None = option(None, "Run only this check: greedy, coupled or distribution; repeatable."),
    texts: int = option(
        10,
        "Number of texts to sample with each setting of sampling parameters; three times as many with your own.",
        min=1,
    ),
    reach: int = option(512, "Length of the longest sampled text, in tokens; 0: all texts are short.", min=0),
    samples: int = option(200, "Number of samples per prompt from each server.", min=1),
    level: float = option(1e-3, "Probability of a false alarm: that correct output is called a bug."),
    files: OutputOptions,
    junit: Path | None = option(None, "Write the verdicts to this JUnit file, for CI.", metavar="FILE"),
    base_url: str | None = option(
        None, "Check this running server, which speculates, as in http://localhost:8000/v1.", metavar="URL"
    ),
    against: str | None = option(
        None, "Compare with this server, which runs the same model without speculation.", metavar="URL"
    ),
    served_model: str = option("", "Name of the model at both servers.", shown="the first that /v1/models lists"),
    engine: EngineOptions,
) -> None:
    """Check that speculation does not change the output.

    The check uses your target, drafter, rule and sampling parameters. It compares greedy texts, and sampled texts of
    the same seed, with and without the drafter, with 1, 2 and K draft tokens. Differences within the measured rounding
    of the model's logits are not bugs. It tests samples (temperature as given, else 1) against the target's exact
    distribution, which independent code computes. Requests with other filters, penalties, stops and biases run in the
    same batch, join later and are preempted. Each step of sampled texts is replayed from its logits and random numbers.

    Exit code 0: no difference was found; 1: a difference was found; 2: the check was not possible, because a server
    failed or too few tokens were drafted.

    With --base-url and --against, compare two OpenAI-compatible servers of the same model instead: greedy texts by the
    margins of their log-probabilities, sampled texts by their n-grams. Only the first turn of a conversation is sent.
    With --engine vllm, this command starts two vLLM servers and compares them.
    """
    seed = secrets.randbits(32) if sampling.seed is None else abs(sampling.seed)
    prompts.check()
    files.check()
    if junit is not None:
        check_writable(junit)
    if is_about_servers(base_url or against, "--base-url", models, engine):
        params = sampling.params()
        served = {
            "tokens": params.max_tokens, "samples": samples, "temperature": params.temperature or 1.0, "level": level,
            "seed": seed, "more": request_fields(params),
        }  # fmt: skip
        if engine.vllm:
            servers = {
                "speculation": make_vllm_server(models, engine),
                "plain": make_vllm_server(models, engine, plain=True),
            }
            with start_servers(servers, engine) as places:
                urls = places["speculation"], places["plain"]
                compare_servers(*urls, served_model, served, prompts, files, junit)
        if base_url is None or against is None:
            raise ParameterError(
                "--base-url and --against must be given together",
                why="the texts of a server that speculates are compared with the texts of a server that does not",
                fix="start the same server twice, the second time without speculation, and give both URLs",
            )
        compare_servers(base_url, against, served_model, served, prompts, files, junit)
    from slipstream.core.rules import find_rule
    from slipstream.templates.sizes import duration
    from slipstream.verify.verification import CHECKS, VerifyConfig, seconds, steps, verify as verified

    possible = ("greedy",) if find_rule(models.rule).greedy_only else CHECKS
    config = VerifyConfig(
        params=sampling.params(), checks=tuple(check or possible), texts=texts, reach=reach, level=level, seed=seed
    )
    asked = config.sampled if "distribution" in config.checks else config.params
    llm = load(models, quiet=files.as_json, asked=[asked])
    chosen = prompts.load(llm, config.params.max_tokens)
    render.line(f"verify: {chosen.size} of {chosen.origin}; {banner(llm, models)}")
    render.line(f"this takes about {duration(seconds(llm, chosen, config))}, by the speed of its first text")
    report(
        files, junit, "checking", steps(chosen, config, llm.most_draft_tokens),
        lambda advance: verified(llm, chosen, config, files.out, advance, models.method),
    )  # fmt: skip


def report(
    files: OutputOptions, junit: Path | None, what: str, total: int, measure: Callable[[Callable[[], None]], Result]
) -> NoReturn:
    """Run the checks with a progress bar, write the JUnit file, and exit with the code of the verdict."""
    from slipstream.verify.junit import write_junit
    from slipstream.verify.verification import UNTESTED

    try:
        result, code = run(files, what, total, measure)
    except ServedError as fault:
        if junit is not None:
            write_junit(junit, None, str(fault))
        raise
    if junit is not None:
        write_junit(junit, result)
    raise typer.Exit({"BUG": 1, UNTESTED: 2}.get(result.data.verdict, code) if code != 130 else code)


def compare_servers(
    base_url: str, against: str, name: str, fields: JsonObject, prompts: PromptOptions, files: OutputOptions,
    junit: Path | None,
) -> NoReturn:  # fmt: skip
    """Compare the server at `base_url` with the server at `against`. name: name of the model; fields: fields of
    `ServedConfig`."""
    from slipstream.verify.served import ServedConfig, count_requests, verify_served

    config = ServedConfig(**fields)
    chosen = [(entry.name, entry.text) for entry in prompts.check()]
    served, reference = (Endpoint(url, name) for url in (base_url, against))
    render.line(f"verify: {render.spell(len(chosen), 'prompt')} of {prompts.prompts}; {base_url} against {against}")
    report(
        files, junit, "asking", count_requests(len(chosen), config),
        lambda advance: verify_served(served, reference, chosen, config, files.out, advance),
    )  # fmt: skip
