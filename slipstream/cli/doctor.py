"""`slipstream doctor`: why is it slow?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import render
from slipstream.cli.contenders import LabModels
from slipstream.cli.loading import load, on
from slipstream.cli.measuring import finish, unfinished, writable
from slipstream.cli.options import SamplingOptions, grouped
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    pass

MS = 1000


@grouped
def doctor(
    models: LabModels,
    sampling: SamplingOptions,
    prompts: Annotated[str, typer.Argument(help="A file, or code, edit, or code,edit.")] = "code,edit",
    count: Annotated[int, typer.Option("--prompts", min=1, help="Most prompts, from all categories in turn.")] = 6,
    template: Annotated[str, typer.Option(help="chat, raw, or auto (chat for instructions).")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 4,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit in seconds; at least three passes.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page of it to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say why speculation is slow, or that nothing is wrong: the cause, the fix, and the numbers that led there."""
    from slipstream.lab.diagnosis import DoctorConfig

    params = sampling.params()
    config = DoctorConfig(
        tokens=min(params.max_tokens, 64), rounds=rounds, seconds=seconds, batch=batch, seed=params.seed or 0,
        params=params,
    )  # fmt: skip
    contenders = models.contenders()
    if models.drafter is None and models.drafters is None:
        contenders = contenders[:1]
    if len(contenders) != 1:
        raise ParameterError(
            f"{len(contenders)} drafters were named, one is examined", fix="name one: --drafter model; A+B stacks two"
        )
    from slipstream.lab import diagnosis as lab, prompts as texts

    writable(out, page)
    llm = load(models.one("none"), quiet=as_json)
    chosen = texts.load(llm, prompts, count, template=template)
    patient = contenders[0]
    render.line(
        f"doctor: {patient.label}, K={patient.draft_tokens}, {len(chosen.prompts)} prompts of {chosen.source}, "
        f"target={models.target}, {on(llm.target)}"
    )
    with render.progress("measuring, in turns", lab.steps(llm, chosen, config)) as advance:
        result, code = unfinished(lambda: lab.doctor(llm, patient, chosen, config, out, advance))
    finish(result, out, as_json, page)
    raise typer.Exit(code)
