"""The drafter "none": plain decoding. `NoDrafter` is part of the contract, see `core.drafter`."""

from __future__ import annotations

from slipstream.core.drafter import NoDrafter
from slipstream.core.target import Target


def make(target: Target) -> NoDrafter:
    """See `registry`."""
    return NoDrafter()
