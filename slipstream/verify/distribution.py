"""Tests sampled text against the target's distribution: a likelihood-ratio test on the first tokens.

A prefix is the first tokens of an output. Its probability is the product of the target's probabilities along it, each
from one pass without drafts over the prompt and the prefix. With V tokens there are V^3 prefixes of three tokens. A
prefix that is expected often enough has its own cell. The others are pooled by the place where they leave the likely
prefixes, so that the expected count of each cell is at least five.

    output (a, b, c):   (a, b, c)   if it is likely
                        (a, b, *)   pooled: any unlikely token after (a, b)
                        (a, b)      if (a, b) is too rare to distinguish its continuations
                        (*)         everything that is rarer

G = 2 sum O ln(O / E) is asymptotically chi-squared with one degree of freedom less than there are cells; divided by
Williams' correction (Biometrika 63, 1976) it is close to it at such counts.

A bias of total variation d shifts G by at least 4 n d^2 (the least sum of squares over p of a deviation of that size,
reached if it moves mass between two halves), so the test's power gives the bias *of these cells* that it would have
detected. It does not detect a bias within a pooled cell or after the tested tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.core.params import SamplingParams, Strict
from slipstream.core.random import Stream
from slipstream.verify.reference import distribution, impossible, logits_of

if TYPE_CHECKING:
    from slipstream.llm import LLM

FEWEST = 5.0
"""Smallest expected count of a cell."""
EXPANDED = 20.0
"""Smallest expected count of a prefix whose continuations are distinguished."""
MOST_EXPANDED = 128
"""Most prefixes whose continuations are distinguished; each takes one pass of the target."""

Prefix = tuple[int, ...]
REST = -1
"""Stands for any token that has no cell of its own at this position."""


@dataclass
class Cells:
    """The cells of the prefixes of up to `length` tokens.

    mass       cell -> probability; a cell is a prefix, or a prefix that ends in REST.
    inner      prefixes whose continuations are distinguished.
    forbidden  such a prefix -> tokens that cannot follow it.
    """

    length: int
    mass: dict[Prefix, float] = field(default_factory=dict)
    inner: set[Prefix] = field(default_factory=set)
    forbidden: dict[Prefix, frozenset[int]] = field(default_factory=dict)

    def of(self, output: Seq[int]) -> Prefix | None:
        """The cell of an output; None if its probability is 0."""
        at: Prefix = ()
        for token in output[: self.length]:
            if at not in self.inner:
                break
            if token in self.forbidden[at]:
                return None
            if (*at, token) not in self.mass and (*at, token) not in self.inner:
                at = (*at, REST)
                break
            at = (*at, token)
        return at if at in self.mass else (REST,)


def cells(llm: LLM, prompt: Seq[int], params: SamplingParams, n: int, length: int = 3, noise: float = 0.0) -> Cells:
    """The cells for n samples. noise: largest change of a logit by rounding; a token that a filter drops by less than
    that counts as possible."""
    params = replace(params, max_tokens=length + 1)  # the limit is behind the tested tokens, as in `sample`
    stop_ids = llm.sequence(list(prompt), params).stop_ids
    made, rare = Cells(length), 0.0
    queue: list[tuple[float, Prefix]] = [(-1.0, ())]
    while queue:
        mass, at = heapq.heappop(queue)
        mass = -mass
        closed = len(at) == length or bool(at and at[-1] in stop_ids)
        if at and (closed or n * mass < EXPANDED or len(made.inner) == MOST_EXPANDED):
            made.mass[at] = mass
            continue
        probs, impossible = probs_after(llm, prompt, at, params, stop_ids, noise)
        made.inner.add(at)
        made.forbidden[at] = impossible
        likely = np.flatnonzero(probs * mass * n >= FEWEST).tolist()
        for token in likely:
            heapq.heappush(queue, (-mass * float(probs[token]), (*at, token)))
        left = mass * max(0.0, 1.0 - float(probs[likely].sum())) if len(likely) < len(probs) else 0.0
        if n * left >= FEWEST:
            pooled = (*at, REST)
            made.mass[pooled] = left
        else:
            rare += left
    _pool(made, rare, n)
    return made


def _pool(made: Cells, rare: float, n: int) -> None:
    """Adds the cell of everything that is rarer; if it is too rare itself, merges it with the rarest other cell."""
    if n * rare < FEWEST and made.mass:
        least = min(made.mass, key=made.mass.__getitem__)
        rare += made.mass.pop(least)
    made.mass[(REST,)] = made.mass.get((REST,), 0.0) + rare


def probs_after(
    llm: LLM, prompt: Seq[int], output: Prefix, params: SamplingParams, stop_ids: frozenset[int], noise: float
) -> tuple[np.ndarray, frozenset[int]]:
    """(float64 [V], the target's distribution from one pass without drafts; the ids that cannot follow)."""
    *_, logits = logits_of(llm.target, prompt, [*output, 0], params)
    before = llm.sequence(list(prompt), params).tokens
    p = distribution(logits, params, before, output, stop_ids)
    never = impossible(p, logits, params, before, output, stop_ids, noise)
    return p, frozenset(np.flatnonzero(never).tolist())


@dataclass
class Samples:
    """The first tokens of sampled texts of one prompt. drafted: draft tokens that were verified in them."""

    outputs: list[list[int]] = field(default_factory=list)
    drafted: int = 0


def sample(
    llm: LLM,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    n: int,
    length: int,
    batch: int,
    seeds: Iterator[int],
    draft_tokens: Seq[int],
    advance: Callable[[], None] = lambda: None,
) -> list[Samples]:
    """The first `length` tokens of n texts for each prompt. A batch holds texts of all prompts in turn, and the batches
    take the draft lengths in turn."""
    before = llm.max_batch, llm.draft_tokens
    found = [Samples() for _ in prompts]
    order = [i for _ in range(n) for i in range(len(prompts))]
    try:
        for number, start in enumerate(range(0, len(order), batch)):
            chosen = order[start : start + batch]
            llm.max_batch, llm.draft_tokens = batch, (most := draft_tokens[number % len(draft_tokens)])
            # Room after the tested tokens, so that drafts are as long there as elsewhere; decoding stops before it.
            own = replace(params, max_tokens=length + most + 1, stop=(), seed=None, logprobs=None)
            seqs = [llm.sequence(list(prompts[i]), own) for i in chosen]
            for seq in seqs:
                seq.random = Stream(next(seeds))
            steps = llm.decode(seqs)
            for _ in steps:
                if all(seq.finish or len(seq.output) >= length for seq in seqs):
                    steps.close()  # type: ignore[attr-defined]
                    break
            for i, seq in zip(chosen, seqs, strict=True):
                found[i].outputs.append(seq.output[:length])
                found[i].drafted += seq.stats.proposed
            advance()
    finally:
        llm.max_batch, llm.draft_tokens = before
    return found


@dataclass(frozen=True)
class DistributionTest(Strict):
    """The result of testing n samples.

    p              p-value of G; 0 if an impossible output was sampled.
    freedom        degrees of freedom; 0: all mass is in one cell, so no bias can be detected.
    smallest_bias  smallest total variation, over these cells, that is detected with the given power; None: none is.
    forbidden      samples whose probability is 0.
    largest        the cells with the largest deviations, as (tokens, expected, counted).
    """

    n: int
    g: float
    freedom: int
    p: float
    smallest_bias: float | None
    forbidden: int
    largest: list[tuple[Prefix, float, int]]

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"largest": [[list(cell), e, o] for cell, e, o in self.largest]}


