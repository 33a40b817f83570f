"""`Survival`: how likely the draft tokens of each request are accepted."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

FADE, FADE_ALL = 1 - 1 / 64, 1 - 1 / 512
"""Weight that the record of a request, and that of all, keeps with each of its steps that draft."""
WEIGHT = 8.0
"""Draft tokens of other requests that count in the record of each."""


class Survival:
    """How likely draft token 1, 2, .. of each request is accepted, given that all before it are: estimated from its own
    record, with `WEIGHT` draft tokens at the rates of all requests added to it, which start at `prior`. The records of
    all requests are rows of one array: a step updates them together.

    most  deepest draft token.
    """

    def __init__(self, most: int, prior: float):
        self._depths, self._prior = np.arange(most), prior
        self._rows: dict[int, int] = {}  # of each request
        self._free: list[int] = []
        self._compared, self._accepted = np.zeros((4, most)), np.zeros((4, most))
        self._everyone = np.zeros((2, most))  # compared, accepted
        self._width = np.ones(4)

    def learn(self, ids: Seq[int], lengths: np.ndarray, nodes: np.ndarray, accepted: np.ndarray) -> None:
        """Of each request: the length that it was given, its draft tokens, and how many were accepted. A draft that
        ends before its length, because nothing was found, counts as rejected there."""
        rows = [self._row(seq_id) for seq_id in ids]
        compared = self._depths < np.minimum(lengths, accepted + 1)[:, None]  # [R, most]
        right = self._depths < accepted[:, None]
        self._compared[rows] = self._compared[rows] * FADE + compared
        self._accepted[rows] = self._accepted[rows] * FADE + right
        self._width[rows] += (nodes / lengths - self._width[rows]) / 8
        self._everyone = self._everyone * FADE_ALL ** len(rows) + [compared.sum(0), right.sum(0)]

    def of(self, ids: Seq[int]) -> np.ndarray:
        """[R, most]: probability that each request accepts its first 1, 2, .. draft tokens."""
        rows = [self._row(seq_id) for seq_id in ids]
        compared, accepted = self._everyone
        rate = (accepted.sum() + WEIGHT * self._prior) / (compared.sum() + WEIGHT)
        usual = (accepted + WEIGHT * rate) / (compared + WEIGHT)  # [most]
        own = (self._accepted[rows] + WEIGHT * usual) / (self._compared[rows] + WEIGHT)
        return own.cumprod(1)

    def width(self, ids: Seq[int]) -> float:
        """Verified draft tokens per token of the length, on average: more than 1 for trees, less for lookups."""
        return float(self._width[[self._row(seq_id) for seq_id in ids]].mean())

    def forget(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def _row(self, seq_id: int) -> int:
        row = self._rows.get(seq_id)
        if row is None:
            row = self._rows[seq_id] = self._free.pop() if self._free else len(self._rows)
            if row == len(self._width):
                self._compared, self._accepted = (np.concatenate((a, 0 * a)) for a in (self._compared, self._accepted))
                self._width = np.concatenate((self._width, 0 * self._width))
            self._compared[row], self._accepted[row], self._width[row] = 0, 0, 1
        return row
