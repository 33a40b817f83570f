"""How many users a group of devices serves with plain and with speculative decoding, predicted by the roofline.

Small batches are memory-bound: more sequences share one read of the weights. Large batches are compute-bound: every
rejected draft token delays other sequences, so the best draft length shrinks as the batch grows, down to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.core.params import Strict
from slipstream.plan.roofline import MEMORY_SHARE, Hardware, ModelSize, PairCosts, memory_needed, pair_costs
from slipstream.theory.forecast import Forecast, Rates, forecast

MOST_ROWS = 65536
"""Largest number of rows of one step."""


@dataclass(frozen=True)
class Load(Strict):
    """The predictions for one batch size. memory: bytes of the weights of both models and the KV caches; fits: whether
    the devices hold them."""

    batch: int
    forecast: Forecast
    costs: PairCosts
    memory: float
    fits: bool

    @property
    def plain_seconds(self) -> float:
        """Mean time between two tokens of one user in plain decoding."""
        assert self.costs.target is not None
        return self.costs.target(self.batch)

    @property
    def seconds(self) -> float:
        """Mean time between two tokens of one user with speculative decoding."""
        return self.plain_seconds / self.forecast.speedup

    def as_dict(self) -> dict[str, Any]:
        return self.forecast.as_dict() | {
            "batch": self.batch,
            "plain_seconds": self.plain_seconds,
            "seconds": self.seconds,
            "memory": self.memory,
            "fits": self.fits,
            "draft_devices": self.costs.draft_devices,
            "tokens_per_second_per_user": 1 / self.seconds,
            "plain_tokens_per_second_per_user": 1 / self.plain_seconds,
            "tokens_per_second": self.batch / self.seconds,
            "plain_tokens_per_second": self.batch / self.plain_seconds,
        }


@dataclass(frozen=True)
class Serving(Strict):
    """Target and draft model on a group of devices. rates: their length limits the draft length; context: mean number
    of tokens in a sequence."""

    target: ModelSize
    draft: ModelSize
    hardware: Hardware
    rates: Rates
    context: float = 1024

    def memory(self, batch: int, speculative: bool = True) -> float:
        models = (self.target, self.draft) if speculative else (self.target,)
        return memory_needed(models, batch, self.context)

    def fits(self, batch: int, speculative: bool = True) -> bool:
        return self.memory(batch, speculative) <= MEMORY_SHARE * self.hardware.memory * self.hardware.devices

    def load(self, batch: int, draft_tokens: int | None = None) -> Load:
        """The predictions for this batch size; draft_tokens None: at the best draft length."""
        costs = pair_costs(self.target, self.draft, self.hardware, batch, self.context)
        rates = self.rates.up_to(max(1, MOST_ROWS // batch - 1))
        return Load(batch, forecast(rates, costs, draft_tokens), costs, self.memory(batch), self.fits(batch))

    def users(self, bound: float | None, speculative: bool = True) -> int:
        """The largest batch of one group that fits and has a mean time between tokens of at most `bound` seconds (None:
        only memory limits it); 0 if not even one sequence does."""

        def served(batch: int) -> bool:
            if bound is None or not self.fits(batch, speculative):
                return self.fits(batch, speculative)
            load = self.load(batch)
            return (load.seconds if speculative else load.plain_seconds) <= bound

        low, high = 0, 1
        while high <= MOST_ROWS and served(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if served(middle) else (low, middle)
        return low
