"""Every drafter by name. A new drafter is one file and one line here; the conformance suite picks it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.drafters.base import Drafter
from slipstream.drafters.none import NoDrafter
from slipstream.errors import ParameterError, did_you_mean
from slipstream.targets.base import Target


def _ngram(target: Target, **options: Any) -> Drafter:
    from slipstream.drafters.ngram import NgramConfig, NgramDrafter

    return NgramDrafter(NgramConfig(**options), target.device)


def _model(target: Target, *, model: Target, **options: Any) -> Drafter:
    from slipstream.drafters.model import ModelDraftConfig, ModelDrafter

    return ModelDrafter(model, target.vocab_size, ModelDraftConfig(**options))


def _none(target: Target) -> Drafter:
    return NoDrafter()


DRAFTERS: dict[str, Callable[..., Drafter]] = {"none": _none, "ngram": _ngram, "model": _model}


def make_drafter(name: str, target: Target, **options: Any) -> Drafter:
    """The drafter of that name for `target`. Raises ParameterError for unknown names and options."""
    if name not in DRAFTERS:
        raise ParameterError(f"no drafter is named {name!r}", fix=did_you_mean(name, DRAFTERS))
    return DRAFTERS[name](target, **options)
