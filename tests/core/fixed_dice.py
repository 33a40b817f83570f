"""Dice that are not random."""

import numpy as np

from slipstream.core.dice import Dice
from slipstream.core.random import Stream


class Fixed(Dice):
    """Production dice whose every uniform is `u`."""

    def __init__(self, u: float, batch: int = 1):
        super().__init__([Stream(0)] * batch, [0] * batch, [0] * batch)
        self.u, self.batch = u, batch

    def _uniforms(self, row: int) -> np.ndarray:
        return np.full(self.batch, self.u)
