"""`slipstream tune`: chooses drafter and draft length for given prompts on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slipstream.cli import render
from slipstream.cli.contenders import LabModels
from slipstream.cli.engines import EngineOptions
from slipstream.cli.loading import check_drafters, load, on
from slipstream.cli.measuring import OutputOptions, PromptOptions, finish, unfinished, writable
from slipstream.cli.option_groups import grouped, option
from slipstream.cli.options import SamplingOptions
from slipstream.cli.servers import LoadOptions, changed, of_servers
from slipstream.cli.tune_served import RunningServer, examine, tune_vllm
from slipstream.drafters.draft_plan import WITH_DRAFT
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import LoadError, ParameterError
from slipstream.settings import FORMAT_BY_ROLE, SAME

if TYPE_CHECKING:
    from slipstream.bench.benchmark import Contender
    from slipstream.bench.results import Result

LONGEST = 8
"""Maximum draft length considered for drafters that are not lookups."""
ENGINE = (
    "lora", "executor", "dtype", "device", "quantize", "draft_quantize", "draft_tokenizer", "kv_dtype", "threads",
    "rule",
)  # fmt: skip
AUTOMATIC = {"executor": "auto", "rule": "rejection", "draft_tokenizer": SAME}


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
    engine: EngineOptions,
    files: OutputOptions,
    server: RunningServer,
    load_options: LoadOptions,
) -> None:
    """Choose drafter and draft length for your prompts on this machine; never one that is slower than plain decoding.

    Each drafter runs once, a formula predicts the other draft lengths, and the best are timed against plain decoding.
    What limits each is said with its fix: an expensive draft, low acceptance, rows that cost the target time, the host.
    --draft-tokens is the maximum draft length to consider.

    With --base-url, watch the counters of a running server of vLLM, SGLang, llama.cpp or Slipstream under the load that
    it has, and recommend a draft length. API key: OPENAI_API_KEY. With --engine vllm, vLLM's server is started for each
    drafter and length, beside one that decodes plainly.
    """
    local = {"--batch": batch != 1, "--confirm": confirm != 3}
    if server.base_url is not None:
        local |= {"--write": write is not None, "--rounds": rounds != 5, "--seconds": seconds != 45}
        local |= dict.fromkeys(filter(None, map(changed, (sampling, texts, load_options))), True)
    elif given := changed(server):
        raise ParameterError(f"{given} is given without a server", fix="name one: --base-url URL")
    if of_servers(server.base_url, "--base-url", models, engine, load_options, local):
        if server.base_url is not None:
            return examine(server, files)
        params = sampling.params()
        return tune_vllm(models, load_options, params, texts, rounds, seconds, write, engine, files)
    params = sampling.params()
    writable(write=write)
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
    from slipstream.bench.results import write_text
    from slipstream.plan import tuning

    check_drafters(models, [(each.drafter, each.options) for each in contenders])
    llm = load(models.one("none"), quiet=files.as_json, asked=[params])
    chosen = texts.load(llm, config.tokens)
    names = ", ".join(c.label for c in contenders)
    render.line(f"tune: {names}; {chosen.size} of {chosen.source}, target={models.target}, {on(llm.target)}")
    settings = {name: getattr(models, name) for name in ENGINE if getattr(models, name) != AUTOMATIC.get(name)}
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
    from slipstream.cli.report import section

    render.section(section(result))
    console = render.out()
    console.print()
    for name, made in (result.data["configs"] or {}).items():
        text = json.dumps(made) if name == "slipstream" else made["text"] or made["note"]
        console.print(f"{name}: {text}", soft_wrap=True)
        if name != "slipstream" and made["text"] and made["note"]:
            console.print(f"  ({made['note']})", style="dim")
