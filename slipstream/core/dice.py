"""`Dice`: where verification takes its random choices from.

Verification never draws a random number itself. It asks to accept with a probability, to choose from a distribution, or
to pick with the shared noise. In production the answers come from each sequence's own stream. The proofs pass dice that
branch over every possible answer and weigh each branch with its probability, so the code that is proven is the code
that runs.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.random import VERIFY, Stream


class Dice:
    """Random choices for one step of B sequences.

    streams    one per sequence.
    positions  index of the first token that this step decides, per sequence.
    counts     most acceptance tests that each sequence can need (its number of nodes).

    Sequence b reads only numbers addressed by (its seed, positions[b]), so its outcome is the same alone or in
    a batch.
    """

    def __init__(self, streams: Seq[Stream], positions: Seq[int], counts: Seq[int]):
        self._streams, self._positions, self._counts = streams, positions, counts
        self._columns: NDArray[np.float64] | None = None  # [B, 1 + max(counts)]; column 0 serves `choose`
        self._column = 0

    def _uniforms(self, column: int) -> NDArray[np.float64]:
        """[B]."""
        if self._columns is None:
            self._columns = np.zeros((len(self._streams), 1 + max(self._counts)))
            for row, stream, position, count in zip(
                self._columns, self._streams, self._positions, self._counts, strict=True
            ):
                row[: 1 + count] = stream.uniforms(VERIFY, position, 1 + count)
        return self._columns[:, column]

    def accept(self, probability: Seq[float]) -> list[bool]:
        """[B] -> [B]: True with the given probability; values above 1 are certain, 0 and NaN never happen (the test is
        strict: a uniform of exactly 0 does not accept an impossible token). Computed on the host, where trees are
        walked."""
        self._column += 1
        return [u < p for u, p in zip(self._uniforms(self._column).tolist(), probability, strict=True)]

    def choose(self, probs: Tensor) -> Tensor:
        """[B, V] (rows sum to 1) -> int64 [B]: a token of each row, by inverse-CDF sampling."""
        return invert(probs, torch.from_numpy(self._uniforms(0)).to(probs.device))

    def pick(self, probs: Tensor, owner: Seq[int], depth: Seq[int]) -> Tensor:
        """[R, V] -> int64 [R]: argmax(log probs + noise) with the noise of position `positions[owner[r]] + depth[r]` of
        sequence `owner[r]` for row r (Gumbel-max)."""
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
