"""Records past steps: costs by number of rows or levels, means (`Mean`), and acceptance by position (`Survival`)."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence as Seq

import numpy as np

SHORTEST = 1e-9
"""Smallest number of seconds of a step, even if an estimate or the clock gives less."""

SPREAD = 0.1
"""Usual error of the logarithm of a time. A "doubt" is the variance of such a logarithm, divided by the square of this
error."""
OUTLIER = 3.0
"""A larger error counts as this many standard deviations: another process had the processor."""
CALM, FORGETS = 0.05, 1 / 1024
"""Growth of two doubts at every step: of the machine's slowness factor while it changes little, and of a number's
cost."""
UNKNOWN, TIMED, SURE = 25.0, 0.6, 0.4
"""Doubt of a cost before the first step with its number; greatest doubt with which a number counts as timed (see
`CostLine`); and greatest doubt, relative to the last step, in `is_timed`."""
FEW = 3
"""A number of levels counts as timed from this many samples on."""
EXPECTED = (*range(1, 33), 40, 48, 64, 96, 128)
"""If these numbers were not timed, their costs are estimated from the expected shape of costs."""
APART = 1e-9
"""Added to the expected cost for each further row, so that no two numbers have the same expected cost."""

FADE, FADE_ALL = 1 - 1 / 64, 1 - 1 / 512
"""Factors on the weights of the record of a request, and of the record of all requests, at each drafting step."""
WEIGHT = 8.0
"""Weight of the rates of all requests in the estimate for one request, in draft tokens."""


class Mean:
    """Averages about the `last` samples; 0 before the first sample."""

    def __init__(self, last: int) -> None:
        self.value, self._count, self._last = 0.0, 0, last

    def add(self, sample: float) -> None:
        self._count = min(self._count + 1, self._last)
        self.value += (sample - self.value) / self._count


class CostLine(ABC):
    """Estimates a cost by a number (of rows, or of levels) from numbers with known costs. shape: number -> expected
    cost in any unit; None: no cost is expected."""

    def __init__(self, shape: Callable[[float], float] | None = None) -> None:
        self._shape = shape
        self._line: tuple[list[float], list[float], float] | None = None  # see `_draw_line`

    @abstractmethod
    def known(self) -> dict[float, tuple[float, float]]:
        """Return the known numbers, each with its cost and doubt."""

    @property
    def most(self) -> float:
        """The greatest number on the line; at least one number must be known."""
        return (self._line or self._draw_line())[0][-1]

    def estimate(self, numbers: np.ndarray) -> np.ndarray:
        """Estimate the costs of these numbers. Between timed numbers the estimate is a line that never falls. Above
        them it rises with half the mean slope, so that numbers that look nearly as good are tried, and then timed.
        Below them it falls to half of the least cost. A number whose cost is doubtful or old counts as not timed.
        Otherwise one moment in which other programs had the processor would rule the number out for good."""
        xs, ys, slope = self._line = self._line or self._draw_line()
        inside = np.interp(numbers, xs, ys)
        beyond = np.where(numbers > xs[-1], ys[-1] + slope / 2 * (numbers - xs[-1]), inside)
        return np.where(numbers < xs[0], ys[0] * (1 + numbers / max(1, xs[0])) / 2, beyond)

    def at(self, n: float) -> float:
        """Estimate the cost of the number n, like `estimate` but ten times as fast."""
        xs, ys, slope = self._line = self._line or self._draw_line()
        i = bisect_right(xs, n) - 1
        if i < 0:
            return ys[0] * (1 + n / max(1, xs[0])) / 2
        rise = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) if i + 1 < len(xs) else slope / 2
        return ys[i] + rise * (n - xs[i])

    def _draw_line(self) -> tuple[list[float], list[float], float]:
        """Return (numbers, costs, cost of each further number), for `estimate`."""
        known = self.known()
        least = max(TIMED, min(doubt for _, doubt in known.values()))
        xs = sorted(n for n, (_, doubt) in known.items() if doubt <= least or n == min(known))
        pools: list[list[float]] = []  # (mean, weight, count): neighbours with falling costs are joined
        for n in xs:
            cost, doubt = known[n]
            pools.append([cost, 1 / max(doubt, FORGETS), 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, weight, many = pools.pop()
                before = pools[-1]
                before[0] = (before[0] * before[1] + mean * weight) / (before[1] + weight)
                before[1], before[2] = before[1] + weight, before[2] + many
        ys = [mean for mean, _, many in pools for _ in range(int(many))]
        if self._shape is not None:
            xs, ys = self._add_expected(self._shape, xs, ys)
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if len(xs) > 1 else 0.0
        return xs, ys, slope

    @staticmethod
    def _add_expected(
        shape: Callable[[float], float], xs: list[float], ys: list[float]
    ) -> tuple[list[float], list[float]]:
        """Add numbers that were not timed. Between timed numbers, costs rise as the shape does. Outside them, the
        nearest timed number gives the ratio of real to expected costs."""
        numbers = sorted({*xs, *EXPECTED})
        expected = {n: shape(n) + APART * n for n in numbers}
        inside = np.interp(list(expected.values()), [expected[n] for n in xs], ys).tolist()
        ends = [ys[at] / expected[xs[at]] for at in (0, -1)]
        return numbers, [
            ends[n > xs[-1]] * expected[n] if n < xs[0] or n > xs[-1] else cost
            for n, cost in zip(numbers, inside, strict=True)
        ]


class StepTimes(CostLine):
    """Learns what steps cost by their number of rows, on a machine that other programs use, too.

    A measured time is a cost times a factor: how slow the machine is at this moment, because texts grow and other
    programs take the processor. The factor is about the same for all numbers of rows, so only neighbouring steps are
    compared. This is a Kalman filter: its state holds the logarithms of the moment's factor, which may change with each
    step, and of the cost of each number, which hardly changes. Costs are in seconds, at the speed of the first step."""

    def __init__(self, shape: Callable[[float], float] | None = None) -> None:
        super().__init__(shape)
        self._places: dict[float, int] = {}  # number -> its index in the state; index 0 is the factor
        self._logs, self._doubts = np.zeros(1), np.zeros((1, 1))
        self.steps = 0  # number of added steps
        self._unrest = Mean(64)  # growth of the factor's doubt, from past errors
        self._last, self._waited = 0, 0  # index of the last step's number; steps since then

    @property
    def numbers(self) -> int:
        return len(self._places)

    @property
    def moment(self) -> float:
        """The present slowness factor: measured time of a step over its cost."""
        return math.exp(self._logs[0])

    def known(self) -> dict[float, tuple[float, float]]:
        own = self._doubts.diagonal()
        doubts = (own + own[self._last] - 2 * self._doubts[self._last]).tolist()
        costs = np.exp(self._logs).tolist()
        return {n: (costs[place], doubts[place]) for n, place in self._places.items()}

    def add(self, n: float, seconds: float, repeats: int = 1) -> None:
        """Learn that a step with the number n took these seconds, or as many on average in `repeats` such steps."""
        log, own = math.log(max(seconds, SHORTEST)), self._logs
        if n not in self._places:
            guess = math.log(max(self.at(n), SHORTEST)) if self._places else log
            self._doubts = np.pad(self._doubts, (0, 1))
            self._doubts[-1, -1] = UNKNOWN if self._places else 0.0
            self._places[n] = len(own)
            own = self._logs = np.append(own, guess)
        place, doubts = self._places[n], self._doubts
        self.steps += 1
        steps, self._last, self._waited, self._line = self._waited + 1, place, 0, None
        doubts.flat[:: len(own) + 1] += FORGETS * steps
        doubts[0, 0] += (CALM + max(0.0, self._unrest.value)) * steps
        shared = doubts[0] + doubts[place]
        error = (log - float(own[0]) - float(own[place])) / SPREAD
        variance = float(shared[0]) + float(shared[place]) + 1 / repeats
        most = OUTLIER * math.sqrt(variance)
        self._unrest.add(min(error**2, most**2) - variance)
        own += shared * (SPREAD * min(most, max(-most, error)) / variance)
        doubts -= shared[:, None] * (shared / max(variance, (error / OUTLIER) ** 2))

    def of(self, n: float) -> float:
        """Return the cost of the number n if it was timed (ten times as fast as `at`); otherwise estimate the cost."""
        return math.exp(self._logs[self._places[n]]) if n in self._places else self.at(n)

    def is_timed(self, n: float) -> bool:
        """Return whether the cost of a number is known well relative to the cost of the last step's number."""
        return n in self._places and self.known()[n][1] <= SURE

    def wait(self, steps: int) -> None:
        """Count steps that were not timed. Each of them adds to the doubts."""
        self._waited += steps


