"""`Dice` makes the random choices of verification.

Verification never draws a random number itself. It calls `Dice` to accept with a probability, to choose from a
distribution, or to pick with shared noise. In production, `Dice` uses the random stream of each sequence. The proofs of
exactness pass another object, which branches over every possible answer and weights each branch with its probability.
So the code that is proven is the code that runs.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.random import VERIFY, Stream


class Dice:
    """Random choices for one step of B sequences.

    streams    one random stream per sequence.
    positions  per sequence, index of the first token that this step decides.
    counts     per sequence, the largest number of acceptance tests that it can need (its number of nodes).

    Sequence b uses only random numbers that belong to its seed and to positions[b], so its outcome is the same alone
    and in a batch.
    """

    def __init__(self, streams: Seq[Stream], positions: Seq[int], counts: Seq[int]):
        self._streams, self._positions, self._counts = streams, positions, counts
        self._columns: NDArray[np.float64] | None = None  # [B, 1 + max(counts)]; column 0 serves `choose`
        self._column = 0

    def _uniforms(self, column: int) -> NDArray[np.float64]:
        """Return uniform numbers [B] of this column."""
        if self._columns is None:
            self._columns = np.zeros((len(self._streams), 1 + max(self._counts)))
            for row, stream, position, count in zip(
                self._columns, self._streams, self._positions, self._counts, strict=True
            ):
                row[: 1 + count] = stream.uniforms(VERIFY, position, 1 + count)
        return self._columns[:, column]

    def accept(self, probability: Seq[float]) -> list[bool]:
        """[B] -> [B]: True with the given probability. Probabilities of 1 or more are certain; 0 and NaN never accept
        (the comparison is strict, so a uniform number of exactly 0 does not accept an impossible token). Computed on
        the host, where the trees are walked."""
        self._column += 1
        return [u < p for u, p in zip(self._uniforms(self._column).tolist(), probability, strict=True)]

    def choose(self, probs: Tensor) -> Tensor:
        """[B, V] (rows sum to 1) -> int64 [B]: draw a token from each row by inverse-CDF sampling."""
        return invert(probs, torch.from_numpy(self._uniforms(0)).to(probs.device))

    def pick(self, probs: Tensor, owner: Seq[int], depth: Seq[int]) -> Tensor:
        """[R, V] -> int64 [R]: argmax(log probs + noise) of each row (Gumbel-max). Row r has the noise of position
        `positions[owner[r]] + depth[r]` of sequence `owner[r]`."""
        vocab = probs.shape[-1]
        places: dict[tuple[int, int], int] = {}  # nodes of equal depth share their noise: it is drawn once
        rows = [places.setdefault(place, len(places)) for place in zip(owner, depth, strict=True)]
        noise = np.stack([self._streams[b].gumbel(self._positions[b] + d, vocab) for b, d in places])
        noise = noise if len(places) == len(rows) else noise[rows]
        return (probs.log() + torch.from_numpy(noise).to(probs.device)).argmax(-1)


def invert(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: probs [B, V], u [B] in [0, 1) -> int64 [B], the first token whose cumulative probability
    exceeds u.

    The cumulative sum is divided by its last entry, so it ends in exactly 1 and no token of probability 0 can be drawn.
    """
    total = probs.cumsum(-1)  # [B, V]
    return torch.searchsorted(total / total[:, -1:], u[:, None].contiguous(), right=True)[:, 0]
