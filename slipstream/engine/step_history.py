"""Records past steps: `Times` by a number such as rows, `Mean`s, and the `Survival` of draft tokens."""

import statistics
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

SHORTEST = 1e-9
"""Seconds that a step takes at least, whatever estimates and the clock say."""

STALE = 8
"""Samples of a number are used until STALE * n^2 of others came, where n is how many there are."""

FEW = 3
"""Samples of a number from which on it counts as timed, see `Times.estimate`."""

FADE, FADE_ALL = 1 - 1 / 64, 1 - 1 / 512
"""Weight that the record of a request, and that of all, keeps with each of its steps that draft."""
WEIGHT = 8.0
"""Draft tokens of other requests that count in the record of each."""


class Pace:
    """How slow steps are now, as a multiple of the times that are kept. Texts grow, and other programs take the
    processor: that slows steps of all numbers of rows by about the same factor (SmolLM2 in 4 bits: after 600 tokens 1
    to 5 rows take 1.5 to 1.7 times as long). A number of rows that was timed before the change stays comparable."""

    WINDOW = 9

    def __init__(self) -> None:
        self.value = 1.0
        self._last = deque[float](maxlen=self.WINDOW)

    def add(self, ratio: float) -> None:
        """Add a step. ratio: its measured time over the median for its number of rows."""
        self._last.append(ratio)
        self.value = statistics.median(self._last)


