"""`slipstream tune`: chooses drafter and draft length for given prompts on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slipstream.bench.results import Result, check_writable, write_text
from slipstream.cli import render
from slipstream.cli.loading import check_drafters, load, on
from slipstream.cli.measuring import LabModels, OutputOptions, PromptOptions, finish, show_section, unfinished
from slipstream.cli.option_groups import grouped, option
from slipstream.cli.options import SamplingOptions
from slipstream.drafters.draft_plan import WITH_DRAFT
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import LoadError, ParameterError
from slipstream.models.load_settings import DEFAULTS
from slipstream.settings import FORMAT_BY_ROLE

if TYPE_CHECKING:
    from slipstream.bench.benchmark import Contender

LONGEST = 8
"""Maximum draft length considered for drafters that are not lookups."""


@dataclass(frozen=True)
class TuneModels(LabModels):
    """`LabModels` that try all tunable drafters if none is named."""

    def specs(self) -> list[str]:
        if self.drafter:
            return super().specs()
        tried = {name: spec for name, spec in DRAFTERS.items() if spec.tuned}
        return [name for name, spec in tried.items() if self.draft_model or not spec.reads_draft]

    def longest(self) -> list[Contender]:
        """The contenders, with the longest draft to consider; by default the draft also in other formats of weights."""
        given = self.contenders()
        if self.draft_tokens is None:
            given = [
                c if "draft_tokens=" in spec else replace(c, draft_tokens=max(c.draft_tokens, LONGEST))
                for spec, c in zip(self.specs(), given, strict=True)
            ]
        for name in () if self.drafter or self.draft_quantize else ("none", *FORMAT_BY_ROLE):
            given += [
                replace(c, label=f"{c.label} quantize={name}", options=c.options | {"quantize": name})
                for c in given
                if c.label == WITH_DRAFT and name != (self.of_draft().quantize or "none") and self._runs(name)
            ]
        return given

    def _runs(self, quantize: str) -> bool:
        """Whether our own kernels run the draft in this format."""
        from slipstream.targets.describe import describe

        assert self.draft_model is not None
        with suppress(LoadError, ParameterError):
            return describe(self.draft_model, replace(self, draft_quantize=quantize).of_draft()).runner == "native"
        return False


@grouped
def tune(
    models: TuneModels,
    sampling: SamplingOptions,
    texts: PromptOptions,
    *,
    batch: int = option(1, "Batch size.", min=1),
    confirm: int = option(3, "Number of best candidates to compare with plain decoding.", min=1),
    rounds: int = option(5, "Timed passes of that comparison.", min=1),
    seconds: float = option(45, "Time limit in seconds; at least three passes.", min=0),
    write: Path | None = option(None, "Write the choice to this file, for --config of generate, chat and serve."),
    files: OutputOptions,
) -> None:
    """Choose drafter and draft length for your prompts on this machine; never one that is slower than plain decoding.

    Each drafter runs once, a formula predicts the other draft lengths, and the best are timed against plain decoding.
    What limits each is said with its fix: an expensive draft, low acceptance, rows that cost the target time, the host.
    --draft-tokens is the maximum draft length to consider.
    """
    params = sampling.params()
    if write is not None:
        check_writable(write, "--write")
    files.check()
    texts.check()
    contenders = models.longest()
    from slipstream.bench.configs import Choice
    from slipstream.plan.tuning import TuneConfig

    config = TuneConfig(
        tokens=min(params.max_tokens, 64), confirm=confirm, rounds=rounds, seconds=seconds, batch=batch,
        seed=params.seed or 0, params=params,
    )  # fmt: skip
    if not contenders:
        raise ParameterError("there is no drafter to choose from", fix="name some: --drafter model --drafter ngram")
    from slipstream.plan import tuning

    check_drafters(models, [(each.drafter, each.options) for each in contenders])
    llm = load(models.one("none"), quiet=files.as_json, asked=[params])
    chosen = texts.load(llm, config.tokens)
    names = ", ".join(c.label for c in contenders)
    render.line(f"tune: {names}; {chosen.size} of {chosen.source}, target={models.target}, {on(llm.target)}")
    settings = {name: value for name, value in models.keywords.items() if value != DEFAULTS.keywords[name]}
    settings |= {} if models.rule == TuneModels.rule else {"rule": models.rule}
    origin = Choice("none", target=models.target, draft=models.draft_model, engine=settings)
    with render.progress("measuring (interleaved)", tuning.steps(llm, contenders, chosen, config)) as advance:
        result, code = unfinished(lambda: tuning.tune(llm, contenders, chosen, config, files.out, advance, origin))
    finish(result, files, show)
    configs = result.data["configs"]
    if write is not None and configs is not None:
        write_text(write, json.dumps(configs["slipstream"], indent=1) + "\n", "--write")
        render.line(f'wrote {write}; `slipstream generate --config {write} "..."` uses it')
    raise typer.Exit(code)


def show(result: Result) -> None:
    """Print the tables, the choice, and the equivalent settings of other programs."""
    show_section(result)
    console = render.out()
    console.print()
    for name, config in (result.data["configs"] or {}).items():
        text = json.dumps(config) if name == "slipstream" else config["text"] or config["note"]
        console.print(f"{name}: {text}", soft_wrap=True)
        if name != "slipstream" and config["text"] and config["note"]:
            console.print(f"  ({config['note']})", style="dim")
