"""`slipstream verify`: checks that speculation does not change the target's output."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import render
from slipstream.cli.loading import banner, load
from slipstream.cli.measuring import finish, unfinished, writable
from slipstream.cli.options import ModelOptions, SamplingOptions, grouped

FORMER = {"law": "distribution"}
"""Former names of checks."""


@grouped
def verify(
    models: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        str, typer.Argument(help="Prompt file, or embedded kinds: code, edit, varied.")
    ] = "code,edit,varied",
    count: Annotated[
        int, typer.Option("--prompts", min=1, help="Maximum number of prompts, spread over the categories.")
    ] = 9,
    template: Annotated[str, typer.Option(help="Prompt format: chat, raw, or auto (chat for instructions).")] = "auto",
    check: Annotated[
        list[str] | None,
        typer.Option(help="Run only this check: greedy, coupled or distribution; repeatable."),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Whole texts sampled per draft length.")] = 16,
    reach: Annotated[
        int, typer.Option(min=0, help="Position that one of these texts reaches; 0: none is longer.")
    ] = 512,
    samples: Annotated[int, typer.Option(min=1, help="First tokens sampled per prompt.")] = 1000,
    distribution_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts for first tokens.")] = 3,
    first: Annotated[int, typer.Option(min=2, help="Number of first tokens whose joint distribution is tested.")] = 5,
    level: Annotated[float, typer.Option(help="Probability that a correct run is called a bug.")] = 1e-3,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a report page to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that speculation does not change the output, with your target, drafter, rule and sampling parameters.

    Greedy texts and texts of one seed are compared with and without the drafter, with 1, 2 and K draft tokens;
    differences within the measured rounding of this model's logits are not bugs. Samples are tested against the
    target's exact distribution (at the given temperature, else 1), which is computed by code of its own. Exit code 1 if
    there is a bug, or if too little was drafted to test anything.
    """
    from slipstream.lab.verification import CHECKS, VerifyConfig

    config = VerifyConfig(
        params=sampling.params(), checks=tuple(FORMER.get(c, c) for c in check or CHECKS), samples=samples,
        distribution_prompts=distribution_prompts, length=first, level=level,
        texts=texts, reach=reach, seed=secrets.randbits(32) if sampling.seed is None else abs(sampling.seed),
    )  # fmt: skip
    from slipstream.lab import prompts as files, verification as lab

    writable(out, page)
    llm = load(models, quiet=as_json)
    chosen = files.load(llm, prompts, count, template=template, warn_random=False)
    render.line(f"verify: {len(chosen.prompts)} prompts of {chosen.source}; {banner(llm, models)}")
    with render.progress("checking", lab.steps(chosen, config, llm.draft_tokens)) as advance:
        result, code = unfinished(lambda: lab.verify(llm, chosen, config, out, advance, models.method))
    finish(result, out, as_json, page)
    raise typer.Exit(code or (1 if result.data["verdict"] in ("BUG", lab.UNTESTED) else 0))
