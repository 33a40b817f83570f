"""The time of one target forward pass by the number of rows that it verifies. Decoding is memory-bound while few rows
share one read of the weights, so the curve is flat at first and rises when arithmetic dominates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.params import Strict
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class CostCurve(Strict):
    """seconds[i] is the time of a forward pass over rows[i] rows (draft tokens plus one for each sequence); linear
    between the points, and beyond the last with the slope of the last segment.

    rows  increasing, beginning with 1.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] != 1 or list(self.rows) != sorted(set(self.rows)):
            raise ParameterError(
                f"the rows of a cost curve must begin with 1 and increase, but are {self.rows}",
                fix="give increasing numbers that begin with 1",
            )
        if len(self.seconds) != len(self.rows) or not all(0 < s < float("inf") for s in self.seconds):
            raise ParameterError(
                f"the seconds of a cost curve are {self.seconds}, for {len(self.rows)} row counts",
                fix="give a number > 0 for each row count",
            )

    @staticmethod
    def flat(row_cost: float) -> CostCurve:
        """Return the curve in which one row costs 1, and each further row `row_cost`."""
        return CostCurve((1, 2), (1.0, 1.0 + row_cost))

    def __call__(self, rows: float) -> float:
        """Return the seconds of a forward pass over `rows` rows; fewer than one count as one."""
        if len(self.rows) == 1:
            return self.seconds[0]
        rows = max(rows, 1)
        i = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        left, right = self.rows[i - 1], self.rows[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (right - left)
        return self.seconds[i - 1] + slope * (rows - left)

    @staticmethod
    def monotone(rows: Seq[int], seconds: Seq[float]) -> CostCurve:
        """Return the nearest curve to the measured points on which more rows never cost less. Falling points, an effect
        of noise, are replaced by their mean (isotonic regression by pooling adjacent violators)."""
        pools: list[tuple[float, int]] = []  # (mean, number of points), increasing
        for s in seconds:
            mean, count = s, 1
            while pools and pools[-1][0] > mean:
                before, many = pools.pop()
                mean, count = (before * many + mean * count) / (many + count), many + count
            pools.append((mean, count))
        return CostCurve(tuple(rows), tuple(mean for mean, count in pools for _ in range(count)))
