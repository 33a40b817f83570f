"""The card of a trained head or draft: what it is for, what it was made from, how, and what was measured."""

from __future__ import annotations

import platform
from typing import Any

import torch

from slipstream.training.loop import Loop
from slipstream.training.methods import METHODS


def run_card(config: Any, loop: Loop, data: dict[str, Any], figures: dict[str, Any], commands: list[str]) -> str:
    """Markdown with front matter. config: the `RunConfig`; data: `data.json`; figures: what was measured;
    commands: the command lines of the run's parts."""
    c, progress = config.loop, loop.progress
    facts = {
        "target": f"`{config.target}`",
        "parameters": f"{sum(p.numel() for p in loop.parameters):,} trained",
        "tokens seen": f"{progress.tokens:,} in {progress.step:,} steps of {c.step_tokens:,}",
        "training time": f"{progress.seconds / 60:.1f} minutes",
        "device": f"{c.device}, {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        "seed": str(c.seed),
        "options": ", ".join(f"{k}={v}" for k, v in vars(config.options).items()),
    }
    for name, value in figures.items():
        if name.startswith("tau@"):
            temperature = float(name[4:])
            at = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            facts[f"simulated acceptance length, {at}, chain of {loop.objective.depth}"] = f"{value:.2f}"
        elif isinstance(value, float):
            facts[f"held-out {name}"] = f"{value:.3f}"
    table = "\n".join(f"| {k} | {v} |" for k, v in facts.items())
    sources = "\n".join(
        f"- `{s['name']}`" + (f", {s['bytes']:,} bytes, sha256 {s['digest']}..." if "bytes" in s else "")
        for s in data["sources"]
    )
    packages = {n: p for d in data.get("details", {}).values() for n, p in d.get("packages", {}).items()}
    licences = ""
    if packages:
        rows = "\n".join(f"| {n} | {p['version']} | {p['licence']} |" for n, p in sorted(packages.items()))
        licences = f"\n\n| package | version | licence |\n|---|---|---|\n{rows}"
    listed = "\n".join(f"    {command}" for command in commands) or "    (trained from Python)"
    own = ""
    if config.regenerate:
        own = f"\n\n{config.regenerate:,} further tokens were written by the target itself, from prefixes of this data."
    return f"""---
tags: [speculative-decoding, {config.kind}]
base_model: {config.target}
---

# {METHODS[config.kind].makes} for `{config.target}`

It drafts tokens and its target verifies them, so it decides how fast text comes, never what the text says.

| fact | value |
|---|---|
{table}

The acceptance length is tokens per step, the target's own token included, simulated on text that the target wrote after
{config.texts} held-out prompts ({config.text_tokens} tokens each).

## Command

{listed}

Each line goes on with the run of the line before. With `--budget-tokens`, the same seed, data and machine give the same
weights; with minutes, the number of steps depends on how busy the machine was.

## Data

{sources}{licences}

{config.heldout_share:.0%} of the documents were held out.{own}
"""
