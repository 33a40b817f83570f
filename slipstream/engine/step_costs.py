"""`StepCosts` learns the seconds of forward passes, drafting and plain steps, and derives the price of rows."""

import math
from collections.abc import Callable

import numpy as np

from slipstream.core.drafter import Budget
from slipstream.drafters.lookups import ROW_COST
from slipstream.engine.step_history import SHORTEST, LevelCosts, Mean, StepTimes
from slipstream.engine.timed_step import Step

DRAW_COST = 0.05
"""Assumed `Budget.draw_cost`. For an EAGLE-3 head for SmolLM2 it is 0.03 in 16 bits and 0.06 in 4 bits."""
EMPTY = 0.5
"""Added to the rows of a step whose drafter was called and proposed no token. Such a step takes longer than a plain
step, because a call of the target runs several plain steps, without Python between the forward passes."""
SAME = 1 / 8
"""Forward passes with prompts count as having equally many rows if their numbers of rows differ by less than this
share."""
MORE_ROWS, CHEAPEST, DEAREST = 16, 0.05, 0.7
"""Number of a request's rows that have their own price, if they were timed; further rows have the mean price. The
other two bound the price, because the times may come from a moment in which the machine was slow."""


class StepCosts:
    """Learns what an engine's steps cost.

    price  costs of rows and of drawing, set by `set_price`.
    relative_cost  estimates costs of numbers of rows that were not timed (see `Capabilities`).
    """

    def __init__(self, relative_cost: Callable[[float], float] | None = None) -> None:
        self.price = Budget(0, (ROW_COST,), DRAW_COST)
        self.forward = StepTimes(relative_cost)  # forward passes, by number of rows
        self.drafting: dict[int, LevelCosts] = {}  # number of drafting requests -> costs by levels
        self._with_prompts = Mean(64)  # the share of steps that read prompts
        self._reading = Mean(16)  # drafter's cost of reading one prompt row

    @property
    def has_drafts(self) -> bool:
        """Return whether the cost of a step with a draft was learned."""
        return bool(self.drafting)

    def add(self, step: Step, drafter_reads: bool) -> None:
        """Learn the cost of a step's forward pass, and of reading its prompts. drafter_reads: whether the drafter also
        read the prompts."""
        self._with_prompts.add(float(step.prompt_rows > 0))
        drafts = any(step.lengths)
        self.forward.add(rows_of(step), step.rest / step.repeats, step.repeats)
        if step.read and drafter_reads and not drafts:
            self._reading.add(step.draft / self.forward.moment / step.read)

    def of_drafting(self, step: Step) -> tuple[float, float]:
        """Return the cost of drafting in this step, and the cost of the drafter's other work, such as reading prompts,
        since the previous step from which costs were learned."""
        seconds, aside = step.draft / self.forward.moment, step.aside / self.forward.moment
        draft = max(0.0, seconds - step.read * self._reading.value) if any(step.lengths) else 0.0
        return draft, aside + seconds - draft

    def of_rows(self, step: Step) -> float:
        """Return the cost of the rows of this step's drafts: the time by which they made its forward pass longer. A row
        costs more in a pass that also reads prompts, because passes of few rows are limited by the memory."""
        if not step.prompt_rows:
            return self.forward.of(rows_of(step)) - self.forward.of(len(step.ids))
        rows = len(step.ids) + step.prompt_rows
        return self.forward.at(rows + sum(step.nodes)) - self.forward.at(rows)

    def add_drafting(self, requests: int, levels: int, cost: float) -> float:
        """Add the cost of drafting `levels` levels. Return the usual cost of this number of levels."""
        table = self.drafting.setdefault(requests, LevelCosts())
        table.add(levels, cost)
        return table.of(levels)

    def levels(self, requests: int) -> LevelCosts:
        """Return the costs of drafting for the timed number of requests that is nearest to `requests`."""
        return self.drafting[min(self.drafting, key=lambda known: abs(known - requests))]

    def shares(self, requests: int, prompt_rows: int, forced: int = 0) -> tuple[float, float]:
        """Split the seconds of a step with these prompt rows and the pending tokens of these requests into (seconds for
        prompts, seconds for tokens). If every step reads prompts, the prompts' part is the time of a step with prompts
        alone. If few steps do, it is the time by which prompts make a step longer. If some requests have forced
        tokens, the tokens' part is the time of a plain step of all requests."""
        if not prompt_rows:
            return 0.0, self.forward.at(requests)
        if forced:
            plain = self.forward.at(requests + forced)
            return self.forward.at(requests + prompt_rows) - plain, plain
        prompts, tokens, together = map(self.forward.at, (prompt_rows, requests, requests + prompt_rows))
        added = together - tokens
        share = added + self._with_prompts.value * (prompts - added)
        return share, together - share

    def set_price(self, requests: int, gain: float) -> None:
        """Set the price of a row: its time, in tokens that all these requests would decode in that time at their
        present speed. Sets the price for draft token 1, 2, .. of each request, and for drawing one more. gain: gain of
        drafts over plain decoding."""
        if self.forward.numbers < 2:
            return
        timed = min(MORE_ROWS, max(1, (self.forward.most - requests) // requests))
        times = self.forward.estimate(requests * np.arange(1, timed + 2))
        usual = (times[-1] - times[0]) / timed
        each = np.append((np.diff(times) + usual) / 2, usual)  # averaged, because differences of medians are noisy
        speed, draw = max(1.0, gain) / max(SHORTEST, self.forward.at(requests)), self.price.draw_cost
        levels = self.levels(requests)
        if len(levels.known()) > 2 and levels.most > 1:  # known for 0 levels, and for two other numbers
            draw = min(DEAREST, speed * (levels.at(levels.most) - levels.at(1)) / (levels.most - 1))
        self.price = Budget(0, tuple(np.clip(each * speed, CHEAPEST, DEAREST).tolist()), draw)


def rows_of(step: Step) -> float:
    """Return the rows of a forward pass: rounded if it reads prompts (see `SAME`), and see `EMPTY`."""
    rows = len(step.ids) + sum(step.nodes) + step.prompt_rows
    if not step.prompt_rows:
        return rows + EMPTY if any(step.lengths) and not any(step.nodes) else rows
    grain = max(1, int(SAME * 2 ** int(math.log2(rows))))
    return round(rows / grain) * grain
