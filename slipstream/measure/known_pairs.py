"""Recommended pairs of target and draft model, their published acceptance rates and speed-ups, and the sources.

The pairs are listed in templates/known_models.json. Shapes come from the published config.json files; sizes are
computed from the shapes. A figure without a source is None and is shown as "no published figure".
"""

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.params import Strict
from slipstream.core.strict import JsonMapping
from slipstream.measure.roofline import CONTEXT, KNOWN, Hardware, ModelSize, compute_pair_costs, place_models
from slipstream.theory.forecast import ASSUMED_ACCEPTANCE, LONGEST_DRAFT, Forecast, Rates, forecast


@dataclass(frozen=True)
class KnownModel(Strict):
    """A model of the registry.

    hub     id on the Hugging Face hub.
    config  the shape: fields of config.json.
    """

    name: str
    hub: str
    config: JsonMapping

    @cached_property
    def shape(self) -> DecoderConfig:
        return DecoderConfig.from_dict(self.config)

    @property
    def size(self) -> ModelSize:
        return ModelSize.of(self.shape, self.name)


@dataclass(frozen=True)
class KnownPair(Strict):
    """A recommended pair of target and draft model.

    source        where the pair is recommended.
    acceptance    (low, high) of the published acceptance rate, from `acceptance_source`; None: no published figure.
    speedup       (low, high) of the published speed-up, from `speedup_source`; None: no published figure.
    draft_tokens  draft length used by the source, if given.
    note          a remark, in one sentence.
    """

    target: str
    draft: str
    source: str
    acceptance: Seq[float] | None = None
    acceptance_source: str = ""
    speedup: Seq[float] | None = None
    speedup_source: str = ""
    draft_tokens: int | None = None
    note: str = ""


MODELS = {name: KnownModel(name, **known) for name, known in KNOWN["models"].items()}
PAIRS = tuple(KnownPair(**known) for known in KNOWN["pairs"])


def predict_pair(
    pair: KnownPair, hardware: Hardware, acceptance: float | None = None, context: int = CONTEXT
) -> tuple[Hardware, Forecast]:
    """Return the fewest devices of this kind that hold both models in 16 bits, and the prediction on these devices for
    one sequence of `context` tokens. Raises ParameterError if 64 devices do not hold the models."""
    models = MODELS[pair.target].size, MODELS[pair.draft].size
    hardware = place_models(models, hardware, context)
    rates = choose_rates(pair.target, pair.draft, acceptance)
    return hardware, forecast(rates, compute_pair_costs(*models, hardware, 1, context))


def choose_rates(
    target: str | None, draft: str | None, given: float | None = None, longest: int = LONGEST_DRAFT
) -> Rates:
    """Choose the acceptance rate for predictions of this pair: `given`, else the middle of the published range if the
    registry knows the pair, else `ASSUMED_ACCEPTANCE`."""
    if given is not None:
        return Rates.constant(given, "given", longest)
    pair = find_pair(target, draft) if target and draft else None
    if pair is not None and pair.acceptance is not None:
        return Rates.constant(sum(pair.acceptance) / 2, "published", longest)
    return Rates.constant(ASSUMED_ACCEPTANCE, "assumed", longest)


def _key(name: str) -> str:
    """Return the name without owner, case, punctuation and kind of tuning, which vary between spellings."""
    name = re.sub(r"[^a-z0-9.]", "", name.rstrip("/").rsplit("/", 1)[-1].lower())
    return re.sub(r"^meta|instruct|chat|hf$|v0\.[12]", "", name).removesuffix("hf")


def find_model(name: str) -> KnownModel | None:
    """Find the registry's model by name, hub id or folder name, in any spelling; None if the registry has none."""
    wanted = _key(name)
    return next((m for m in MODELS.values() if wanted in (_key(m.name), _key(m.hub))), None)


def find_pair(target: str, draft: str) -> KnownPair | None:
    """Find the registry's pair by two names, hub ids or folder names; None if the registry has none."""
    models = find_model(target), find_model(draft)
    return next((p for p in PAIRS if models == (MODELS[p.target], MODELS[p.draft])), None)
