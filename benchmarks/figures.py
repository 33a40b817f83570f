"""The figures of the table: what each figure measures, which value it must reach, and how it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.markdown import beside, bound
from slipstream.core.text_ends import count_common
from slipstream.measure.estimates import estimate_ratio


@dataclass(frozen=True)
class Figure:
    """One row of the table: the typical value of series `top` divided by the typical value of series `bottom`.

    reach    lower bound of the figure, or upper bound if `at_most`.
    top, bottom  the two series that are divided: contenders (their seconds) or further series (see `session`).
    share    printed as a percentage.
    """

    text: str
    reach: float
    top: str
    bottom: str
    at_most: bool = False
    share: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.reach if self.at_most else value >= self.reach

    def show(self, value: float) -> str:
        """Format a measured value, never rounded to the other side of `reach`."""
        return beside(100 * value, 100 * self.reach, 1, " %") if self.share else beside(value, self.reach, unit="x")

    @staticmethod
    def of(row: Mapping[str, Any]) -> Figure:
        """Make the figure that formats a row returned by `judge`."""
        return Figure(row["figure"], row["reach"], "", "", row["at_most"], row["share"])

    @property
    def bound(self) -> str:
        edge = bound(100 * self.reach, 1, " %") if self.share else bound(self.reach, unit="x")
        return f"{'at most' if self.at_most else 'at least'} {edge}"


FIGURES = {
    "plain_vs_transformers": Figure(
        "plain decoding against transformers' `generate`", 2.2, "transformers", "plain"),
    "plain_vs_genai": Figure(
        "plain decoding against OpenVINO GenAI", 0.95, "genai", "plain"),
    "draft_vs_plain": Figure(
        "draft-model speculation against our own plain decoding", 1.5, "plain", "draft"),
    "draft_vs_transformers": Figure(
        "draft-model speculation against transformers' assisted generation, same draft and length", 4.0,
        "transformers_draft", "draft"),
    "draft_vs_genai": Figure(
        "draft-model speculation against OpenVINO GenAI's, same draft, each at its best length", 1.1,
        "genai_draft", "draft"),
    "ngram_vs_plain": Figure(
        "n-gram speculation on edit prompts against our own plain decoding", 2.0, "plain_edit", "ngram_edit"),
    "int8_vs_float32": Figure(
        "int8 weights against float32, plain decoding", 1.7, "plain", "int8"),
    "rows_float32": Figure(
        "target's time for 8 rows over 1 row, float32", 1.35, "rows8_float32", "rows1_float32", at_most=True),
    "rows_int8": Figure(
        "target's time for 8 rows over 1 row, int8", 1.35, "rows8_int8", "rows1_int8", at_most=True),
    "outside_plain": Figure(
        "share of a step outside the target's forwards, plain decoding", 0.10,
        "outside_plain", "step_plain", at_most=True, share=True),
    "outside_draft": Figure(
        "share of a step outside target and draft forwards, draft-model speculation", 0.10,
        "outside_draft", "step_draft", at_most=True, share=True),
    "memory": Figure(
        "peak memory without the imports over weights and KV, plain float32", 1.6,
        "peak", "weights_and_kv", at_most=True),
}  # fmt: skip


def judge(
    key: str, series: dict[str, Any], skipped: dict[str, str], table: Mapping[str, Figure] = FIGURES
) -> dict[str, Any]:
    """Return the row of figure `key` of a table.

    series   measurements by name, [prompts, rounds] or [rounds]: seconds of every contender, and other measurements.
    skipped  reasons, by name, why something was not measured.
    """
    figure = table[key]
    row: dict[str, Any] = {"key": key, "figure": figure.text, "reach": figure.reach, "at_most": figure.at_most}
    row["share"] = figure.share
    for name in (figure.top, figure.bottom):
        if name not in series:
            reason = skipped.get(name) or skipped.get(name.split("_", 1)[-1]) or "not measured in this run"
            return {**row, "verdict": "skipped", "reason": reason.strip()}
    estimate = estimate_ratio(series[figure.top], series[figure.bottom])
    verdict = "reached" if figure.reached(estimate.value) else "missed"
    return {**row, **vars(estimate), "verdict": verdict}


def spread(samples: ArrayLike) -> dict[str, float]:
    """Return median and quartiles."""
    q1, q2, q3 = np.percentile(np.asarray(samples, float), [25, 50, 75])
    return {"median": float(q2), "q1": float(q1), "q3": float(q3)}


def agreement(texts: list[list[int]], references: list[list[int]]) -> dict[str, Any]:
    """Compare two lists of outputs, prompt by prompt.

    identical: share of the prompts with equal outputs. divergences: for each other prompt, its index and the index of
    the first token that differs (or the length of the shorter output).
    """
    divergences = []
    for prompt, (a, b) in enumerate(zip(texts, references, strict=True)):
        if a != b:
            divergences.append({"prompt": prompt, "token": count_common(a, b)})
    return {"identical": 1 - len(divergences) / len(texts), "divergences": divergences}
