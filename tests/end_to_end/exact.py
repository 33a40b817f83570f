"""The exact law of what a target says, by enumeration, and the test that holds samples against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence as Seq

from scipy.stats import chi2
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.core.warp import warp

LEVEL = 1e-6
"""A test fails where a correct program would with this probability: with some 40 tests, once in 25000 runs; but
seeds are fixed, so a test that passes once passes always."""

Law = dict[tuple[int, ...], float]


class Oracle:
    """A target's logits after any text, each computed once, by prefill alone: no draft, no batch, no reused cache."""

    def __init__(self, target: Target):
        self.target = target
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Seq[int]) -> Tensor:
        """[V]"""
        key = tuple(tokens)
        if key not in self._known:
            seq = Sequence(list(key))
            self._known[key] = self.target.run([seq], Draft.empty(1, self.target.device)).logits[0].clone()
            self.target.commit([seq], [[]])
            self.target.release(seq.id)
        return self._known[key]

    def law(self, prompt: Seq[int], output: Seq[int], params: SamplingParams, stop_ids: Iterable[int] = ()) -> Tensor:
        """[V], after warping."""
        return warp(self.logits([*prompt, *output])[None], params, prompt, [list(output)], frozenset(stop_ids))[0]

    def greedy(self, prompt: Seq[int], n: int) -> list[int]:
        """The n tokens that plain greedy decoding says."""
        text = list(prompt)
        for _ in range(n):
            text.append(int(self.logits(text).argmax()))
        return text[len(prompt) :]


def joint_law(
    oracle: Oracle,
    prompt: Seq[int],
    params: SamplingParams | Seq[SamplingParams],
    stop_ids: frozenset[int] = frozenset(),
    length: int = 3,
) -> Law:
    """Probability of each possible beginning, `length` tokens or ended earlier by a stop id. `params` may differ from
    token to token."""
    each = [params] * length if isinstance(params, SamplingParams) else params
    law: Law = {}
    open_ends: Law = {(): 1.0}
    for now in each:
        grown: Law = {}
        for output, mass in open_ends.items():
            for token, p in enumerate(oracle.law(prompt, output, now, stop_ids).tolist()):
                if p > 0:
                    (law if token in stop_ids else grown)[(*output, token)] = mass * p
        open_ends = grown
    return law | open_ends


def g_test(counts: Mapping[tuple[int, ...], int], law: Law) -> float:
    """p-value of the likelihood-ratio test of counts against an exact law (G is asymptotically chi-squared).

    Outcomes expected less than 5 times are pooled; an outcome that the law forbids gives 0.
    """
    n = sum(counts.values())
    if any(outcome not in law for outcome in counts):
        return 0.0
    cells: list[tuple[float, int]] = []  # expected, counted
    rare, rarely = 0.0, 0
    for outcome, p in law.items():
        if n * p < 5:
            rare, rarely = rare + n * p, rarely + counts.get(outcome, 0)
        else:
            cells.append((n * p, counts.get(outcome, 0)))
    if rare > 0:
        cells.append((rare, rarely))
    g = 2 * sum(o * math.log(o / e) for e, o in cells if o)
    return float(chi2.sf(g, len(cells) - 1))


def needed(law: Law, other: Law) -> float:
    """How many samples of `other` it takes until `g_test` against `law` is expected to fail: small if the test can
    tell them apart. Expected G is 2 n KL(other, law) + degrees of freedom."""
    if any(outcome not in law for outcome in other):
        return 0.0
    divergence = sum(p * math.log(p / law[outcome]) for outcome, p in other.items())
    freedom = len(law) - 1
    return math.inf if divergence < 1e-12 else (float(chi2.isf(LEVEL, freedom)) - freedom) / (2 * divergence)


def beginnings(outputs: Iterable[Seq[int]], length: int = 3) -> Counter[tuple[int, ...]]:
    return Counter(tuple(output[:length]) for output in outputs)
