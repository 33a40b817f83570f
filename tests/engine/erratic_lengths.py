"""Draft lengths that change, and rest, at random: what `DraftLengths` may do, far more often."""

import random
from collections.abc import Sequence as Seq

from slipstream.engine.draft_lengths import DraftLengths, State, Step


class ErraticLengths(DraftLengths):
    """seed: of the choices. They depend on nothing else, so sampled texts keep their distribution."""

    def __init__(self, seed: int, most: int = 4):
        super().__init__(most)
        self._draw = random.Random(seed)
        self.rests = self.plain_steps = self.drafting_steps = 0

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0) -> list[int]:
        if self._draw.random() < (0.5 if self.resting else 0.15):
            self.state = State.DRAFTING if self.resting else State.RESTING
            self.rests += self.resting
        most = 0 if self.resting else self._draw.choice((0, self.most, self.most))
        lengths = [min(limit, self._draw.randint(0, most)) for limit in limits]
        self.plain_steps += not any(lengths)
        self.drafting_steps += any(lengths)
        return lengths

    def learn(self, step: Step) -> None:
        pass

    def joined(self) -> None:
        pass
