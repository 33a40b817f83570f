"""`slipstream doctor`: explains why speculation is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import render
from slipstream.cli.contenders import LabModels
from slipstream.cli.early import check_contenders
from slipstream.cli.loading import load, on
from slipstream.cli.measuring import finish, unfinished, writable
from slipstream.cli.options import SamplingOptions, grouped
from slipstream.errors import ParameterError
from slipstream.lab.prompts import select


@grouped
def doctor(
    models: LabModels,
    sampling: SamplingOptions,
    prompts: Annotated[
        str, typer.Argument(help="Prompt file, or the embedded code, edit, or code,edit.")
    ] = "code,edit",
    count: Annotated[
        int, typer.Option("--prompts", min=1, help="Maximum number of prompts, spread over the categories.")
    ] = 6,
    template: Annotated[str, typer.Option(help="Prompt format: chat, raw, or auto (chat for instructions).")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 4,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit in seconds; at least three passes.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a report page to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Explain why speculation is slow, or report that nothing is wrong: the cause, the fix, and the measurements."""
    params = sampling.params()
    writable(out, page)
    select(prompts, count, template=template)
    from slipstream.lab.diagnosis import DoctorConfig

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
    from slipstream.lab import diagnosis as lab, prompts as texts

    check_contenders(models.target, contenders)
    llm = load(models.one("none"), quiet=as_json)
    chosen = texts.load(llm, prompts, count, template=template)
    examined = contenders[0]
    render.line(
        f"doctor: {examined.label}, K={examined.draft_tokens}, {len(chosen.prompts)} prompts of {chosen.source}, "
        f"target={models.target}, {on(llm.target)}"
    )
    with render.progress("measuring (interleaved)", lab.steps(llm, chosen, config)) as advance:
        result, code = unfinished(lambda: lab.doctor(llm, examined, chosen, config, out, advance))
    finish(result, out, as_json, page)
    raise typer.Exit(code)
