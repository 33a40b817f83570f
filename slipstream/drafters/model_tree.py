"""Trees of a draft model, grown level by level (see `tree_growth`).

The model runs the whole tree again for each level, as a target does in verification: rows are cheap compared with the
call, and the keys and values of all nodes then come from one run, from which those of the accepted path are kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.chains import ended_early, possible, uncut
from slipstream.drafters.tree_growth import Tree, add_level

Ran = tuple[list[int], tuple[int, ...]]
"""Tokens and parents of the nodes that the model ran last for a sequence."""


def grow(model: Target, vocab_size: int, trees: Seq[Tree], shadows: Seq[Sequence]) -> list[Ran]:
    """Grow the trees, and return the nodes of each that the model ran.

    shadows  their sequences with the draft model's `kv_len`.
    """
    ran: list[Ran] = [([], ())] * len(trees)
    while True:
        wanted = [tree.frontier() for tree in trees]
        rows = [b for b, frontier in enumerate(wanted) if frontier]
        if not rows:
            return ran
        run = [sorted({*trees[b].ran, *wanted[b]} - {-1}) for b in rows]
        for b, nodes in zip(rows, run, strict=True):
            ran[b] = trees[b].finish(nodes)
        partial = Draft.trees([ran[b] for b in rows], model.device)
        try:
            logits = model.run([shadows[b] for b in rows], partial).logits
        except Exception as fault:
            if not any(trees[b].parents for b in rows):
                raise  # nothing was drawn yet: the step may go on without a draft
            ended_early([trees[b].seq for b in rows], max(trees[b].level for b in rows), fault)
            for b in rows:  # what the model ran of these trees is unknown
                ran[b] = ([], ())
            return ran
        picked = [
            partial.splits[r] + r + 1 + (run[r].index(node) if node >= 0 else -1)
            for r, b in enumerate(rows)
            for node in wanted[b]
        ]
        owners = [trees[b].seq for b in rows for _ in wanted[b]]
        paths = [[trees[b].tokens[i] for i in trees[b].path(node)] for b in rows for node in wanted[b]]
        probs, _ = possible(logits[picked], owners, paths, vocab_size, [uncut(seq.params) for seq in owners])  # [F, V]
        add_level([trees[b] for b in rows], [wanted[b] for b in rows], probs)


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
