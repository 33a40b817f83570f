"""`StepCosts` keeps the seconds of forwards, drafting and plain steps, and derives the price of rows from them."""

import math
from collections.abc import Callable

import numpy as np

from slipstream.core.drafter import Budget
from slipstream.drafters.lookups import ROW_COST
from slipstream.engine.step_history import SHORTEST, LevelCosts, Mean, StepTimes
from slipstream.engine.timed_step import Step

DRAW_COST = 0.05
"""Assumed `Budget.draw_cost`: that of an EAGLE-3 head for SmolLM2 is 0.03 in 16 bits and 0.06 in 4 bits."""
SAME = 1 / 8
"""Forwards with prompts whose numbers of rows differ by less than this share are one number among the times."""
MORE_ROWS, CHEAPEST, DEAREST = 16, 0.05, 0.7
"""Rows of a request whose costs are told apart, where they were timed; any further one costs their mean. Bounds of the
cost, because times may be those of a bad moment."""


class StepCosts:
    """Keeps what an engine's steps cost.

    price  costs of rows and of drawing, as `set_price` left them.
    relative_cost  see `Capabilities`: the shape of the costs of rows that were not timed.
    """

    def __init__(self, relative_cost: Callable[[int], float] | None = None) -> None:
        self.price = Budget(0, (ROW_COST,), DRAW_COST)
        self.forward = StepTimes(relative_cost)  # by rows
        self.drafting: dict[int, LevelCosts] = {}  # by requests that draft: by levels
        self._with_prompts = Mean(64)  # the share of steps that read prompts
        self._reading = Mean(16)  # cost for the drafter of reading a row of a prompt

    def add(self, step: Step, drafter_reads: bool) -> None:
        """Learn from the forward of a step, and from the prompts that it read. drafter_reads: whether the drafter read
        them, too."""
        self._with_prompts.add(float(step.prompt_rows > 0))
        rows, drafts = _rows(step), any(step.lengths)
        self.forward.add(rows, step.rest / step.repeats)
        if step.read and drafter_reads and not drafts:
            self._reading.add(step.draft / self.forward.moment / step.read)

    def of_drafting(self, step: Step) -> tuple[float, float]:
        """Return the cost of drafting in the last step, and of all else that the drafter did since the last one that
        was learned from, such as reading prompts."""
        seconds, aside = step.draft / self.forward.moment, step.aside / self.forward.moment
        draft = max(0.0, seconds - step.read * self._reading.value) if any(step.lengths) else 0.0
        return draft, aside + seconds - draft

    def add_drafting(self, requests: int, levels: int, cost: float) -> float:
        """Add the cost of drafting this number of levels. Return the usual one."""
        table = self.drafting.setdefault(requests, LevelCosts())
        table.add(levels, cost)
        return table.of(levels)

    def levels(self, requests: int) -> LevelCosts:
        """Return the costs of drafting of the nearest number of requests that was timed."""
        return self.drafting[min(self.drafting, key=lambda known: abs(known - requests))]

    def shares(self, requests: int, prompt_rows: int) -> tuple[float, float]:
        """Divide a step over the pending tokens of these requests and these rows of prompts: (seconds for its
        prompts, seconds for the tokens). If every step reads prompts, their share is the time of a step with the
        prompts alone. If few do, it is what they add to a step without them."""
        if not prompt_rows:
            return 0.0, self.forward.at(requests)
        prompts, tokens, together = map(self.forward.at, (prompt_rows, requests, requests + prompt_rows))
        added = together - tokens
        share = added + self._with_prompts.value * (prompts - added)
        return share, together - share

    def set_price(self, requests: int, gain: float) -> None:
        """Set the price to the tokens that decoding of these requests gains at its present speed in the time in which
        each gets draft token 1, 2, .. verified, and a further one drawn. gain: of drafts over plain decoding."""
        if self.forward.numbers < 2:
            return
        timed = min(MORE_ROWS, max(1, (self.forward.most - requests) // requests))
        times = self.forward.estimate(requests * np.arange(1, timed + 2))
        usual = (times[-1] - times[0]) / timed
        each = np.append((np.diff(times) + usual) / 2, usual)  # differences of medians are noisy
        speed, draw = max(1.0, gain) / max(SHORTEST, self.forward.at(requests)), self.price.draw_cost
        levels = self.levels(requests)
        if len(levels.known()) > 2 and levels.most > 1:  # 0, and two that were drawn
            draw = min(DEAREST, speed * (levels.at(levels.most) - levels.at(1)) / (levels.most - 1))
        self.price = Budget(0, tuple(np.clip(each * speed, CHEAPEST, DEAREST).tolist()), draw)


def _rows(step: Step) -> int:
    """Return the rows of a forward; forwards with prompts whose numbers differ little are one number."""
    rows = len(step.ids) + sum(step.nodes) + step.prompt_rows
    grain = max(1, int(SAME * 2 ** int(math.log2(rows)))) if step.prompt_rows else 1
    return round(rows / grain) * grain
