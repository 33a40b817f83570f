"""What can be loaded as a model: a path, a transformers model in memory, or a `Target`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.core.target import Target
from slipstream.errors import ParameterError


def as_target(model: Any, **load: Any) -> Target:
    """A `Target` out of a folder, a hub id, a loaded transformers model, or a `Target` itself.

    load  options of `Decoder.load`. Raises its errors, and ParameterError for other objects.
    """
    if isinstance(model, Target):
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
