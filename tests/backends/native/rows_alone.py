"""Rows of a batch against the same rows alone, bit by bit."""

import random

import torch
from torch import Tensor

from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.models.executor import Batch
from tests.backends.native.models import chain, forest, ids, one_by_one

ALONE, TOGETHER = 100, 200  # ids of sequences


def on_threads(model: NativeExecutor, threads: int) -> NativeExecutor:
    model._workspace.most = threads
    return model


def begin(model: NativeExecutor, seq_id: int, tokens: list[int]) -> None:
    """Prefill a prompt in one pass."""
    model.release(seq_id)
    if tokens:
        model.forward(chain(seq_id, 0, tokens, []))


def written(model: NativeExecutor, batch: Batch) -> Tensor:
    """Keys and values that a batch wrote, [rows, L, 2, Hk, D]."""
    parts = []
    for b, seq_id in enumerate(batch.seq_ids):
        length = batch.past[b] + batch.splits[b + 1] - batch.splits[b]
        parts.append(model.kv(seq_id, length)[:, :, :, batch.past[b] :].permute(3, 0, 1, 2, 4))
    return torch.cat(parts)


def same(found: Tensor, wanted: Tensor) -> None:
    differs = (found != wanted).flatten(1).any(1).nonzero().flatten().tolist()
    assert not differs, f"rows {differs} of {len(found)} differ by up to {(found - wanted).abs().max():.1e}"


def check(model: NativeExecutor, members: list[tuple[int, list[int], list[int]]], seed: int) -> None:
    """Run all members (prompt length, tokens of pending rows and nodes, parents) in one batch on several threads: every
    row equals the row alone."""
    logits, kept, rows = [], [], []
    for b, (past, tokens, parents) in enumerate(members):
        prompt = ids(past, seed + b)
        for seq_id in (ALONE + b, TOGETHER + b):
            begin(on_threads(model, 1), seq_id, prompt)
        own, cache = one_by_one(model, ALONE + b, past, tokens, parents)
        logits.append(own)
        kept.append(cache)
        rows.append((TOGETHER + b, past, tokens, parents))
    batch = forest(rows)
    for threads in (1, 3, 5) if seed % 2 else (1, 2):
        out = on_threads(model, threads).forward(batch)
        same(out.logits, torch.cat(logits))
        same(written(model, batch), torch.cat(kept))


def random_tree(draw: random.Random, most: int) -> list[int]:
    """Parents of up to `most` nodes: wide or narrow, or with other nodes between siblings."""
    nodes, kind = draw.randint(1, most), draw.random()
    return [i - 1 if draw.random() < kind else draw.randint(-1, i - 1) for i in range(nodes)]
