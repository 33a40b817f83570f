"""`slipstream info`: what a checkpoint is, what it will take, and whether it can run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.engine import checkpoint, quieten


def info(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or 'embedded'.")] = "embedded",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's architecture, sizes, tokenizer, and the executor that would run it. No weights are loaded."""
    quieten()
    found = describe(model)
    if as_json:
        print(json.dumps(found))
        return
    console = render.out()
    console.print(render.facts_table(rows(found)), soft_wrap=False)


def describe(model: str) -> dict[str, Any]:
    """Plain JSON values. Raises the family of `LoadError`; an unsupported architecture is one of them."""
    from slipstream.facts import facts
    from slipstream.targets.decoder.model import choose_executor

    seen = facts(checkpoint(model, "target"))
    config, experts = seen.config, seen.config.experts
    executor, device, dtype = choose_executor(config, "auto", None, None)
    windows = sorted({w for w in config.windows if w is not None})
    return {
        "model": model,
        "folder": str(seen.folder),
        "architecture": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "parameters": seen.parameters,
        "active_parameters": seen.active_parameters,
        "stored_bytes": seen.stored,
        "loaded_dtype": str(dtype).removeprefix("torch."),
        "loaded_bytes": seen.parameters * dtype.itemsize,
        "vocab_size": config.vocab_size,
        "tokens": None if seen.tokenizer is None else len(seen.tokenizer.tokens),
        "context": config.context,
        "kv_bytes_per_token": seen.kv_bytes(dtype.itemsize),
        "tied_head": config.tie_embeddings,
        "sliding_window": windows,
        "sliding_layers": sum(w is not None for w in config.windows),
        "experts": None if experts is None else {"count": experts.count, "per_token": experts.per_token},
        "position": config.position,
        "rope": dict(config.rope_parameters),
        "special_tokens": None if seen.tokenizer is None else dict(seen.tokenizer.roles),
        "eos_ids": list(config.eos_ids),
        "chat_template": seen.chat_template,
        "executor": executor,
        "device": str(device),
        "supported": True,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people."""
    experts, stored, window = found["experts"], found["stored_bytes"], found["sliding_window"]
    active = f", {render.count(found['active_parameters'])} active a token" if experts else ""
    special = ", ".join(f"{role} {i}" for role, i in (found["special_tokens"] or {}).items() if i is not None)
    sizes = [f"{render.size(n)} in {dtype}" for dtype, n in (stored or {}).items()]
    return [
        ("model", found["model"] + ("" if found["folder"] == found["model"] else f"  ({found['folder']})")),
        ("architecture", f"{found['architecture']}, {found['layers']} layers of width {found['hidden_size']}"),
        ("parameters", render.count(found["parameters"]) + active),
        ("stored", " + ".join(sizes) or "unknown"),
        ("loaded", f"{render.size(found['loaded_bytes'])} in {found['loaded_dtype']}"),
        ("attention", f"{found['heads']} heads, {found['kv_heads']} of keys and values, {found['head_dim']} wide"),
        (
            "window",
            f"{', '.join(map(str, window))} tokens in {found['sliding_layers']} layers"
            if window
            else "none: full attention",
        ),
        ("experts", f"{experts['per_token']} of {experts['count']} a token" if experts else "none: dense"),
        ("positions", positions(found)),
        ("context", f"{found['context']} tokens, {render.size(found['kv_bytes_per_token'])} of KV each"),
        ("vocabulary", vocabulary(found)),
        ("special", special or "unknown"),
        ("head", "tied to the embedding" if found["tied_head"] else "its own"),
        ("chat template", render.yes(found["chat_template"])),
        ("executor", f"{found['executor']} on {found['device']}"),
    ]


def positions(found: dict[str, Any]) -> str:
    rope = found["rope"]
    if found["position"] != "rope":
        return found["position"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = f", scaled {kind} by {rope['factor']:g}" if "factor" in rope else ""
    return f"rotary, theta {rope['rope_theta']:g}{factor}"


def vocabulary(found: dict[str, Any]) -> str:
    if found["tokens"] is None:
        return f"{found['vocab_size']} ids; no tokenizer files: prompts have to be token ids"
    padding = found["vocab_size"] - found["tokens"]
    return f"{found['tokens']} tokens" + (f", padded to {found['vocab_size']} ids" if padding > 0 else "")
