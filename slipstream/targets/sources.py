"""What can be loaded as a model: a path, a transformers model in memory, or a `Target`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.core.target import Target
from slipstream.errors import ParameterError

SETTINGS = ("executor", "dtype", "device", "quantize", "threads", "kv_dtype")
"""Options of `Decoder.load` that decide how a model runs."""


def as_target(model: Any, **load: Any) -> Target:
    """A `Target` out of a folder, a hub id, a loaded transformers model, or a `Target` itself.

    load  options of `Decoder.load`. Raises its errors, and ParameterError for other objects, and for settings that are
          given with a `Target`: it is loaded already, and would ignore them.
    """
    if isinstance(model, Target):
        _refuse_settings(load)
        return model
    from slipstream.targets.decoder import Decoder

    if isinstance(model, (str, Path)):
        return Decoder.load(model, **load)
    if not isinstance(model, torch.nn.Module):
        raise ParameterError(
            f"{model!r} is no model",
            fix="give a folder, a hub id, 'embedded', a loaded transformers model or a Target",
        )
    device, here = load.pop("device", None), next(model.parameters()).device
    wanted = here if device is None else torch.device(device)
    if wanted.type != here.type or wanted.index not in (None, here.index):
        raise ParameterError(
            f"device is {str(wanted)!r}, the loaded model is on {str(here)!r}", fix=f"model.to({str(wanted)!r})"
        )
    load.pop("progress", None)  # nothing is read
    return Decoder.from_module(model, **load)


def _refuse_settings(load: Mapping[str, Any]) -> None:
    """Raise ParameterError if one of the options of `Decoder.load` changes how a model is loaded or run."""
    given = {name: load[name] for name in SETTINGS if load.get(name) is not None and load[name] != "auto"}
    if given:
        raise ParameterError(
            " and ".join(f"{name}={value!r}" for name, value in given.items()) + " was given with a loaded target",
            why="these settings take effect when a target is loaded; this one would ignore them",
            fix="give the path of the checkpoint, or load the target with them: Decoder.load(path, ...)",
        )
