"""Every drafter by name. A new drafter is one file and one line here; the conformance suite picks it up."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.errors import ParameterError, did_you_mean

DRAFTERS: dict[str, str] = {
    "none": "none",
    "model": "model",
    "layerskip": "layerskip",
    "ngram": "ngram",
    "suffix": "suffix",
    "sam": "sam",
    "recycling": "recycling",
    "lookahead": "lookahead",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle",
    "hybrid": "hybrid",
    "bandit": "bandit",
    "replay": "replay",
}
"""Name -> module of this folder that holds it, imported when asked for. The module's `make(target, **options)` makes
the drafter, and raises ParameterError for options that it does not know."""


def make_drafter(name: str, target: Target, **options: Any) -> Drafter:
    """The drafter of that name for `target`. Raises ParameterError for unknown names and options."""
    if name not in DRAFTERS:
        raise ParameterError(f"no drafter is named {name!r}", fix=did_you_mean(name, DRAFTERS))
    module = import_module(f"slipstream.drafters.{DRAFTERS[name]}")
    make = getattr(module, f"make_{name}", module.make)  # a module of two names may want to know by which it was asked
    made: Drafter = make(target, **options)
    return made
