"""`StepCosts` keeps the seconds of forwards, drafting and plain steps, and derives the price of rows from them."""

import math
from dataclasses import replace

import numpy as np

from slipstream.core.drafter import Budget
from slipstream.drafters.lookups import ROW_COST
from slipstream.engine.step_history import SHORTEST, Mean, Times
from slipstream.engine.timed_step import Step

DRAW_COST = 0.05
"""Assumed `Budget.draw_cost`: that of an EAGLE-3 head for SmolLM2 is 0.03 in 16 bits and 0.06 in 4 bits."""
SAME = 1 / 8
"""Forwards with prompts whose numbers of rows differ by less than this share are one number among the times."""
MORE_ROWS, CHEAPEST, DEAREST = 16, 0.05, 0.7
"""Rows of a request whose costs are told apart, where they were timed; any further one costs their mean. Bounds of the
cost, because times may be those of a bad moment."""


class StepCosts:
    """Keeps the times of an engine's steps.

    sets_pace  whether forwards without prompts tell how slow steps are now (see `Pace`).
    price      costs of rows and of drawing, as `set_price` left them.
    """

    def __init__(self, sets_pace: bool) -> None:
        self.sets_pace, self.price = sets_pace, Budget(0, (ROW_COST,), DRAW_COST)
        self.forward = Times()  # by rows
        self.plain = Times(self.forward.pace)  # by requests
        self.drafting: dict[int, Times] = {}  # by requests that draft: by levels
        self._with_prompts = Mean(64)  # the share of steps that read prompts
        self._reading = Mean(16)  # seconds in which the drafter reads a row of a prompt

    def add_plain(self, step: Step) -> None:
        """Add a step, or a call of several, in which nothing was drafted."""
        if not step.prompt_rows:
            seconds = (step.draft + step.rest) / step.repeats
            self.forward.add(len(step.ids), seconds, self.sets_pace)
            self.plain.add(len(step.ids), seconds)

    def add_draft(self, step: Step) -> float:
        """Add the forward of a step that drafted. Return the usual seconds of one."""
        rows = len(step.ids) + sum(step.nodes)
        if step.prompt_rows:
            return self.forward.at(rows)
        self.forward.add(rows, step.rest, self.sets_pace)
        return self.forward.nearest(rows) if self.sets_pace else self.forward.at(rows)

    def add_drafting(self, requests: int, levels: int, seconds: float) -> float:
        """Add the time of drafting this number of levels. Return the usual time for them."""
        if requests not in self.drafting:
            self.drafting[requests] = Times(self.forward.pace)
            self.drafting[requests].add(0, 0.0)
        self.drafting[requests].add(levels, seconds)
        return self.drafting[requests].nearest(levels)

    def levels(self, requests: int) -> Times:
        """Return the drafting times of the nearest number of requests that was timed."""
        return self.drafting[min(self.drafting, key=lambda known: abs(known - requests))]

    def of_plain(self, requests: int) -> float:
        """Estimate a plain step."""
        return self.plain.nearest(requests) if self.plain.numbers else self.forward.at(requests)

    def shares(self, requests: int, prompt_rows: int) -> tuple[float, float]:
        """Divide a step over the pending tokens of these requests and these rows of prompts: (seconds for its
        prompts, seconds for the tokens). If every step reads prompts, their share is the time of a step with the
        prompts alone. If few do, it is what they add to a step without them."""
        if not prompt_rows:
            return 0.0, self.of_plain(requests)
        prompts, tokens, together = map(self.forward.at, (prompt_rows, requests, requests + prompt_rows))
        added = together - tokens
        share = added + self._with_prompts.value * (prompts - added)
        return share, together - share

    def without_prompts(self, step: Step, drafter_reads: bool) -> Step:
        """Learn from the prompts that were read in a step. Return it with the times that it would have taken without.
        drafter_reads: whether the drafter read them, too."""
        self._with_prompts.add(float(step.prompt_rows > 0))
        if not step.prompt_rows:
            return step
        tokens = len(step.ids) + sum(step.nodes)
        rows, read = tokens + step.prompt_rows, step.prompt_rows if step.read_rows is None else step.read_rows
        grain = max(1, int(SAME * 2 ** int(math.log2(rows))))
        self.forward.add(round(rows / grain) * grain, step.rest)
        if read and not any(step.lengths) and drafter_reads:
            self._reading.add(step.draft / read)
        draft = max(0.0, step.draft - read * self._reading.value)
        return replace(step, draft=draft, rest=step.rest - (self.forward.at(rows) - self.forward.at(tokens)))

    def set_price(self, requests: int, gain: float) -> None:
        """Set the price to the tokens that decoding of these requests gains at its present speed in the time in which
        each gets draft token 1, 2, .. verified, and a further one drawn. gain: of drafts over plain decoding."""
        if self.forward.numbers < 2:
            return
        timed = min(MORE_ROWS, max(1, (self.forward.most - requests) // requests))
        times = self.forward.estimate(requests * np.arange(1, timed + 2))
        usual = (times[-1] - times[0]) / timed
        each = np.append((np.diff(times) + usual) / 2, usual)  # differences of medians are noisy
        speed, draw = max(1.0, gain) / max(SHORTEST, self.of_plain(requests)), self.price.draw_cost
        levels = self.levels(requests)
        if levels.numbers > 2 and levels.most > 1:  # 0, and two that were drawn
            draw = min(DEAREST, speed * (levels.at(levels.most) - levels.at(1)) / (levels.most - 1))
        self.price = Budget(0, tuple(np.clip(each * speed, CHEAPEST, DEAREST).tolist()), draw)
