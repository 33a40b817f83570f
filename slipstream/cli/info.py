"""`slipstream info`: shows a checkpoint's architecture, memory use and executor, and checks a draft model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import typer

from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import UNBOUNDED
from slipstream.checkpoints.weight_formats import KV_FORMATS, QUANTISED
from slipstream.cli import render
from slipstream.cli.loading import quieten
from slipstream.cli.option_groups import argument, expand_groups, option
from slipstream.cli.table_forms import render_terminal
from slipstream.core.strict import JsonObject
from slipstream.drafters.registry import DRAFTERS, Needs
from slipstream.errors import PairError
from slipstream.measure.tables import Table, words
from slipstream.settings import STRING

if TYPE_CHECKING:
    from slipstream.checkpoints.config import DecoderConfig
    from slipstream.targets.described import Described, MemoryPlan
    from slipstream.targets.pair_check import PairReport

SHAPE = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "vocab_size", "context", "source_context",
         "position", "parameters", "active_parameters")  # fmt: skip
"""Fields of a configuration that are shown unchanged."""
COMPARED = ("architecture", "parameters", "stored", "context", "vocabulary", "executor")
"""Rows that are shown for both models of a pair."""


@expand_groups
def info(
    model: str = argument("Model: folder, hub id, GGUF file, 'embedded' or 'smollm2'.", default="embedded"),
    draft: str | None = argument("Draft model: check whether it fits the model.", default=None, shown=False),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Describe a model, or check a pair of target and draft model.

    Shows the model's architecture, sizes, tokenizer, executor and supported weight formats, and whether it fits into
    memory. With a draft model, check that both have the same vocabulary: exit code 0 if they are compatible, 1 if not.
    No weights are loaded; `slipstream simulate` predicts the speed-up of a pair, `slipstream bench` measures it.
    """
    quieten()
    from slipstream.targets.describe import describe

    target = describe(model)
    if draft is not None:
        show_pair(target, describe(draft, LoadSettings(role="draft")), as_json)
    needed, facts = plan_memory(target), collect_facts(target, model)
    if as_json:
        print(json.dumps(facts | {"memory": asdict(needed)}))
    else:
        render.out().print(render.facts_table([*make_rows(facts), *render.memory(needed)[1:]]), soft_wrap=False)


def plan_memory(target: Described, *models: Described) -> MemoryPlan:
    """Plan the memory, with a KV cache for one sequence of the context length (no KV cache without a limit)."""
    from slipstream.targets.described import plan

    tokens = target.usual_kv_tokens(1) or target.config.context
    return plan(target, tokens if tokens < UNBOUNDED else 0, models)


def collect_facts(seen: Described, name: str) -> JsonObject:
    """Return the facts about a model that `info` shows. name: the model as the user gave it."""
    from slipstream.checkpoints.config import DecoderConfig
    from slipstream.tokens.token_map import has_chat_template

    config, tokens, device, experts = seen.config, seen.token_map, seen.settings.device, seen.config.experts
    ours = seen.runner == "native" and not seen.checkpoint.is_gguf and isinstance(config, DecoderConfig)
    windows = [w for w in config.windows if w is not None]
    return {
        "model": name,
        "folder": str(seen.checkpoint.place),
        "architecture": config.model_type,
        **{name: getattr(config, name) for name in SHAPE},
        "chat_template": has_chat_template(seen.checkpoint),
        "stored_bytes": seen.stored,
        "loaded_dtype": str(seen.settings.dtype).removeprefix("torch."),
        "loaded_bytes": seen.weight_bytes,
        "tokens": None if tokens is None else len(tokens.tokens),
        "kv_bytes_per_token": seen.kv_bytes,
        "mtp_bytes": seen.mtp_bytes[0],
        "mtp_kv_bytes_per_token": seen.mtp_bytes[1],
        "tied_head": config.tie_embeddings,
        "sliding_window": sorted(set(windows)),
        "sliding_layers": len(windows),
        "experts": None if experts is None else {"count": experts.count, "per_token": experts.per_token},
        "rope": dict(config.rope_parameters),
        "special_tokens": None if tokens is None else dict(tokens.roles),
        "eos_ids": list(seen.eos_ids),
        "executor": seen.runner,
        "device": str(device),
        "not_native": seen.refusals.get("native") if device.type == "cpu" else None,
        "drafters": [
            name
            for name, spec in DRAFTERS.items()
            if not spec.refusal(seen.kind) and (spec.needs is not Needs.MTP_LAYERS or seen.mtp_layers)
        ],
        "native": collect_native(config) if ours else None,  # type: ignore[arg-type]
        "supported": True,
    }


def collect_native(config: DecoderConfig) -> JsonObject:
    """Return what the native executor supports for this model on this processor. "settings": setting -> why it is not
    supported, or None."""
    import torch

    from slipstream.backends.native.kernels.processor import kv_refusal
    from slipstream.backends.native.native_backend import int8_products, refusal

    settings = {f"quantize {name}": refusal(config, each) for name, each in QUANTISED.items()}
    settings |= {f"kv_dtype {name}": kv_refusal(name) for name in KV_FORMATS if name != "float32"}
    return {
        "int8_products": int8_products(),
        "settings": settings | {"dtype bfloat16": refusal(config, dtype=torch.bfloat16)},
    }


