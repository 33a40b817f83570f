"""Plain decoding: drafts nothing."""

from dataclasses import dataclass

from slipstream.core.drafter import NoDrafter
from slipstream.core.strict import Strict
from slipstream.core.target import Target


@dataclass(frozen=True)
class NoOptionsConfig(Strict):
    """Options of a drafter that has none: any option is refused."""


def make(target: Target, **options: object) -> NoDrafter:
    """Make the drafter `none`, as `registry` requires. It has no options."""
    NoOptionsConfig(**options)
    return NoDrafter()