class LevelCosts(CostLine):
    """Learns what drafting costs by its number of levels: the median of the last few steps of each number."""

    def __init__(self) -> None:
        super().__init__()
        self._costs: dict[float, deque[float]] = {0: deque([0.0])}
        self._steps = 0
        self._last: dict[float, int] = {0: 0}  # number -> its last step

    def known(self) -> dict[float, tuple[float, float]]:
        age = {n: FORGETS * (self._steps - last) for n, last in self._last.items()}
        return {n: (self.of(n), age[n] + 0.8 * FEW * TIMED / len(some)) for n, some in self._costs.items()}

    def add(self, n: float, cost: float) -> None:
        self._costs.setdefault(n, deque(maxlen=9)).append(cost)
        self._steps += 1
        self._last[n], self._line = self._steps, None

    def of(self, n: float) -> float:
        """Return the cost of a number of levels that was timed."""
        some = self._costs[n]  # if there are few, other programs may have slowed the greater ones
        return sorted(some)[len(some) // 2] if len(some) >= FEW else min(some)


class Survival:
    """Estimates how likely draft tokens 1, 2, .. of each request are accepted, given that all before are. The estimate
    is the request's own record plus `WEIGHT` draft tokens at the rates of all requests, which start at `prior`. The
    records of all requests are rows of one array, so that a step updates them together.

    most  largest depth of a draft token.
    """

    def __init__(self, most: int, prior: float):
        self._depths, self._prior = np.arange(most), prior
        self._rows: dict[int, int] = {}  # request id -> its row
        self._free: list[int] = []
        self._record, self._everyone = np.zeros((4, 2, most)), np.zeros((2, most))  # compared, accepted
        self._width = np.ones(4)

    def learn(self, ids: Seq[int], lengths: np.ndarray, nodes: np.ndarray, accepted: np.ndarray) -> None:
        """Record for each request the length that it was given, its draft tokens (nodes), and how many were accepted. A
        draft that ends before its length, because nothing was found, counts as rejected there."""
        rows = [self._row(seq_id) for seq_id in ids]
        new = self._depths < np.array((np.minimum(lengths, accepted + 1), accepted)).T[..., None]  # [R, 2, most]
        self._record[rows] = self._record[rows] * FADE + new
        self._width[rows] += (nodes / lengths - self._width[rows]) / 8
        self._everyone = self._everyone * FADE_ALL ** len(rows) + new.sum(0)

    def fade(self) -> None:
        """Halve the weight of all requests' own records."""
        self._record /= 2

    def of(self, ids: Seq[int]) -> np.ndarray:
        """Return [R, most]: the probability that each request accepts its first 1, 2, .. draft tokens."""
        rows = [self._row(seq_id) for seq_id in ids]
        compared, accepted = self._everyone
        rate = (accepted.sum() + WEIGHT * self._prior) / (compared.sum() + WEIGHT)
        usual = (accepted + WEIGHT * rate) / (compared + WEIGHT)  # [most]
        compared, accepted = self._record[rows].swapaxes(0, 1)  # [R, most] each
        return ((accepted + WEIGHT * usual) / (compared + WEIGHT)).cumprod(1)

    def width(self, ids: Seq[int]) -> float:
        """Return the mean of verified draft tokens / draft length: above 1 for trees, below for lookups."""
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
