"""What can be loaded as a model: a path, a transformers model in memory, or a `Target`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.backends.table import usable_device
from slipstream.core.target import Target
from slipstream.errors import LoadError, ParameterError, UnsupportedModelError
from slipstream.models.gguf_header import is_gguf
from slipstream.settings import LLAMACPP, TRANSFORMERS, check_device_map

log = logging.getLogger("slipstream")

SETTINGS = ("executor", "dtype", "device", "quantize", "threads", "kv_dtype", "kv_tokens", "device_map", "lora")
"""Options of `Decoder.load` that decide what runs, and how, and `device_map` of transformers."""


_WORDS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")
"""What a device map may say instead of a device."""


def as_target(model: Any, *, trust_remote_code: bool = False, **load: Any) -> Target:
    """A `Target` out of a folder, a hub id, a GGUF file, a loaded transformers model, or a `Target` itself.

    What our own decoder does not run, transformers runs (`targets.huggingface`), and a warning says so. llama.cpp runs
    GGUF files (`targets.gguf`).

    trust_remote_code  run Python code that a checkpoint brings, where transformers has none for it.
    load  options of `Decoder.load`, and `device_map` of transformers. Raises its errors, and ParameterError for other
          objects, and for settings that are given with a `Target`: it is loaded already, and would ignore them.
    """
    if isinstance(model, Target):
        _refuse_settings(load)
        return model
    if isinstance(model, (str, Path)):
        return _from_path(model, trust_remote_code, load)
    if not isinstance(model, torch.nn.Module):
        raise ParameterError(
            f"{model!r} is no model",
            fix="give a folder, a hub id, a GGUF file, 'embedded', a loaded transformers model or a Target",
        )
    return _from_module(model, load)


def _from_path(source: str | Path, trust_remote_code: bool, load: dict[str, Any]) -> Target:
    from slipstream.models.config import DecoderConfig
    from slipstream.targets.decoder import Decoder

    executor, device_map = load.get("executor", "auto"), load.get("device_map")
    gguf = is_gguf(source)
    if device_map is not None:
        check_device_map(device_map, LLAMACPP if gguf else executor, load.get("device"))
        _check_places(device_map)
        return _through_transformers(source, trust_remote_code, load, "a device_map was given")
    load.pop("device_map", None)
    if gguf:
        if load.pop("lora", None) is not None:
            raise ParameterError(
                "lora was given with a GGUF file",
                why="its weights are quantised",
                fix="give the folder of the checkpoint that the file was made of",
            )
        from slipstream.targets.gguf.load_gguf import from_file

        return from_file(source, load)
    if executor == TRANSFORMERS:
        return _through_transformers(source, trust_remote_code, load, "")
    try:
        DecoderConfig.load(source)
    except UnsupportedModelError as why:
        if executor != "auto":
            raise
        return _through_transformers(source, trust_remote_code, load, why.what)
    return Decoder.load(source, **load)


def _check_places(device_map: Any) -> None:
    """Raise ParameterError for a device that is not there; transformers would fail while it loads."""
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if isinstance(place, int) and torch.accelerator.is_available():
            continue  # the number of an accelerator of any kind
        if place not in _WORDS:
            usable_device(f"cuda:{place}" if isinstance(place, int) else place, "device_map")


def _from_module(module: torch.nn.Module, load: dict[str, Any]) -> Target:
    from slipstream.targets.decoder import Decoder

    if load.pop("lora", None) is not None:
        raise ParameterError(
            "lora was given with a loaded model",
            why="its weights stay as they are",
            fix="give its folder, or merge the adapter by peft (merge_and_unload)",
        )
    if load.pop("device_map", None) is not None:
        raise ParameterError(
            "device_map was given with a loaded model",
            why="its weights are where they are",
            fix="load it with from_pretrained(..., device_map=...), or give its folder",
        )
    places = {str(weight.device) for weight in module.parameters()}
    if len(places) > 1 or "meta" in places:  # "meta": offloaded, and read when it is used
        device = load.pop("device", None)
        if device is not None:
            raise ParameterError(
                f"device is {str(device)!r}, the loaded model is spread over several", fix="leave it out"
            )
        if load.get("executor", "auto") not in ("auto", TRANSFORMERS):
            raise ParameterError(
                f"executor is {load['executor']!r}, the loaded model is spread over several devices",
                why="our own decoder runs on one",
                fix="leave it out: transformers runs it",
            )
        return _through_transformers(module, False, load, "the model is spread over several devices")
    device, here = load.pop("device", None), next(module.parameters()).device
    wanted = here if device is None else torch.device(device)
    if wanted.type != here.type or wanted.index not in (None, here.index):
        raise ParameterError(
            f"device is {str(wanted)!r}, the loaded model is on {str(here)!r}", fix=f"model.to({str(wanted)!r})"
        )
    load.pop("progress", None)  # nothing is read
    executor = load.get("executor", "auto")
    if executor == TRANSFORMERS:
        return _through_transformers(module, False, load, "")
    try:
        return Decoder.from_module(module, **load)
    except LoadError as why:  # another architecture, or modules that a tool has put into one of ours
        if executor != "auto":
            raise
        return _through_transformers(module, False, load, why.what)


def _through_transformers(model: Any, trust_remote_code: bool, load: Mapping[str, Any], why: str) -> Target:
    """why: what our own decoder said of the model; empty if it was not asked."""
    from slipstream.targets.huggingface.load_module import from_path, with_settings

    settings = {name: load.get(name) for name in SETTINGS[1:]}
    if isinstance(model, torch.nn.Module):
        made = with_settings(model, settings)
    else:
        made = from_path(model, settings, trust_remote_code, load.get("role", "target"))
    if why:
        log.warning("%s: transformers runs it instead, slower", why)
    return made


def _refuse_settings(load: Mapping[str, Any]) -> None:
    """Raise ParameterError if one of the options of `Decoder.load` changes how a model is loaded or run."""
    given = {name: load[name] for name in SETTINGS if load.get(name) is not None}
    given = {name: value for name, value in given.items() if (name, value) != ("executor", "auto")}
    if given:
        raise ParameterError(
            " and ".join(f"{name}={value!r}" for name, value in given.items()) + " was given with a loaded target",
            why="these settings take effect when a target is loaded; this one would ignore them",
            fix="give the path of the checkpoint, or load the target with them: Decoder.load(path, ...)",
        )
