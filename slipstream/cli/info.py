"""`slipstream info`: architecture, memory use and executor of a checkpoint; whether a draft model fits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from slipstream.bench.tables import Column, Table, words
from slipstream.cli import render
from slipstream.cli.loading import load, quieten
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.cli.options import ModelOptions
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import PairError, ParameterError
from slipstream.settings import STRING, WEIGHT_FORMATS

if TYPE_CHECKING:
    from slipstream.bench.measure import Run
    from slipstream.models.config import DecoderConfig
    from slipstream.models.pair_check import PairReport


@grouped
def info(
    model: str = argument("Model: folder, hub id, GGUF file, 'embedded' or 'smollm2'.", default="embedded"),
    draft: str | None = argument("Draft model, to check the pair.", default=None, shown=False),
    measure: bool = option(False, "Of a pair: load both models and measure acceptance rate and speed-up."),
    draft_tokens: int = option(4, "Draft tokens per step, with --measure.", "--draft-tokens", "-k"),
    also: list[str] | None = option(
        None,
        "With --measure: another target, or a format of weights, as in quantize=int8, draft_quantize=int4; repeatable.",
    ),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
    matrix: bool = option(False, "Show what works with what: architectures, drafters, rules, quantisation (Markdown)."),
) -> None:
    """Show a model's architecture, sizes, tokenizer and executor, and how much accuracy its settings cost.

    With a draft model, check that both have the same vocabulary, and estimate the speed-up: exit code 0 if they are
    compatible, 1 if not. Weights are only loaded with --measure.
    """
    quieten()
    if draft is None and (measure or also):
        raise ParameterError("--measure and --also are for a pair", fix="name the draft model after the target")
    if also and not measure:
        raise ParameterError("--also was given without --measure", fix="add --measure")
    if draft is not None:
        show_pair(model, draft, measure, draft_tokens, also, as_json)
    if matrix:
        from slipstream.plan.support_matrix import page

        print(page().rstrip("\n"))
        return
    described = describe(model)
    if as_json:
        print(json.dumps(described))
    else:
        render.out().print(render.facts_table(rows(described)), soft_wrap=False)


def describe(model: str) -> dict[str, Any]:
    """The facts as plain JSON values. Raises LoadError or a subclass, e.g. for an unsupported architecture."""
    from slipstream.models.config import DecoderConfig
    from slipstream.plan.support_matrix import cell
    from slipstream.targets.describe import describe as described

    seen = described(model)
    facts, config = seen.facts, seen.facts.config
    device, dtype, experts = seen.settings.device, seen.settings.dtype, config.experts
    refused = (
        seen.refusals[0].partition("(")[2].removesuffix(")")
        if seen.runner == "torch" and device.type == "cpu"
        else None
    )
    windows = sorted({w for w in config.windows if w is not None})
    return {
        "model": model,
        "folder": str(facts.folder),
        "architecture": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "stored_bytes": facts.stored,
        "loaded_dtype": str(dtype).removeprefix("torch."),
        "loaded_bytes": seen.weight_bytes,
        "vocab_size": config.vocab_size,
        "tokens": None if facts.tokenizer is None else len(facts.tokenizer.tokens),
        "context": config.context,
        "source_context": facts.source_context,
        "kv_bytes_per_token": facts.kv_bytes(dtype.itemsize),
        "tied_head": config.tie_embeddings,
        "sliding_window": windows,
        "sliding_layers": sum(w is not None for w in config.windows),
        "experts": None if experts is None else {"count": experts.count, "per_token": experts.per_token},
        "position": config.position,
        "rope": dict(config.rope_parameters),
        "special_tokens": None if facts.tokenizer is None else dict(facts.tokenizer.roles),
        "eos_ids": list(config.eos_ids),
        "chat_template": facts.chat_template,
        "executor": seen.runner,
        "device": str(device),
        "not_native": refused,
        "drafters": [name for name, spec in DRAFTERS.items() if cell(seen.kind, spec).works],
        "native": native(config) if isinstance(config, DecoderConfig) and seen.runner == "native" else None,
        "supported": True,
    }


def native(config: DecoderConfig) -> dict[str, Any]:
    """What the native executor supports for this model on this processor. settings: why one is not, or None."""
    import torch

    from slipstream.backends.native.native_backend import int8_products, refusal

    settings = {f"quantize {name}": refusal(config, each) for name, each in WEIGHT_FORMATS.items()}
    return {
        "int8_products": int8_products(),
        "settings": settings | {"dtype bfloat16": refusal(config, dtype=torch.bfloat16)},
    }


def rows(described: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as rows of names and texts."""
    experts, stored, window = described["experts"], described["stored_bytes"], described["sliding_window"]
    active = f", {render.count(described['active_parameters'])} active per token" if experts else ""
    special = ", ".join(f"{role} {i}" for role, i in (described["special_tokens"] or {}).items() if i is not None)
    sizes = [f"{render.size(n)} in {dtype}" for dtype, n in (stored or {}).items()]
    refused = f"; not native: {described['not_native']}" if described["not_native"] else ""
    missing = [name for name in DRAFTERS if name not in described["drafters"]]
    context, source = render.context(described["context"], "tokens"), described["source_context"]
    native_rows = []
    if known := described["native"]:
        native_rows = [("int8 products", known["int8_products"])]
        for name, refused_for in known["settings"].items():
            native_rows.append((name, "supported" if refused_for is None else f"not supported: {refused_for}"))
    return [
        (
            "model",
            described["model"] + ("" if described["folder"] == described["model"] else f"  ({described['folder']})"),
        ),
        (
            "architecture",
            f"{described['architecture']}, {described['layers']} layers of width {described['hidden_size']}",
        ),
        ("parameters", render.count(described["parameters"]) + active),
        ("stored", " + ".join(sizes) or "unknown"),
        ("loaded", f"{render.size(described['loaded_bytes'])}, computed in {described['loaded_dtype']}"),
        (
            "attention",
            f"{described['heads']} heads, {described['kv_heads']} KV heads, head size {described['head_dim']}",
        ),
        (
            "window",
            f"{', '.join(map(str, window))} tokens in {described['sliding_layers']} layers"
            if window
            else "none: full attention",
        ),
        ("experts", f"{experts['per_token']} of {experts['count']} per token" if experts else "none: dense"),
        ("positions", positions(described)),
        ("context", f"{context}, {render.size(described['kv_bytes_per_token'])} of KV each"),
        *([] if source is None else [("source", f"{render.context(source, 'tokens')}, read once")]),
        ("vocabulary", vocabulary(described)),
        ("special", special or "unknown"),
        ("lm_head", "tied to the embedding" if described["tied_head"] else "not tied"),
        ("chat template", render.yes(described["chat_template"])),
        ("executor", f"{described['executor']} on {described['device']}{refused}"),
        ("drafters", f"all but {', '.join(missing)}" if missing else "all"),
        *native_rows,
    ]


