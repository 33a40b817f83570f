"""The model card of an embedded model, written from the records of its run."""

from __future__ import annotations

import platform
from typing import Any

RECIPES = {
    "target": (
        "Trained from scratch with the LayerSkip recipe (layer dropout and early-exit loss, arXiv 2404.16710), so\n"
        "that its first layers can draft for the whole model."
    ),
    "plain": "Trained on the next token of its data.",
    "draft": (
        "Trained from scratch on the target's distributions (forward KL mixed with the next-token loss), because what\n"
        "matters in a draft model is how often the target accepts its tokens."
    ),
}


def command_of(config: dict[str, Any]) -> str:
    """The command line of a run, or of one of its parts, from its configuration."""
    words = ["python -m recipes.embedded.train", "--out OUT", f"--role {config['role']}"]
    if config.get("teacher"):
        words.append("--teacher TARGET_OUT")
    if config.get("start"):
        words.append("--start FOLDER")
    for name in ("budget_minutes", "budget_tokens", "decay_share", "lr", "seed", "step_tokens"):
        if config.get(name) is not None:
            words.append(f"--{name.replace('_', '-')} {config[name]}")
    words.append(f"--edit-share {config['mix']['edit']}")
    if config.get("pre_tokenizer", "code") != "code":
        words.append(f"--pre-tokenizer {config['pre_tokenizer']}")
    if config.get("resume"):
        words.append("--resume")
    return " ".join(words)


def model_card(
    role: str,
    parameters: int,
    config: dict[str, Any],
    commands: list[str],
    data: dict[str, Any],
    progress: dict[str, Any],
    heldout: dict[str, float],
    samples: list[tuple[str, str]],
    extra: dict[str, str],
) -> str:
    """Markdown with front matter: data, tokens seen, held-out loss, seed, command and sample output.

    Args:
        commands: the command lines of the run, one for every part of an interrupted run.
        data: `data.json` of the token cache; progress: the checkpoint's counters; heldout: nats per token.
        samples: (prompt, continuation) pairs, greedy; extra: further measured facts, label to value.
    """
    import torch

    shape = config["shape"]
    seen = data["tokens"]["train"]
    windows = f"{config['eval_rows']} windows of {config['length']} tokens"
    facts = {
        "parameters": f"{parameters:,}",
        "layers, width, heads (key heads)": (
            f"{shape['num_hidden_layers']}, {shape['hidden_size']}, "
            f"{shape['num_attention_heads']} ({shape['num_key_value_heads']})"
        ),
        "vocabulary": f"{shape['vocab_size']} (byte-level BPE)",
        "context": f"{shape['max_position_embeddings']} tokens",
        "tokens seen": f"{progress['tokens']:,} in {progress['step']:,} steps",
        "training time": f"{progress['seconds'] / 60:.0f} minutes, device {config['device']}",
        "held-out loss, files": f"{heldout.get('raw', float('nan')):.3f} nats a token ({windows})",
        "held-out loss, answers of edit requests": f"{heldout.get('edit', float('nan')):.3f} nats a token",
        "seed": str(config["seed"]),
        "machine": f"{platform.machine()}, {config['threads']} threads, torch {torch.__version__}",
        **extra,
    }
    table = "\n".join(f"| {k} | {v} |" for k, v in facts.items())
    packages = "\n".join(
        f"| {name} | {p['version']} | {p['licence']} | {p['files']} |" for name, p in sorted(data["packages"].items())
    )
    shown = "\n\n".join(
        f"Prompt:\n\n```text\n{a}\n```\n\nContinuation (greedy):\n\n```text\n{b}\n```" for a, b in samples
    )
    listed = "\n".join(f"    {command}" for command in commands)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, python, {role}]
---

# Slipstream embedded {role}

A small causal language model of Python source for demonstrating and testing speculative decoding offline. It is
**not** a useful assistant: it writes code-shaped text, and it can repeat a snippet with a small edit.
{RECIPES["plain" if role == "draft" and not config.get("teacher") else role]}

| fact | value |
|---|---|
{table}

## Command

In a clone of Slipstream's repository:

{listed}

Every line continues the run of the line before. With a budget in minutes the number of steps depends on how fast and
how busy the machine was; with `--budget-tokens` instead, the same seed, data and machine give the same weights.

## Data

Python source of the standard library and of permissively licensed packages installed in the same environment; tests,
vendored copies, generated files and near-duplicates are left out. Split by file: {data["files"]["train"]} files train,
{data["files"]["heldout"]} held out. Training tokens available: {seen["raw"]:,} in files, {seen["write"]:,} in requests
to write a function, {seen["edit"]:,} in requests to edit one (both made from the training files by a program).
Batches of the last part of the run mix them {config["mix"]["raw"]:.0%} / {config["mix"]["write"]:.0%} /
{config["mix"]["edit"]:.0%}.

| package | version | licence | files |
|---|---|---|---|
{packages}

## Chat

`<|user|>\\n...<|end|>\\n<|assistant|>\\n...<|end|>\\n`; the tokenizer's chat template renders it. Text ends with
`<|endoftext|>`, a turn with `<|end|>`; both are listed as `eos_token_id` of the generation configuration.

## Samples

{shown}
"""
