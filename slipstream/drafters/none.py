"""Plain decoding: drafts nothing.

`NoDrafter` itself is defined in `core.drafter`.
"""

from __future__ import annotations

from slipstream.core.drafter import NoDrafter
from slipstream.core.target import Target


def make(target: Target) -> NoDrafter:
    """See `registry`."""
    return NoDrafter()