class Times:
    """Seconds by a number (of rows, of levels): the median of the last few of each, and estimates between them.

    pace  times are kept and told as multiples of it; by default, it never changes.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self._samples: dict[int, deque[float]] = {}
        self._known: list[int] = []
        self._medians: dict[int, float] = {}
        self._count, self._last = 0, dict[int, int]()  # samples so far; and when each number had its last one
        self._line: tuple[list[int], list[float], float] | None = None  # see `_line_of_medians`
        self._recent: deque[tuple[int, float]] = deque()  # samples that set the pace and are not kept yet

    def __len__(self) -> int:
        """How many samples there are, up to 9 of each number."""
        return sum(map(len, self._samples.values()))

    @property
    def numbers(self) -> int:
        return len(self._known)

    @property
    def most(self) -> int:
        """The greatest number that `estimate` knows; there must be one."""
        return (self._line or self._line_of_medians())[0][-1]

    def add(self, n: int, seconds: float, sets_pace: bool = False) -> None:
        """sets_pace: whether it may tell that all steps take longer now. Such a sample is kept when the pace is known
        of the steps around it, not only of those before; else medians would take on half of a slow change. The first
        few of a number are kept at once."""
        if sets_pace and min(seconds, self._medians.get(n, 0.0)) > 0:
            self.pace.add(seconds / self._medians[n])
            if len(self._samples[n]) >= FEW or self._stale(n):
                self._recent.append((n, seconds))
                if len(self._recent) <= self.pace.WINDOW // 2:
                    return
                n, seconds = self._recent.popleft()
        seconds /= self.pace.value
        if n not in self._samples:
            self._samples[n] = deque(maxlen=9)
            insort(self._known, n)
        elif self._stale(n):
            self._samples[n].clear()
        self._count += 1
        self._line = None
        self._last[n] = self._count
        self._samples[n].append(seconds)
        times = self._samples[n]  # the greater of two may be of a moment when other processes ran
        self._medians[n] = statistics.median(times) if len(times) > 2 else min(times)

    def age(self, count: int) -> None:
        """So many steps were not timed: samples are as old as if they had been."""
        self._count += count
        self._line = None

    def _stale(self, n: int) -> bool:
        """Return whether the samples of a number are too old; few samples age sooner. Otherwise a number that was timed
        in a slow moment would never be chosen again."""
        return self._count - self._last[n] > STALE * len(self._samples[n]) ** 2

    def nearest(self, n: float) -> float:
        """The median of the nearest number that was timed."""
        at = bisect_left(self._known, n)
        around = self._known[max(0, at - 1) : at + 1]
        return self._medians[min(around, key=lambda known: abs(known - n))] * self.pace.value

    def estimate(self, numbers: np.ndarray) -> np.ndarray:
        """Seconds for each of these numbers: between timed ones on a line that does not fall; beyond them with half the
        slope of all of them, so that what looks nearly as good is tried, and then known; below them half of the least
        time, and a share of the other half. A number that was timed once or twice, while others were timed more often,
        counts as not timed: a sample from a moment in which others had the processor would rule it out for good. So
        does one whose samples are old."""
        xs, ys, slope = self._line = self._line or self._line_of_medians()
        inside = np.interp(numbers, xs, ys)
        beyond = np.where(numbers > xs[-1], ys[-1] + slope / 2 * (numbers - xs[-1]), inside)
        return np.where(numbers < xs[0], ys[0] * (1 + numbers / max(1, xs[0])) / 2, beyond) * self.pace.value

    def at(self, n: int) -> float:
        """`estimate` of one number, in a tenth of the time."""
        xs, ys, slope = self._line = self._line or self._line_of_medians()
        i = bisect_right(xs, n) - 1
        if i < 0:
            return ys[0] * (1 + n / max(1, xs[0])) / 2 * self.pace.value
        rise = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) if i + 1 < len(xs) else slope / 2
        return (ys[i] + rise * (n - xs[i])) * self.pace.value

    def _line_of_medians(self) -> tuple[list[int], list[float], float]:
        """(numbers, seconds, seconds for each further number), for `estimate`."""
        often = [n for n in self._known if len(self._samples[n]) >= FEW and not self._stale(n)]
        xs = [n for n in self._known if n in often or n == self._known[0]] if often else self._known
        pools: list[list[float]] = []  # mean, samples, numbers: neighbours that would fall are joined
        for n in xs:
            pools.append([self._medians[n], len(self._samples[n]), 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, count, many = pools.pop()
                before = pools[-1]
                before[0] = (before[0] * before[1] + mean * count) / (before[1] + count)
                before[1], before[2] = before[1] + count, before[2] + many
        ys = [mean for mean, _, many in pools for _ in range(int(many))]
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if len(xs) > 1 else 0.0
        return xs, ys, slope


class Mean:
    """Averages about the `last` samples; 0 before the first."""

    def __init__(self, last: int) -> None:
        self.value, self._count, self._last = 0.0, 0, last

    def add(self, sample: float) -> None:
        self._count = min(self._count + 1, self._last)
        self.value += (sample - self.value) / self._count


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
        self._record, self._everyone = np.zeros((4, 2, most)), np.zeros((2, most))  # compared, accepted
        self._width = np.ones(4)

    def learn(self, ids: Seq[int], lengths: np.ndarray, nodes: np.ndarray, accepted: np.ndarray) -> None:
        """Of each request: the length that it was given, its draft tokens, and how many were accepted. A draft that
        ends before its length, because nothing was found, counts as rejected there."""
        rows = [self._row(seq_id) for seq_id in ids]
        new = self._depths < np.array((np.minimum(lengths, accepted + 1), accepted)).T[..., None]  # [R, 2, most]
        self._record[rows] = self._record[rows] * FADE + new
        self._width[rows] += (nodes / lengths - self._width[rows]) / 8
        self._everyone = self._everyone * FADE_ALL ** len(rows) + new.sum(0)

    def of(self, ids: Seq[int]) -> np.ndarray:
        """[R, most]: probability that each request accepts its first 1, 2, .. draft tokens."""
        rows = [self._row(seq_id) for seq_id in ids]
        compared, accepted = self._everyone
        rate = (accepted.sum() + WEIGHT * self._prior) / (compared.sum() + WEIGHT)
        usual = (accepted + WEIGHT * rate) / (compared + WEIGHT)  # [most]
        compared, accepted = self._record[rows].swapaxes(0, 1)  # [R, most] each
        return ((accepted + WEIGHT * usual) / (compared + WEIGHT)).cumprod(1)

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
                self._record, self._width = (np.concatenate((a, 0 * a)) for a in (self._record, self._width))
            self._record[row], self._width[row] = 0, 1
        return row
