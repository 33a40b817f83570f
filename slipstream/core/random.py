"""Random streams: one for each sequence, addressed by position, without state.

Every number is a function of (seed, nonce, purpose, position, index), computed by the counter-based generator Philox
(Salmon et al., SC 2011). So a request draws the same numbers alone or in a batch, before or after preemption, and there
is no global state. Purposes keep the draws independent: the number that sampled a draft token must not be the number
that verification decides with. The nonce keeps requests with the same seed independent of each other. It matters if a
drafter remembers something from an earlier request, if the engine chooses draft lengths (see `engine`), or if there is
a prediction (see `LLM.prepare`); otherwise it is 0.
"""

import threading
from secrets import randbits

import numpy as np

VERIFY, DRAFT, NOISE, SIBLINGS = 1, 2, 3, 4


class _Philox(threading.local):
    """The generator of a thread. Each draw sets its state, which is ten times as fast as making a new generator."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)  # without a key NumPy would ask the system for entropy
        self.random = np.random.Generator(self.bits).random
        self.state = self.bits.state
        self.state["buffer_pos"] = 4  # no buffered numbers of an earlier draw
        self.key, self.counter = self.state["state"]["key"], self.state["state"]["counter"]


_philox = _Philox()


class Stream:
    """The random numbers of one sequence.

    seed  any integer, reduced modulo 2^64; None: the operating system gives a random seed.
    """

    __slots__ = ("nonce", "seed")

    def __init__(self, seed: int | None = None):
        self.nonce = 0
        self.seed = (randbits(64) if seed is None else seed) & (2**64 - 1)

    def uniforms(self, purpose: int, position: int, n: int) -> np.ndarray:
        """`n` doubles in [0, 1) that belong to `position` (the index of the token being decided)."""
        philox = _philox
        philox.key[:] = self.seed, purpose
        philox.counter[:] = 0, position, self.nonce, 0
        philox.bits.state = philox.state
        return philox.random(n)

    def gumbel(self, position: int, n: int) -> np.ndarray:
        """`n` standard Gumbel doubles for `position`: the shared noise of the rule `coupled`.

        argmax(log p + gumbel) is a sample of p. Draft and target use the same noise at the same position, so they
        often pick the same token if their distributions are similar.
        """
        return -np.log(-np.log(np.maximum(self.uniforms(NOISE, position, n), 1e-300)))
