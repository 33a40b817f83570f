"""`slipstream doctor`: explains why speculation is slow."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli import render
from slipstream.cli.bench_served import check_no_server
from slipstream.cli.contenders import LabModels
from slipstream.cli.early import check_contenders
from slipstream.cli.loading import load, on
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished
from slipstream.cli.options import SamplingOptions, grouped
from slipstream.cli.running_server import RunningServer, examine
from slipstream.errors import ParameterError


@grouped
def doctor(
    models: LabModels,
    sampling: SamplingOptions,
    texts: PromptOptions,
    *,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 4,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit in seconds; at least three passes.")] = 40,
    files: OutputOptions,
    server: RunningServer,
) -> None:
    """Explain why speculation is slow, or report that nothing is wrong: the cause, the fix, and the measurements.

    With --base-url, examine a running server of vLLM, SGLang, llama.cpp or Slipstream by its counters, under a short
    load, or with --watch under the load that it has. API key: OPENAI_API_KEY.
    """
    if server.base_url is not None:
        return examine(server, models, sampling, texts, rounds, seconds, files, {"--batch": batch != 1})
    check_no_server(server, "--base-url")
    params = sampling.params()
    files.check()
    texts.check()
    from slipstream.plan.diagnosis import DoctorConfig

    config = DoctorConfig(
        tokens=min(params.max_tokens, 64), rounds=rounds, seconds=seconds, batch=batch, seed=params.seed or 0,
        params=params,
    )  # fmt: skip
    contenders = models.contenders()
    if models.drafter is None and models.drafters is None:
        contenders = contenders[:1]
    if len(contenders) != 1:
        raise ParameterError(
            f"{len(contenders)} drafters were named, only one can be examined",
            fix="name one: --drafter model; A+B combines two",
        )
    from slipstream.plan import diagnosis

    check_contenders(models, contenders)
    llm = load(models.one("none"), quiet=files.as_json, asked=[params])
    chosen = texts.load(llm, config.tokens)
    examined = contenders[0]
    render.line(
        f"doctor: {examined.label}, K={examined.draft_tokens}, {chosen.size} of "
        f"{chosen.source}, target={models.target}, {on(llm.target)}"
    )
    with render.progress("measuring (interleaved)", diagnosis.steps(llm, chosen, config)) as advance:
        result, code = unfinished(lambda: diagnosis.doctor(llm, examined, chosen, config, files.out, advance))
    finish(result, files)
    raise typer.Exit(code)
