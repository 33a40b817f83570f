"""Draft tokens on which a model overflows: one token has an infinite embedding, so that what sees it is NaN."""

from collections.abc import Sequence as Seq
from typing import Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import SourcedSequence
from tests.targets.reference import Wide

CLEAN = [20, 21, 22, 23]

Text = tuple[Seq[int], Seq[int] | None]
"""Tokens, and the source of an encoder-decoder."""


def sees(parents: Seq[int], node: int, other: int) -> bool:
    """Whether `other` is the node or an ancestor of it."""
    while node > other:
        node = parents[node]
    return node == other


def assert_spoils_only_what_sees_it(
    target: Any, spoilt: int, parents: Seq[int], texts: Seq[Text], taps: Seq[int] = ()
) -> None:
    """The token is each node in turn of the first text's draft, which has these parents."""
    for at in range(len(parents)):
        passes = []
        for nodes in (CLEAN, [spoilt if i == at else token for i, token in enumerate(CLEAN)]):
            seqs = [SourcedSequence(list(text), source=source) for text, source in texts]
            with Wide():
                out = target.run(seqs, Draft.trees([(nodes, parents), (CLEAN[:2], [-1, 0])]), taps)
            passes.append(out.logits.clone())
            for seq in seqs:
                target.release(seq.id)
        below = [0 < row <= len(parents) and sees(parents, row - 1, at) for row in range(len(passes[0]))]
        lost = torch.tensor(below)
        assert not passes[1][lost].isfinite().any()
        torch.testing.assert_close(passes[1][~lost], passes[0][~lost], rtol=1e-9, atol=1e-9)