def make_rows(facts: JsonObject) -> list[tuple[str, str]]:
    """Return the facts as rows of (name, text)."""
    experts, windows = facts["experts"], facts["sliding_window"]
    sizes = [f"{render.size(n)} in {dtype}" for dtype, n in (facts["stored_bytes"] or {}).items()]
    special = [f"{role} {i}" for role, i in (facts["special_tokens"] or {}).items() if i is not None]
    refused = f"; not native: {facts['not_native']}" if facts["not_native"] else ""
    missing = [name for name in DRAFTERS if name not in facts["drafters"]]
    shown = {
        "model": facts["model"] + ("" if facts["folder"] == facts["model"] else f"  ({facts['folder']})"),
        "architecture": f"{facts['architecture']}, {facts['layers']} layers of width {facts['hidden_size']}",
        "parameters": render.count(facts["parameters"])
        + (f", {render.count(facts['active_parameters'])} active per token" if experts else ""),
        "stored": " + ".join(sizes) or "unknown",
        "loaded": f"{render.size(facts['loaded_bytes'])}, computed in {facts['loaded_dtype']}",
        "attention": f"{facts['heads']} heads, {facts['kv_heads']} KV heads, head size {facts['head_dim']}",
        "window": f"{', '.join(map(str, windows))} tokens in {facts['sliding_layers']} layers"
        if windows
        else "none: full attention",
        "experts": f"{experts['per_token']} of {experts['count']} per token" if experts else "none: dense",
        "positions": positions(facts),
        "context": f"{context(facts['context'], 'tokens')}, {render.size(facts['kv_bytes_per_token'])} of KV each",
        "MTP layers": f"{render.size(mtp)}, {render.size(facts['mtp_kv_bytes_per_token'])} of KV for each token"
        if (mtp := facts["mtp_bytes"])
        else "",
        "source": "" if facts["source_context"] is None else f"{context(facts['source_context'], 'tokens')}, read once",
        "vocabulary": vocabulary(facts),
        "special": ", ".join(special) or "unknown",
        "lm_head": "tied to the embedding" if facts["tied_head"] else "not tied",
        "chat template": "yes" if facts["chat_template"] else "no",
        "executor": f"{facts['executor']} on {facts['device']}{refused}",
        "drafters": f"all but {', '.join(missing)}" if missing else "all",
    }
    if known := facts["native"]:
        shown["int8 products"] = known["int8_products"]
        for name, reason in known["settings"].items():
            shown[name] = "supported" if reason is None else f"not supported: {reason}"
    return [(name, text) for name, text in shown.items() if text]


def context(tokens: int, unit: str = "") -> str:
    """Write a context length with its unit, or "no bound"."""
    return "no bound" if tokens == UNBOUNDED else f"{tokens} {unit}".rstrip()


def positions(described: JsonObject) -> str:
    rope = described["rope"]
    if described["position"] != "rope":
        return described["position"]
    by_layer = {name: each for name, each in rope.items() if isinstance(each, dict)}  # Gemma 3 and 4
    if by_layer:
        return "; ".join(f"{positions(described | {'rope': each})} ({name})" for name, each in by_layer.items())
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = f", scaled {kind} by {rope['factor']:g}" if "factor" in rope else ""
    return f"rotary, theta {rope['rope_theta']:g}{factor}"


def vocabulary(described: JsonObject) -> str:
    if described["tokens"] is None:
        return f"{described['vocab_size']} ids; no tokenizer files, so prompts must be token ids"
    padding = described["vocab_size"] - described["tokens"]
    return f"{described['tokens']} tokens" + (f", padded to {described['vocab_size']} ids" if padding > 0 else "")


def show_pair(target: Described, draft: Described, as_json: bool) -> NoReturn:
    """Print whether the models are compatible and fit into memory. Exit code 0 if they are compatible, else 1."""
    from slipstream.targets.pair_check import check_pair

    report = check_pair(target, draft)
    sides = {role: collect_facts(each, str(each.checkpoint)) for role, each in (("target", target), ("draft", draft))}
    needed = plan_memory(target, draft)
    if as_json:
        print(json.dumps(report.as_dict() | sides | {"memory": asdict(needed)}))
    else:
        show(report, sides, needed)
    raise typer.Exit(0 if report.fits else 1)


def show(report: PairReport, sides: dict[str, JsonObject], needed: MemoryPlan) -> None:
    console = render.out()
    shown = [dict(make_rows(each)) for each in sides.values()]
    lines = [[name, *(each[name] for each in shown)] for name in COMPARED]
    console.print(render_terminal(Table("", list(map(words, ("", *sides))), lines)))
    if not report.fits:
        console.print(f"The models are not compatible: {report.problem}.", style="bold")
        if report.target.config.source_context is report.draft.config.source_context is None:
            console.print(f"- {tokens_in_common(report)}.", highlight=False)
        return
    agree = f"all {report.common} common token ids agree" if report.compared else "only vocabulary sizes were compared"
    if report.differing:
        agree = f"all ordinary token ids agree, {report.differing} special token ids differ"
    console.print(f"The models are compatible: {agree}.", style="bold")
    for line in [*report.notes, "`slipstream simulate -m TARGET -md DRAFT` predicts the speed-up"]:
        console.print(f"- {line}.")
    console.print(render.facts_table(render.memory(needed)))


def tokens_in_common(report: PairReport) -> str:
    """Describe in a sentence what `--draft-tokenizer` does for models with different tokenizers."""
    from slipstream.drafters.string_match import vocabularies
    from slipstream.tokens.text import tokenizer_of

    width = report.target.config.vocab_size, report.draft.config.vocab_size
    try:
        shared = vocabularies(tokenizer_of(report.target.checkpoint), tokenizer_of(report.draft.checkpoint), width)
    except PairError as refused:
        return f"--draft-tokenizer does not help: {refused.what}"
    return f"with --draft-tokenizer {STRING} the draft model keeps its tokenizer: {shared}"
