"""Drafters that sample from a distribution which is near the target's but not equal to it, and rules that are wrong."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import DrafterTraits
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.core.warp import distributions_after
from tests.oracle import Oracle


class ToyDrafter:
    """Samples trees from the distribution of another small model.

    widths       siblings at each depth: (1, 1, 1) is a chain of three, (3, 2) a tree of 3 + 6 nodes.
    replacement  siblings are drawn independently from one distribution (SpecInfer, 2304.09781, section 4.3); otherwise
                 each without the earlier siblings (Sequoia, 2402.12374, section 3.2).
    argmax       wrong on purpose: proposes the most probable token, but reports the distribution as if it had been
    sampled.
    """

    name = "toy"
    traits = DrafterTraits()

    def __init__(self, oracle: Oracle, widths: Seq[int], replacement: bool = False, argmax: bool = False):
        self.oracle, self.widths, self.replacement, self.argmax = oracle, widths, replacement, argmax
        self._nodes: dict[object, Siblings] = {}
        self._table: list[np.ndarray] = []  # the distributions of all `Siblings`
        self._params: list[SamplingParams] = []  # kept alive, so that ids are not reused

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[int] = []  # of the table
        splits = [0]
        for seq, depth in zip(seqs, budget, strict=True):
            start = len(tokens)
            uniforms = iter(seq.random.uniforms(DRAFT, len(seq.tokens), 32).tolist())
            ends: list[tuple[int, tuple[int, ...]]] = [(-1, ())]  # (node, draft tokens down to it)
            for width in self.widths[:depth]:
                below = []
                for node, path in ends:
                    left = self._siblings(seq, path)
                    for _ in range(width):
                        if not left.ends:
                            break  # fewer possible tokens than siblings
                        token = left.most_likely if self.argmax else bisect_right(left.ends, next(uniforms))
                        below.append((len(tokens) - start, (*path, token)))
                        tokens.append(token)
                        parents.append(node)
                        rows.append(left.row)
                        if not self.replacement:
                            left = left.others.get(token) or self._without(left, token)
                ends = below
            splits.append(len(tokens))
        q = torch.from_numpy(np.stack(self._table)[rows]) if rows else None  # [N, V]
        return Draft(torch.tensor(tokens, dtype=torch.int64), parents, splits, q)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass

    def _siblings(self, seq: Sequence, path: tuple[int, ...]) -> Siblings:
        """What the first child of a node is drawn from, by the request's own parameters, float64."""
        key = id(seq.params), seq.prompt, tuple(seq.tokens), path
        if key not in self._nodes:
            self._params.append(seq.params)
            logits = self.oracle.logits([*seq.tokens, *path])[None]
            self._nodes[key] = self._add_row(distributions_after(logits, [seq], [path])[0].numpy())
        return self._nodes[key]

    def _without(self, left: Siblings, token: int) -> Siblings:
        probs = self._table[left.row].copy()
        probs[token] = 0.0
        left.others[token] = self._add_row(probs / (probs.sum() or 1.0))
        return left.others[token]

    def _add_row(self, probs: np.ndarray) -> Siblings:
        self._table.append(probs)
        total = probs.cumsum()
        ends = (total / total[-1]).tolist() if total[-1] else []
        return Siblings(len(self._table) - 1, ends, int(probs.argmax()))


@dataclass
class Siblings:
    """A distribution that children of a node are drawn from, in the form in which thousands of draws are fast.

    row     of the table of distributions.
    ends    cumulative probabilities; empty if no token is possible.
    others  what is left for the next sibling after each token.
    """

    row: int
    ends: list[float]
    most_likely: int
    others: dict[int, Siblings] = field(default_factory=dict)
