"""Runs pending tokens and drafts: which rows each pass of llama.cpp has, and which sequence ids they belong to.

Each branch of a draft has an id of its own: it shares the cells of the text, and those of the nodes that it has in
common with others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.targets.gguf.llama_context import ROWS, Logits, Row
from slipstream.targets.gguf.sequence_ids import SequenceIds
from slipstream.targets.gguf.tree_passes import Part, leaf_paths, passes


def run_draft(ids: SequenceIds, seqs: Seq[Sequence], draft: Draft) -> Logits:
    """Logits [B + N, V] of the last pending tokens and of the draft tokens, packed as `Target.run` returns them."""
    helds = [ids.rolled_back(seq) for seq in seqs]
    if not draft.is_chain and not ids.has(sum(len(leaf_paths(draft, b)) - 1 for b in range(len(seqs)))):
        ids.widen()
    ids.make_room(sum(seq.end - held.length for seq, held in zip(seqs, helds, strict=True)) + len(draft))
    parts = passes(draft, _tails(ids, seqs, draft), len(ids.free), ROWS)
    if len(parts) == 1:
        return _pass(ids, parts[0], seqs, draft)[0]
    logits = np.empty((len(seqs) + len(draft), ids.context.model.vocab_size), np.float32)
    for each in parts:
        found, rows = _pass(ids, each, seqs, draft)
        logits[rows] = found
        for part in each:  # the next pass needs the ids
            ids.drop_branches(ids[seqs[part.b].id])
    return logits


def _tails(ids: SequenceIds, seqs: Seq[Sequence], draft: Draft) -> list[int]:
    """How many pending tokens of each sequence run together with its nodes. Those before them, of a long prompt, are
    run here."""
    tails = []
    early: list[Row] = []
    for b, seq in enumerate(seqs):
        held, count = ids[seq.id], draft.splits[b + 1] - draft.splits[b]
        tails.append(min(seq.end - held.length, ROWS - count))
        early += [(seq.tokens[i], i, (held.id,), False) for i in range(held.length, seq.end - tails[-1])]
        held.cells = seq.end - tails[-1]
    for at in range(0, len(early), ROWS):
        ids.context.decode(early[at : at + ROWS])
    return tails


def _pass(ids: SequenceIds, parts: Seq[Part], seqs: Seq[Sequence], draft: Draft) -> tuple[Logits, list[int]]:
    """Logits [R, V] of the last pending tokens and the nodes of these parts, and which packed rows they are."""
    rows: list[Row] = []
    packed: list[int] = []
    for part in parts:
        seq, first = seqs[part.b], draft.splits[part.b]
        held = ids[seq.id]
        if not part.first:
            held.cells = held.length + len(held.branches[0][1])
            ids.cut(held, held.length)
        own = (held.id, *(ids.free.pop() for _ in part.paths[1:]))
        held.branches = list(zip(own, part.paths, strict=True))
        if held.cells:
            for branch in own[1:]:
                ids.context.fork(held.id, branch)
        if part.first:
            rows += [(seq.tokens[i], i, own, i == seq.end - 1) for i in range(held.cells, seq.end)]
            packed.append(first + part.b)
            held.length = seq.end
        of: dict[int, list[int]] = {}  # node -> ids of the branches that it is on
        for branch, path in held.branches:
            for node in path:
                of.setdefault(node, []).append(branch)
        for node in sorted(of):
            position = seq.end - 1 + draft.depths[first + node]
            rows.append((draft.ids[first + node], position, tuple(of[node]), True))
            packed.append(first + part.b + 1 + node)
    return ids.context.decode(rows), packed
