"""Reads and checks values of a config.json. Errors name the missing or wrong key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ConfigError, UnsupportedModelError

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip

SLIDING, FULL = "sliding_attention", "full_attention"


def eos_ids(config: JsonMapping) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise ConfigError(f"eos_token_id is {eos!r}, but must be an integer or a list", fix="correct config.json")
    vocab = count_of(config, "vocab_size")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))  # an id outside the vocabulary is never generated


def activation_of(config: Mapping[str, object], key: str, default: str) -> str:
    name = config.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise make_refusal(f"{key} is {name!r:.100}, which our own decoder does not support", f"it supports {known}")
    return ACTIVATIONS[name]


def object_of(config: Mapping[str, object], key: str) -> JsonMapping:
    """Return an object of config.json; empty if it is missing or null. Raises ConfigError."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}, but must be a JSON object", fix="correct config.json")
    return value or {}


def count_of(config: Mapping[str, object], key: str, default: int | None = None, least: int = 1) -> int:
    """Return an integer of config.json, at least `least`. Raises ConfigError."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise ConfigError(f"{key} is {value!r}; needed is an integer >= {least} and < 2**31", fix="correct config.json")
    return value


def flag(config: Mapping[str, object], key: str, default: bool) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}, but must be true or false", fix="correct config.json")
    return value


def positive(config: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = _value(config, key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value!r}, but must be a positive number", fix="correct config.json")
    return value


def _value(config: Mapping[str, object], key: str, default: object) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {key}", why="the model cannot run without it", fix="export it again")
    return value


def make_refusal(what: str, why: str = "") -> UnsupportedModelError:
    fix = "give executor='auto', with which transformers runs this model, or choose another checkpoint"
    return UnsupportedModelError(what, why=why, fix=fix)


def cap_of(config: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return a soft cap: a positive number, or 0 if the value is null."""
    value = config.get(key, default)
    return 0.0 if value is None else positive(config, key, default)


def refuse(config: Mapping[str, object], key: str, plain: object) -> None:
    """Raise UnsupportedModelError for a value that changes what the model computes."""
    if config.get(key, plain) not in (plain, None):
        raise make_refusal(f"{key} is {config[key]!r}, but our own decoder supports only {plain!r}")


def flags_of(config: Mapping[str, object], key: str, default: list[bool]) -> list[bool]:
    """Return a boolean for each layer, from a list of true and false, or 1 and 0."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != len(default) or any(each not in (0, 1) for each in value):
        what = f"{key} must be a list of {len(default)} values 0 or 1, one for each layer, but is {value!r:.200}"
        raise ConfigError(what, fix="correct config.json")
    return [bool(each) for each in value]


def layer_kinds(config: Mapping[str, object], layers: int, pattern: int = 0, near: str = SLIDING) -> list[bool]:
    """Return for each layer whether its attention has a window, from the key `layer_types`. If the key is missing, all
    layers except every `pattern`-th have a window; with a pattern of 0, no layer has a window. near: name of layers
    with a window. Raises ConfigError."""
    types = config.get("layer_types")
    if types is None:
        return [bool(pattern and (i + 1) % pattern) for i in range(layers)]
    known = (near, FULL)
    if not isinstance(types, list) or len(types) != layers or any(each not in known for each in types):
        raise ConfigError(
            f"layer_types must name one of {known} for each of {layers} layers, but is {types!r:.200}",
            fix="correct config.json",
        )
    return [each == near for each in types]


def rope_parameters(config: ReadKeys, theta: float = 1e4) -> JsonObject:
    """Return the rotary parameters: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`
    (transformers 4). The keys of transformers 4 take precedence, because users often add them to a file of
    transformers 5. theta: default of rope_theta."""
    new, old = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    parameters = ReadKeys(old or new)
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            raise make_refusal(f"rotary parameters differ for {key!r}", "our own decoder has one for all layers")
    parameters.setdefault("rope_theta", config.get("rope_theta", theta))
    if "partial_rotary_factor" in config:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    scaled = parameters.get("rope_type", parameters.get("type", "default")) in ("yarn", "llama3", "longrope")
    if scaled and config.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    config["rope_scaling" if old else "rope_parameters"] = parameters
    return parameters


def partial_rope(config: ReadKeys, size: int, theta: float = 1e4, default: float = 1.0) -> JsonObject:
    """Return `rope_parameters` of a family that rotates only the first dimensions of its heads of `size`."""
    parameters = rope_parameters(config, theta)
    share = positive(parameters, "partial_rotary_factor", default)
    rotated = int(size * share)
    if not 0 < rotated <= size or rotated % 2:
        what = f"partial_rotary_factor is {share}, which rotates {rotated} of {size} dimensions"
        raise ConfigError(what, why="rotary embeddings rotate pairs of dimensions", fix="correct config.json")
    parameters["dimensions"] = rotated
    return parameters


def ropes_by_kind(config: ReadKeys, sliding_theta: float, full_theta: float) -> tuple[JsonObject, ...]:
    """Return the rotary parameters of layers with a window, and of layers without, from old or new keys."""
    given = object_of(config, "rope_parameters")
    if not any(isinstance(value, Mapping) for value in given.values()):
        return {"rope_type": "default", "rope_theta": sliding_theta}, rope_parameters(config, full_theta)
    each = [ReadKeys(object_of(given, kind) or {"rope_type": "default"}) for kind in (SLIDING, FULL)]
    for one, theta in zip(each, (sliding_theta, full_theta), strict=True):
        one.setdefault("rope_theta", theta)
    each[1].update(object_of(config, "rope_scaling"))
    both = ReadKeys({**given, SLIDING: each[0], FULL: each[1]})
    config["rope_parameters"] = both
    return both[SLIDING], both[FULL]