def positions(described: dict[str, Any]) -> str:
    rope = described["rope"]
    if described["position"] != "rope":
        return described["position"]
    by_layer = {name: each for name, each in rope.items() if isinstance(each, dict)}  # Gemma 3 and 4
    if by_layer:
        return "; ".join(f"{positions(described | {'rope': each})} ({name})" for name, each in by_layer.items())
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = f", scaled {kind} by {rope['factor']:g}" if "factor" in rope else ""
    return f"rotary, theta {rope['rope_theta']:g}{factor}"


def vocabulary(described: dict[str, Any]) -> str:
    if described["tokens"] is None:
        return f"{described['vocab_size']} ids; no tokenizer files, so prompts must be token ids"
    padding = described["vocab_size"] - described["tokens"]
    return f"{described['tokens']} tokens" + (f", padded to {described['vocab_size']} ids" if padding > 0 else "")


SHOWN_RATES = (0.6, 0.8)
PASSES, TOKENS = 5, 64


def show_pair(
    target: str, draft: str, measure: bool, draft_tokens: int, also: list[str] | None, as_json: bool
) -> NoReturn:
    """Print whether the models are compatible, what a speed-up needs, and what was measured. Exit code 0 if they are,
    else 1. Weights are only loaded with `measure`."""
    from slipstream.models import pair_check

    pairs = {name: beside(target, draft, draft_tokens, name) for name in dict.fromkeys([target, *(also or ())])}
    report = pair_check.check_pair(target, draft)
    runs = measured(pairs) if measure and report.fits else {}
    if as_json:
        all_runs = [{"target": name} | summary(run) for name, pair_runs in runs.items() for run in pair_runs]
        print(json.dumps(report.as_dict() | {"measured": all_runs}))
    else:
        show(report, runs)
    raise typer.Exit(0 if report.fits else 1)


def beside(target: str, draft: str, draft_tokens: int, also: str) -> ModelOptions:
    """The pair with another target, or with weights in another format: "quantize=int8", "draft_quantize=int4"."""
    name, _, value = also.partition("=")
    pair = ModelOptions(target=target, draft=draft, drafter="model", draft_tokens=str(draft_tokens))
    if name == "draft_quantize":
        return replace(pair, drafter_option=[f"quantize={value}"])  # of a head, too
    return replace(pair, quantize=value) if name == "quantize" else replace(pair, target=also)


