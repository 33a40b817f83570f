"""Trees of a draft model, grown level by level (see `tree_growth`).

The model runs the whole tree again for each level, as a target does in verification: rows are cheap compared with the
call, and the keys and values of all nodes then come from one run, from which those of the accepted path are kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.chains import ended_early, joint, possible, uncut
from slipstream.drafters.control import Control
from slipstream.drafters.tree_growth import Tree, add_level
from slipstream.theory.cost_curve import CostCurve

Ran = tuple[list[int], tuple[int, ...]]
"""Tokens and parents of the nodes that the model ran last for a sequence."""


def grow(
    model: Target,
    vocab_size: int,
    seqs: Seq[Sequence],
    shadows: Seq[Sequence],
    depth: Seq[int],
    control: Control,
    width: int,
    nodes: int,
    drawn: bool,
    costs: CostCurve | None,
) -> tuple[Draft, list[Ran]]:
    """A tree for each sequence, at most depth[b] > 0 deep, and the nodes that the model ran for it.

    shadows  the same sequences with the draft model's `kv_len`.
    drawn    siblings are drawn without replacement for requests that sample; otherwise the most likely are taken.
    A path ends after a node if `control` says so; the node itself is kept.
    """
    ids = torch.arange(vocab_size, device=model.device)
    trees = [
        Tree(seq, most, width, nodes, drawn and not seq.params.greedy, costs)
        for seq, most in zip(seqs, depth, strict=True)
    ]
    ran: list[Ran] = [([], ())] * len(seqs)
    while True:
        wanted = [[n for n in tree.frontier() if n < 0 or _may_continue(tree, n, control)] for tree in trees]
        rows = [b for b, frontier in enumerate(wanted) if frontier]
        if not rows:
            break
        run = [sorted({*trees[b].ran, *wanted[b]} - {-1}) for b in rows]
        for b, own in zip(rows, run, strict=True):
            ran[b] = trees[b].finish(own)
        tokens = [token for b in rows for token in ran[b][0]]
        splits = [0]
        for own in run:
            splits.append(splits[-1] + len(own))
        partial = Draft.of(tokens, [parent for b in rows for parent in ran[b][1]], splits, device=model.device)
        try:
            logits = model.run([shadows[b] for b in rows], partial).logits
        except Exception as fault:
            if not any(trees[b].parents for b in rows):
                raise  # nothing was drawn yet: the step may go on without a draft
            ended_early([seqs[b] for b in rows], max(trees[b].level for b in rows), fault)
            for b in rows:  # what the model ran of these trees is unknown
                ran[b] = ([], ())
            break
        picked = [
            splits[r] + r + 1 + (run[r].index(node) if node >= 0 else -1)
            for r, b in enumerate(rows)
            for node in wanted[b]
        ]
        owners = [seqs[b] for b in rows for _ in wanted[b]]
        paths = [[trees[b].columns[i] for i in trees[b].path(node)] for b in rows for node in wanted[b]]
        probs, _ = possible(logits[picked], owners, paths, vocab_size, [uncut(seq.params) for seq in owners])  # [F, V]
        add_level([trees[b] for b in rows], [wanted[b] for b in rows], probs, ids)
    kept = [tree.kept() for tree in trees]
    ends = [tree.finish(own) for tree, own in zip(trees, kept, strict=True)]
    distributions = [torch.stack(tree.q) if tree.drawn and tree.q else None for tree in trees]
    splits = [0]
    for own in kept:
        splits.append(splits[-1] + len(own))
    draft = Draft.of(
        [token for columns, _ in ends for token in columns],
        [parent for _, parents in ends for parent in parents],
        splits,
        joint([columns for columns, _ in ends], distributions, vocab_size),
        device=model.device,
    )
    return draft, ran


def accepted_path(ran: Ran, text: Seq[int]) -> list[int]:
    """The longest path of nodes that were run and that agree with `text`."""
    tokens, parents = ran
    path: list[int] = []
    for token in text:
        at = path[-1] if path else -1
        node = next((i for i, parent in enumerate(parents) if parent == at and tokens[i] == token), None)
        if node is None:
            break
        path.append(node)
    return path


def _may_continue(tree: Tree, node: int, control: Control) -> bool:
    return control.kind == "fixed" or control.more([tree.path_probs[i] for i in tree.path(node)])
