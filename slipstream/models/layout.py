"""Packs sequences and a draft into the `Batch` that an executor runs (worked example: `executor.Batch`).

Slots: the KV of token i of a sequence is in slot i, that of node j of the draft in slot len(tokens) + j.
Positions: a node's position is that of the last pending token plus the node's depth, so siblings share one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.draft import Draft, visible
from slipstream.core.sequence import Sequence
from slipstream.models.executor import Batch


def batch_of(seqs: Seq[Sequence], draft: Draft, starts: Seq[int], device: torch.device) -> Batch:
    """Tokens `starts[b]:` of each sequence, up to its `end`, then its nodes. Logits are computed for the last of these
    tokens and for every node.

    starts  slot of the first token to run: `seq.kv_len`, or later if part of a long prompt has run already.
    """
    tokens: list[int] = []
    positions: list[int] = []
    splits = [0]
    select: list[int] = []
    trees: list[Tensor | None] = []
    for b, seq in enumerate(seqs):
        held, first, last = seq.end, draft.splits[b], draft.splits[b + 1]
        pending = held - starts[b]
        tokens += seq.tokens[starts[b] : held]
        if first == last or draft.is_chain:
            positions += range(starts[b], held + last - first)
            trees.append(None)
        else:
            positions += range(starts[b], held)
            positions += [held - 1 + depth for depth in draft.depths[first:last]]
            trees.append(visible(draft.parents[draft.splits[b] : draft.splits[b + 1]], pending))
        if first != last:
            tokens += draft.ids[first:last]
        select += range(splits[-1] + pending - 1, splits[-1] + pending + last - first)
        splits.append(splits[-1] + pending + last - first)
    return Batch(
        seq_ids=[seq.id for seq in seqs],
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),  # [M]
        positions=positions,
        splits=splits,
        past=starts,
        trees=trees,
        select=select,
    )


def prompt_piece(seq: Sequence, start: int, stop: int, device: torch.device) -> Batch:
    """Tokens `start:stop` of one sequence, to prefill a long prompt in chunks. Logits only for the last token."""
    return Batch(
        seq_ids=[seq.id],
        tokens=torch.tensor(seq.tokens[start:stop], dtype=torch.int64, device=device),  # [stop - start]
        positions=range(start, stop),
        splits=[0, stop - start],
        past=[start],
        trees=[None],
        select=[stop - start - 1],
    )
