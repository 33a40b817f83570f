"""Judges whether two sets of texts are of one distribution, and whether greedy texts are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import cache
from typing import Any

import numpy as np

from benchmarks.board.lineup import CHECKS, LEVEL, PROMPTS, cells
from slipstream.core.sequence import count_common
from slipstream.llm import LLM
from slipstream.verify.choices import count_choices, smallest_shift
from slipstream.verify.outcomes import SCREEN, decisive_level
from slipstream.verify.reference import logits_of
from slipstream.verify.served import PERMUTATIONS, compare_ngrams, permute

SAME, DIFFERS, REFUSED, FAILS, UNTESTED = "same", "differs", "refused", "fails", "not tested"
ROUNDING = {"float64": 1e-9, "float32": 2e-3, "float16": 0.05, "bfloat16": 0.4}
"""Largest margin between two logits that rounding in this precision explains, for the models of the board."""

Texts = Seq[Seq[int]]
Look = Seq[tuple[Texts, Texts]]


@cache
def reference(target: str) -> LLM:
    """The target in float64."""
    return LLM(target, executor="transformers", dtype="float64", device="cpu")


def level_of_cell() -> float:
    return LEVEL / sum(not CHECKS[cell.check].greedy for cell in cells())


def decisive() -> float:
    """The level of the second look at a test; a cell has one for each prompt and one for all."""
    return decisive_level(level_of_cell(), PROMPTS + 1)


def greedy(target: str, precision: str, prompts: Texts, plain: Texts, other: Texts) -> dict[str, Any]:
    """The verdict on greedy texts: equal, or parted where the target in float64 has a tie."""
    ties, worst = 0, 0.0
    for prompt, one, two in zip(prompts, plain, other, strict=True):
        if list(one) == list(two):
            continue
        at = count_common(one, two)
        if at in (len(one), len(two)):
            return {"verdict": DIFFERS, "request": f"prompt {list(prompt)[:4]}...: texts of different lengths"}
        *_, logits = logits_of(reference(target).target, prompt, [*one[:at], one[at]])
        margin = abs(float(logits[one[at]] - logits[two[at]]))
        ties, worst = ties + 1, max(worst, margin)
        if margin > ROUNDING[precision]:
            where = f"prompt of {len(prompt)} tokens, token {at}: {one[at]} or {two[at]}, {margin:.3g} apart in float64"
            return {"verdict": DIFFERS, "request": where}
    return {"verdict": SAME, "ties": ties, "largest_margin": worst, "texts": len(plain)}


def sampled(looks: Callable[[int], Look]) -> dict[str, Any]:
    """The verdict on samples. looks(n): (plain, other) texts of each prompt, new ones for each n; the second look is
    taken where the first one fails, and only it decides."""
    first = looks(0)
    p = _tests(first, 0)
    texts = sum(len(plain) + len(other) for plain, other in first)
    seen = {"p": min(p), "smallest_shift": smallest_shift(_named(first), level_of_cell()), "texts": texts}
    suspects = [i for i, value in enumerate(p) if value < SCREEN]
    if not suspects:
        return {"verdict": SAME} | seen
    second = _tests(looks(1), 1)
    again = min(second[i] for i in suspects)
    return {"verdict": DIFFERS if again < decisive() else SAME, "second_p": again} | seen


def _named(look: Look) -> list[tuple[list[tuple[str, ...]], list[tuple[str, ...]]]]:
    return [([tuple(map(str, text)) for text in one], [tuple(map(str, text)) for text in other]) for one, other in look]


def _tests(look: Look, seed: int) -> list[float]:
    """p-values: of each prompt, and of all together."""
    named, rng = _named(look), np.random.default_rng(seed)
    each = [compare_ngrams(plain, other, rng) for plain, other in named]
    choices = [count_choices(plain, other) for plain, other in named]
    return [*each, permute(choices, rng, PERMUTATIONS)]