def distribution_test(outputs: Iterable[Seq[int]], made: Cells, level: float, power: float) -> DistributionTest:
    """level: significance level; power: probability that a bias of `smallest_bias` is detected at that level."""
    counts: Counter[Prefix | None] = Counter(map(made.of, outputs))
    n, forbidden = sum(counts.values()), counts.pop(None, 0)
    rows = [(cell, n * mass, counts[cell]) for cell, mass in made.mass.items()]
    rows = [row for row in rows if row[1] > 0 or row[2]]
    freedom = len(rows) - 1
    if forbidden or any(e == 0 for _, e, _ in rows):
        g, p = math.inf, 0.0
    elif freedom < 1:
        g, p = 0.0, 1.0
    else:
        g = 2 * sum(o * math.log(o / e) for _, e, o in rows if o)
        williams = 1 + (sum(n / e for _, e, _ in rows) - 1) / (6 * n * freedom)
        g = max(0.0, g / williams)
        p = chi2_sf(g, freedom)
    bias = math.sqrt(shift_seen(freedom, level, power) / (4 * n)) if freedom >= 1 else None
    rows.sort(key=lambda row: -abs(row[2] - row[1]) / math.sqrt(max(row[1], 1.0)))
    return DistributionTest(n, g, freedom, p, bias if bias is None or bias < 1 else None, forbidden, rows[:5])


def chi2_sf(x: float, freedom: float) -> float:
    """P(chi-squared > x)."""
    a, b = (torch.tensor(v / 2, dtype=torch.float64) for v in (freedom, x))
    return float(torch.special.gammaincc(a, b))


def chi2_isf(p: float, freedom: int) -> float:
    """The x with P(chi-squared > x) = p."""
    return _solve(lambda x: chi2_sf(x, freedom) <= p)


@cache
def shift_seen(freedom: int, level: float, power: float) -> float:
    """The noncentrality at which chi-squared exceeds its critical value for `level` with probability `power`."""
    critical = chi2_isf(level, freedom)
    return _solve(lambda shift: noncentral_sf(critical, freedom, shift) >= power)


def noncentral_sf(x: float, freedom: int, shift: float) -> float:
    """P(noncentral chi-squared > x): a mixture of central ones with freedom + 2 k degrees, k Poisson-distributed."""
    mean = shift / 2
    k = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 12), dtype=torch.float64)
    weights = torch.exp(k * math.log(mean) - mean - torch.lgamma(k + 1)) if mean else (k == 0).double()
    tails = torch.special.gammaincc(freedom / 2 + k, torch.full_like(k, x / 2))
    return float((weights * tails).sum())


def _solve(reached: Callable[[float], bool]) -> float:
    """The smallest number >= 0 for which `reached` holds; it must hold for every larger number too."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