def measured(pairs: Mapping[str, ModelOptions]) -> dict[str, list[Run]]:
    """Name of a pair -> plain decoding and the draft model, on the same prompts; all take turns."""
    from slipstream.bench.measure import Arm, line_up, passes, race
    from slipstream.bench.prompts import built_in
    from slipstream.core.params import SamplingParams

    params = SamplingParams(max_tokens=TOKENS)
    runs: dict[str, list[Run]] = {}
    for name, models in pairs.items():
        llm = load(models)
        plain = Arm("plain", llm, params=params)
        drafted = Arm("draft model", llm, llm.drafter, llm.most_draft_tokens, params=params, against=plain)
        runs[name] = line_up([plain, drafted], built_in(llm, "code", 3))
    together = [run for group in runs.values() for run in group]
    with render.progress("measuring (interleaved)", passes(together, PASSES)) as advance:
        race(together, PASSES, advance)
    return runs


def summary(run: Run) -> dict[str, Any]:
    return {
        "method": run.arm.name,
        "draft_tokens": run.arm.draft_tokens,
        "tokens_per_second": run.tokens_per_second().value,
        "speedup": vars(run.speedup()),
        "lossless": run.exact,
        "token_identical": not run.divergences,
        "divergences": [{"prompt": i, **vars(d), "near_tie": d.near_tie} for i, d in run.divergences],
        "stats": run.stats().as_dict(),
    }


def show(report: PairReport, runs: Mapping[str, Seq[Run]]) -> None:
    console = render.out()
    console.print(render.rendered(sides(report)))
    if not report.fits:
        console.print(f"The models are not compatible: {report.problem}.", style="bold")
        if report.target.source_context is report.draft.source_context is None:
            console.print(f"- {with_own_tokenizer(report)}.", highlight=False)
        return
    agree = f"all {report.common} common token ids agree" if report.compared else "only vocabulary sizes were compared"
    if report.differing:
        agree = f"all ordinary token ids agree, {report.differing} special token ids differ"
    console.print(f"The models are compatible: {agree}.", style="bold")
    for line in [*report.notes, *outlook(report)]:
        console.print(f"- {line}.")
    if runs:
        short = [Path(target).name or target for target in runs]
        names = short if len({*short}) == len(short) else list(runs)
        console.print(render.runs_table(dict(zip(names, runs.values(), strict=True)), "target"))


def with_own_tokenizer(report: PairReport) -> str:
    """What `--draft-tokenizer` does for models with different tokenizers, in a sentence."""
    from slipstream.drafters.string_match import vocabularies
    from slipstream.models.text import tokenizer_of

    width = report.target.config.vocab_size, report.draft.config.vocab_size
    try:
        shared = vocabularies(tokenizer_of(report.target.folder), tokenizer_of(report.draft.folder), width)
    except PairError as refused:
        return f"--draft-tokenizer does not help: {refused.what}"
    return f"with --draft-tokenizer {STRING} the draft model keeps its tokenizer: {shared}"


def sides(report: PairReport) -> Table:
    columns = [words(""), *map(Column, ("parameters", "stored", "vocabulary", "tokens", "context"))]
    rows = []
    for name, side in (("target", report.target), ("draft", report.draft)):
        tokens = "none" if side.tokenizer is None else len(side.tokenizer.tokens)
        stored = "unknown" if side.stored is None else render.size(sum(side.stored.values()))
        sizes = render.count(side.parameters), stored, side.config.vocab_size, tokens
        rows.append([f"{name} ({side.config.model_type})", *sizes, render.context(side.config.context)])
    return Table("", columns, rows)


def outlook(report: PairReport) -> list[str]:
    """Estimated cost and speed-up, in sentences."""
    c = report.cost_ratio
    break_even = f"speculation saves time above {c:.0%} acceptance" if c < 1 else "speculation cannot save time"
    lines = [f"a draft token costs about {c:.2f} target steps: {break_even}"]
    for acceptance in SHOWN_RATES if c < 1 else ():
        seen = report.expected(acceptance)
        best = f"{seen.speedup:.2f}x plain decoding with K={seen.draft_tokens}" if seen.draft_tokens else "no speed-up"
        lines.append(f"at {acceptance:.0%} acceptance: {best}")
    from slipstream.plan.known_pairs import published_figures

    lines.append(f"assumptions: {report.costs.assumptions()}; use --measure to measure")
    return [*lines, *published_figures(report.target.source, report.draft.source)]
