"""`SeededLengths`: chooses draft lengths like `DraftLengths`, with random times from a seed instead of the clock. So
runs are reproducible, and drafts are verified even if they do not pay. All steps take the same time; costs of rows and
pauses are random. Texts have the target's distribution if lengths depend only on verified draft tokens."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from slipstream.core.drafter import Budget
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.step_costs import CHEAPEST, DEAREST, MORE_ROWS
from slipstream.engine.timed_step import Step


class SeededLengths(DraftLengths):
    def __init__(self, most: int, seed: int):
        super().__init__(most)
        self._random = np.random.default_rng(seed)

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
        if self._random.random() < 1 / 128:  # sometimes pause although drafts pay
            self.policy.trials.decide(pays=False)
        self.policy.gains.is_told = True  # times are not measured here
        budgets = super().choose(ids, limits, prompt_rows, forced)
        logs = self._random.uniform(np.log(CHEAPEST), np.log(DEAREST), MORE_ROWS)
        return [replace(budget, row_costs=tuple(np.exp(logs).tolist())) for budget in budgets]

    def learn(self, step: Step) -> None:
        super().learn(replace(step, draft=0.0, rest=1.0, aside=0.0))
