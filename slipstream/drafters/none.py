"""Plain decoding: drafts nothing."""

from dataclasses import dataclass

from slipstream.core.drafter import NoDrafter
from slipstream.core.strict import Strict
from slipstream.core.target import Target


@dataclass(frozen=True)
class NoOptionsConfig(Strict):
    """It has no options: any that is given is refused."""


def make(target: Target, **options: object) -> NoDrafter:
    """See `registry`; it has no options."""
    NoOptionsConfig(**options)
    return NoDrafter()
