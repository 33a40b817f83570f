"""Does sampled text follow the target's own law? A likelihood-ratio test against the exact law of the first tokens.

The law of a beginning is the product of the target's laws along it, each from one undrafted pass over prompt and
beginning. With V tokens there are V^3 beginnings of three tokens: those that are expected often enough are cells of
their own, the others are pooled by where they leave the likely ones, so that each cell is expected at least five times.

    outcome (a, b, c):   (a, b, c)   if it is likely
                         (a, b, *)   pooled: some unlikely token behind (a, b)
                         (a, b)      where beginnings as rare as (a, b) are not looked into further
                         (*)         all that is rarer still

G = 2 sum O ln(O / E) is asymptotically chi-squared with one degree of freedom less than there are cells; divided by
Williams' correction (Biometrika 63, 1976) it is close to it at such counts.

A bias of total variation d shifts G by at least 4 n d^2 (the least sum of squares over p of a deviation of that size,
reached where it moves mass between two halves), so the test's power says which bias *of these cells* it would have
seen. What moves mass within a pooled cell, or behind the tokens looked at, it does not see.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams, Strict
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence
from slipstream.core.warp import warp

if TYPE_CHECKING:
    from slipstream.llm import LLM

FEWEST = 5.0
"""Least expected count of a cell."""
LOOKED_INTO = 20.0
"""Least expected count of a beginning whose continuations are told apart."""
MOST_LOOKS = 128
"""Beginnings that are looked into: a pass of the target each."""

Beginning = tuple[int, ...]
REST = -1
"""In the place of a token: any that has no cell of its own there."""


@dataclass
class Cells:
    """Beginnings of up to `length` tokens, in cells.

    mass      cell -> probability; a cell is a beginning, or one that ends in REST.
    inner     beginnings that were looked into.
    forbidden beginning that was looked into -> tokens that cannot follow it.
    """

    length: int
    mass: dict[Beginning, float] = field(default_factory=dict)
    inner: set[Beginning] = field(default_factory=set)
    forbidden: dict[Beginning, frozenset[int]] = field(default_factory=dict)

    def of(self, output: Seq[int]) -> Beginning | None:
        """The cell of an output; None if the law forbids it."""
        at: Beginning = ()
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
    """Cells for n samples. noise: how far rounding moves a logit; a token that a filter drops by no more than that may
    occur."""
    stop_ids = llm.sequence(list(prompt), params).stop_ids
    made, rare = Cells(length), 0.0
    queue: list[tuple[float, Beginning]] = [(-1.0, ())]
    while queue:
        mass, at = heapq.heappop(queue)
        mass = -mass
        closed = len(at) == length or bool(at and at[-1] in stop_ids)
        if at and (closed or n * mass < LOOKED_INTO or len(made.inner) == MOST_LOOKS):
            made.mass[at] = mass
            continue
        law, impossible = law_after(llm, prompt, at, params, stop_ids, noise)
        made.inner.add(at)
        made.forbidden[at] = impossible
        likely = (law * mass * n >= FEWEST).nonzero()[:, 0].tolist()
        for token in likely:
            heapq.heappush(queue, (-mass * float(law[token]), (*at, token)))
        left = mass * max(0.0, 1.0 - float(law[likely].sum())) if len(likely) < len(law) else 0.0
        if n * left >= FEWEST:
            pooled = (*at, REST)
            made.mass[pooled] = left
        else:
            rare += left
    _pool(made, rare, n)
    return made


def _pool(made: Cells, rare: float, n: int) -> None:
    """What is too rare everywhere shares one cell; if even that is rare, with the rarest other cell."""
    if n * rare < FEWEST and made.mass:
        least = min(made.mass, key=made.mass.__getitem__)
        rare += made.mass.pop(least)
    made.mass[(REST,)] = made.mass.get((REST,), 0.0) + rare


def law_after(
    llm: LLM, prompt: Seq[int], output: Beginning, params: SamplingParams, stop_ids: frozenset[int], noise: float
) -> tuple[torch.Tensor, frozenset[int]]:
    """float64 [V], from one pass over everything with no guess in it, and the ids that it forbids."""
    seq = Sequence([*prompt, *output], context=llm.target.context)
    try:
        logits = llm.target.run([seq], Draft.empty(1, llm.target.device)).logits[:1].clone()  # [1, V]
    finally:
        llm.target.release(seq.id)
    history = [list(output)]
    law = warp(logits, params, prompt, history, stop_ids)[0].cpu()
    never = law == 0
    if noise and bool(never.any()):
        score = warp(logits, params.unfiltered, prompt, history, stop_ids)[0].cpu().log()
        never &= score < score[law > 0].min() - 2 * noise
    return law, frozenset(never.nonzero()[:, 0].tolist())


def sample(
    llm: LLM,
    prompt: Seq[int],
    params: SamplingParams,
    n: int,
    length: int,
    batch: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The first tokens of n texts, with the random streams of seed, seed + 1, ..."""
    before, llm.max_batch = llm.max_batch, batch
    # Room behind the tokens looked at, so that drafts are as deep there as anywhere; nothing of it is waited for.
    params = replace(params, max_tokens=length + llm.draft_tokens + 1, stop=(), seed=None, logprobs=None)
    outputs: list[list[int]] = []
    try:
        while len(outputs) < n:
            seqs = [llm.sequence(list(prompt), params) for _ in range(min(batch, n - len(outputs)))]
            for i, seq in enumerate(seqs):
                seq.random = Stream(seed + len(outputs) + i)
            steps = llm.decode(seqs)
            for _ in steps:
                if all(seq.finish or len(seq.output) >= length for seq in seqs):
                    steps.close()  # type: ignore[attr-defined]
                    break
            outputs += [seq.output[:length] for seq in seqs]
            advance()
    finally:
        llm.max_batch = before
    return outputs


@dataclass(frozen=True)
class LawTest(Strict):
    """n samples against the law.

    p          chance of a G as large or larger if nothing is wrong; 0 if a forbidden outcome came up.
    freedom    degrees of freedom; 0: the law is a point mass in these cells and nothing can be seen.
    smallest_bias  total variation, of the law of these cells, that would be seen with the power asked for, or None.
    forbidden  samples that the law forbids.
    largest    the cells furthest off, as (tokens, expected, counted).
    """

    n: int
    g: float
    freedom: int
    p: float
    smallest_bias: float | None
    forbidden: int
    largest: list[tuple[Beginning, float, int]]

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"largest": [[list(cell), e, o] for cell, e, o in self.largest]}


def law_test(outputs: Iterable[Seq[int]], made: Cells, level: float, power: float) -> LawTest:
    """level: at which p rejects; power: with which `smallest_bias` would be seen at it."""
    counts: Counter[Beginning | None] = Counter(map(made.of, outputs))
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
    return LawTest(n, g, freedom, p, bias if bias is None or bias < 1 else None, forbidden, rows[:5])


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
    """P(noncentral chi-squared > x): the central ones with freedom + 2 k degrees, mixed by a Poisson law of k."""
    mean = shift / 2
    k = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 12), dtype=torch.float64)
    weights = torch.exp(k * math.log(mean) - mean - torch.lgamma(k + 1)) if mean else (k == 0).double()
    tails = torch.special.gammaincc(freedom / 2 + k, torch.full_like(k, x / 2))
    return float((weights * tails).sum())


def _solve(reached: Callable[[float], bool]) -> float:
    """The smallest number >= 0 from which on `reached` holds."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
