"""`slipstream verify`: is what speculation says what the target says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import render
from slipstream.cli.loading import banner, load
from slipstream.cli.measuring import finish, unfinished, writable
from slipstream.cli.options import ModelOptions, SamplingOptions, grouped

if TYPE_CHECKING:
    pass

BAD = "bold red"


@grouped
def verify(
    models: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[str, typer.Argument(help="A file, or code, edit, or code,edit.")] = "code,edit",
    count: Annotated[int, typer.Option("--prompts", min=1, help="Most prompts, from all categories in turn.")] = 4,
    template: Annotated[str, typer.Option(help="chat, raw, or auto (chat for instructions).")] = "auto",
    check: Annotated[
        list[str] | None, typer.Option(help="Only this check: greedy, coupled or law; repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts sampled for each prompt of the law check.")] = 2000,
    law_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of the law check (samples against the distribution).")
    ] = 2,
    first: Annotated[int, typer.Option(min=2, help="First tokens whose joint distribution is tested.")] = 3,
    level: Annotated[float, typer.Option(help="False-alarm probability of the law check.")] = 1e-3,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page of it to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that speculation leaves the text alone, with your target, drafter, rule and sampling parameters.

    Greedy texts and texts of one seed are compared with and without the drafter, and judged by how far this model's
    logits move when several rows are computed at once; samples are tested against the target's exact law (at the
    temperature given, else 1). Exit code 1 if there is a bug.
    """
    from slipstream.lab.verification import CHECKS, VerifyConfig

    config = VerifyConfig(
        params=sampling.params(), checks=tuple(check) if check else CHECKS, samples=samples, law_prompts=law_prompts,
        length=first, level=level, seed=sampling.seed or 0,
    )  # fmt: skip
    from slipstream.lab import prompts as texts, verification as lab

    writable(out, page)
    llm = load(models, quiet=as_json)
    chosen = texts.load(llm, prompts, count, template=template)
    render.line(f"verify: {len(chosen.prompts)} prompts of {chosen.source}; {banner(llm, models)}")
    with render.progress("checking", lab.steps(chosen, config)) as advance:
        result, code = unfinished(lambda: lab.verify(llm, chosen, config, out, advance, models.method))
    finish(result, out, as_json, page)
    raise typer.Exit(code or (1 if result.data["verdict"] == "BUG" else 0))
