"""`describe` says how a model will be run, before its weights are read; `as_target` also loads it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from slipstream.backends.table import usable_device
from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName
from slipstream.checkpoints.load_settings import DEFAULTS, DeviceMap, LoadKeywords, LoadSettings
from slipstream.checkpoints.weights import Progress
from slipstream.core.target import Target
from slipstream.errors import LoadError, ParameterError, UnsupportedModelError
from slipstream.heads.recognition import recognise
from slipstream.settings import AUTO, TRANSFORMERS
from slipstream.targets.decoder import Decoder, DescribedDecoder
from slipstream.targets.described import Described, check_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

log = logging.getLogger("slipstream")

Model = CheckpointName | torch.nn.Module | Target
"""A folder, a hub id, a GGUF file or "embedded"; a loaded transformers model; a loaded target."""

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")
"""Values of a device map besides devices."""


def describe(checkpoint: CheckpointName, settings: LoadSettings = DEFAULTS) -> Described:
    """Describe a folder, a hub id, a GGUF file or "embedded" without its weights; for a hub id, downloads small files.

    Our own decoder runs GGUF files, and the checkpoints that it knows; transformers runs the rest. Raises the family of
    LoadError, and ParameterError for a draft head and for a setting that is not supported."""
    opened = Checkpoint.open(checkpoint, settings.role)
    if kind := recognise(opened):
        fix = f"give it as the draft of its target: slipstream bench -m TARGET --draft {opened}"
        model = "a draft model" if settings.role == "draft" else "a model"
        raise ParameterError(f"{str(opened)!r} is a draft head ({kind}), not {model}", fix=fix)
    if opened.is_gguf:
        if settings.role == "draft" and settings.executor == TRANSFORMERS:
            settings = replace(settings, executor=AUTO)  # the executor was chosen for the target
        settings.refuse(
            ("lora", "device_map", *(["executor"] if settings.executor == TRANSFORMERS else [])),
            "given with a GGUF file",
            "an adapter cannot be merged into a GGUF file, and transformers cannot run it",
            "leave it out, or give the folder of the checkpoint that the file was made from",
        )
        return DescribedDecoder.of(opened, settings)
    settings.check_device_map()
    if settings.device_map is not None:
        _check_places(settings.device_map)
        refusals = {"decoder": "a device_map was given"}
    elif settings.executor == TRANSFORMERS:
        refusals = {}
    else:
        try:
            return DescribedDecoder.of(opened, settings)
        except UnsupportedModelError as refused:
            if settings.executor != AUTO:
                raise
            refusals = {"decoder": refused.what}
    from slipstream.targets.huggingface.load_module import DescribedModule

    return DescribedModule.of(opened, settings, refusals)


def as_target(model: Model, progress: Progress | None = None, **settings: Unpack[LoadKeywords]) -> Target:
    """Make a `Target` from an argument of `describe`, a loaded transformers model, or a `Target` itself. Logs a warning
    if transformers runs a model that our own decoder does not run.

    settings  fields of `LoadSettings`. progress: as in `Described.load`. Raises ParameterError for other objects, and
              for settings that are given with a `Target`: it is loaded already, and would ignore them.
    """
    return adopt(model, LoadSettings.of(settings, "as_target"), progress)


def adopt(model: object, settings: LoadSettings, progress: Progress | None = None) -> Target:
    """Make a target like `as_target`, with `LoadSettings` that were made from its settings."""
    if isinstance(model, Target):
        settings.refuse(
            tuple(settings.given),
            "given with a loaded target",
            "a loaded target would ignore the setting",
            "give the path of the checkpoint instead, or load the target with the setting: Decoder.load(path, ...)",
        )
        return model
    if isinstance(model, CheckpointName):
        described = describe(model, settings)
        check_memory(described)
        return described.load(progress)
    module = model if isinstance(model, torch.nn.Module) else None
    if module is None or not hasattr(module, "config"):  # wrappers of models also have a config
        raise ParameterError(
            f"{model!r:.80} is not a model",
            fix="give a folder, a hub id, a GGUF file, 'embedded', a loaded transformers model or a Target",
        )
    return _of_module(module, settings)


def _check_places(device_map: DeviceMap) -> None:
    """Raise ParameterError for a device that does not exist; transformers would fail only while it loads."""
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if isinstance(place, int) and torch.accelerator.is_available():
            continue  # the number of an accelerator of any kind
        if place not in _WORDS:
            usable_device(f"cuda:{place}" if isinstance(place, int) else place, "device_map")


def _of_module(module: torch.nn.Module, settings: LoadSettings) -> Target:
    from slipstream.targets.huggingface.load_module import wrap_module

    settings.refuse(
        ("lora", "device_map"),
        "given with a loaded model",
        "a loaded model keeps its weights and its device",
        "give the model's folder, or merge with peft (merge_and_unload), or use from_pretrained(..., device_map=...)",
    )
    places = {str(weight.device) for weight in module.parameters()}
    if len(places) > 1 or "meta" in places:  # "meta": offloaded weights
        if settings.device is not None:
            raise ParameterError(
                f"device is {str(settings.device)!r}, but the model is spread over several devices",
                fix="leave it out",
            )
        if settings.executor not in (AUTO, TRANSFORMERS):
            raise ParameterError(
                f"executor is {settings.executor!r}, but the loaded model is spread over several devices",
                why="our own decoder runs on one device",
                fix="leave executor out: transformers runs the model",
            )
        why = "the model is spread over several devices"
    else:
        here = next(module.parameters()).device
        wanted = here if settings.device is None else torch.device(settings.device)
        if wanted.type != here.type or wanted.index not in (None, here.index):
            raise ParameterError(
                f"device is {str(wanted)!r}, but the loaded model is on {str(here)!r}",
                fix=f"move the model first: model.to({str(wanted)!r})",
            )
        if settings.executor == TRANSFORMERS:
            return wrap_module(cast("PreTrainedModel", module), settings)
        try:
            return Decoder.of_module(module, settings)
        except LoadError as fault:  # another architecture, or changed modules
            if settings.executor != AUTO:
                raise
            why = fault.what
    target = wrap_module(cast("PreTrainedModel", module), settings)
    log.warning("%s: transformers runs it instead, slower", why)
    return target
