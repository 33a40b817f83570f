"""`slipstream info`: architecture, memory use and executor of a checkpoint; whether a draft model fits it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from slipstream.cli import render
from slipstream.cli.loading import quieten
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.cli.pair import show_pair
from slipstream.errors import ParameterError
from slipstream.settings import WEIGHT_FORMATS

if TYPE_CHECKING:
    from slipstream.models.config import DecoderConfig

SETTINGS = {
    **{name: f"quantize {name}" for name in WEIGHT_FORMATS},
    "bfloat16": "dtype bfloat16",
    "float16 KV": "kv-dtype float16",
}
"""Name of a measured distance -> the option that it belongs to."""


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
        from slipstream.plan import support_matrix

        print(json.dumps(support_matrix.matrix()) if as_json else support_matrix.page().rstrip("\n"))
        return
    found = describe(model)
    if as_json:
        print(json.dumps(found))
        return
    console = render.out()
    console.print(render.facts_table(rows(found)), soft_wrap=False)


def describe(model: str) -> dict[str, Any]:
    """The facts as plain JSON values. Raises LoadError or a subclass, e.g. for an unsupported architecture."""
    from slipstream.drafters.registry import DRAFTERS
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
    """What the native executor supports for this model on this processor, and the distance of each setting from
    float64. kl and agreement: as in `Distance`; refused: why a setting is not supported, else None."""
    import torch

    from slipstream.backends.native.accuracy import MEASURED_ON, bfloat16_products, distances, int8_products
    from slipstream.backends.native.packed_weights import refusal

    asked: dict[str, Any] = {name: {"quantised": each} for name, each in WEIGHT_FORMATS.items()}
    asked["bfloat16"] = {"dtype": torch.bfloat16}
    return {
        "int8_products": int8_products(),
        "bfloat16_products": bfloat16_products(),
        "distances": {
            name: {**vars(distance), "refused": refusal(config, **asked.get(name, {}))}
            for name, distance in distances().items()
        },
        "measured_on": MEASURED_ON,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as rows of names and texts."""
    experts, stored, window = found["experts"], found["stored_bytes"], found["sliding_window"]
    active = f", {render.count(found['active_parameters'])} active per token" if experts else ""
    special = ", ".join(f"{role} {i}" for role, i in (found["special_tokens"] or {}).items() if i is not None)
    sizes = [f"{render.size(n)} in {dtype}" for dtype, n in (stored or {}).items()]
    context, source = render.context(found["context"], "tokens"), found["source_context"]
    return [
        ("model", found["model"] + ("" if found["folder"] == found["model"] else f"  ({found['folder']})")),
        ("architecture", f"{found['architecture']}, {found['layers']} layers of width {found['hidden_size']}"),
        ("parameters", render.count(found["parameters"]) + active),
        ("stored", " + ".join(sizes) or "unknown"),
        ("loaded", f"{render.size(found['loaded_bytes'])}, computed in {found['loaded_dtype']}"),
        ("attention", f"{found['heads']} heads, {found['kv_heads']} KV heads, head size {found['head_dim']}"),
        (
            "window",
            f"{', '.join(map(str, window))} tokens in {found['sliding_layers']} layers"
            if window
            else "none: full attention",
        ),
        ("experts", f"{experts['per_token']} of {experts['count']} per token" if experts else "none: dense"),
        ("positions", positions(found)),
        ("context", f"{context}, {render.size(found['kv_bytes_per_token'])} of KV each"),
        *([] if source is None else [("source", f"{render.context(source, 'tokens')}, read once")]),
        ("vocabulary", vocabulary(found)),
        ("special", special or "unknown"),
        ("lm_head", "tied to the embedding" if found["tied_head"] else "not tied"),
        ("chat template", render.yes(found["chat_template"])),
        ("executor", f"{found['executor']} on {found['device']}" + not_native(found["not_native"])),
        ("drafters", supported(found["drafters"])),
        *native_rows(found["native"]),
    ]


def supported(drafters: list[str]) -> str:
    from slipstream.drafters.registry import DRAFTERS

    missing = [name for name in DRAFTERS if name not in drafters]
    return f"all but {', '.join(missing)}" if missing else "all"


def not_native(reason: str | None) -> str:
    return "" if reason is None else f"; not native: {reason}"


def native_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """One row per instruction set and per setting."""
    if found is None:
        return []
    made = [("int8 products", found["int8_products"]), ("bfloat16", found["bfloat16_products"])]
    for name, d in found["distances"].items():
        text = f"KL {d['kl']:.1e} nats per token, argmax agreement {100 * d['agreement']:.2f} %"
        made.append((SETTINGS[name], text if d["refused"] is None else f"not supported: {d['refused']}"))
    return [*made, ("measured on", found["measured_on"])]


def positions(found: dict[str, Any]) -> str:
    rope = found["rope"]
    if found["position"] != "rope":
        return found["position"]
    by_layer = {name: each for name, each in rope.items() if isinstance(each, dict)}  # Gemma 3 and 4
    if by_layer:
        return "; ".join(f"{positions(found | {'rope': each})} ({name})" for name, each in by_layer.items())
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = f", scaled {kind} by {rope['factor']:g}" if "factor" in rope else ""
    return f"rotary, theta {rope['rope_theta']:g}{factor}"


def vocabulary(found: dict[str, Any]) -> str:
    if found["tokens"] is None:
        return f"{found['vocab_size']} ids; no tokenizer files, so prompts must be token ids"
    padding = found["vocab_size"] - found["tokens"]
    return f"{found['tokens']} tokens" + (f", padded to {found['vocab_size']} ids" if padding > 0 else "")
