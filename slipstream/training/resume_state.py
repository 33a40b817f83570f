"""Training checkpoints: safetensors and JSON, written atomically.

Layout of `OUT/checkpoint.safetensors`: weights as `weights.*`, optimiser state as
`optim.<name>.<parameter>.<key>`, and the JSON state in the header, so that one rename replaces everything.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.core.strict import JsonObject
from slipstream.errors import TrainingError, reading
from slipstream.measure.results import to_json
from slipstream.training.schedule import Progress

Optimisers = dict[str, torch.optim.Optimizer]


@contextmanager
def replace_atomically(path: Path, what: str = "", why: str = "") -> Iterator[Path]:
    """Yield a temporary path for a file or folder. At the end it replaces `path`; after an error it is removed.

    Raises TrainingError if writing fails. what: text before the path in the error. why: reason in the error."""
    temporary = path.with_suffix(".tmp")
    try:
        yield temporary
        if temporary.is_dir() and path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as fault:
        text = f"{what}{path} could not be written ({fault})"
        raise TrainingError(text, why=why, fix="free some space there") from fault
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _find_aliases(model: nn.Module) -> dict[str, str]:
    """Return for each further name of a tied weight in `state_dict` the first name of the same tensor."""
    first: dict[int, str] = {}
    return {
        n: first_name
        for n, t in model.state_dict(keep_vars=True).items()
        if (first_name := first.setdefault(id(t), n)) != n
    }


def save_checkpoint(path: Path, model: nn.Module, optimisers: Optimisers, state: JsonObject) -> None:
    """Write a checkpoint atomically: a reader sees either the old or the new checkpoint. state: counters, as JSON.

    Raises TrainingError if the checkpoint cannot be written (a full disk); the previous checkpoint then remains."""
    tied = _find_aliases(model)
    tensors: dict[str, Tensor] = {
        f"weights.{k}": v.detach().cpu() for k, v in model.state_dict().items() if k not in tied
    }
    names = {id(p): name for name, p in model.named_parameters()}
    for label, optimiser in optimisers.items():
        for parameter, entries in optimiser.state.items():
            for key, value in entries.items():
                tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                tensors[f"optim.{label}.{names[id(parameter)]}.{key}"] = tensor.detach().cpu()
    kept = "the previous checkpoint is kept" if path.exists() else "there is no earlier checkpoint"
    with replace_atomically(path, "the checkpoint ", kept) as temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata={"state": json.dumps(state)})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())


def load_checkpoint(path: Path, model: nn.Module, optimisers: Optimisers | None = None) -> JsonObject:
    """Restore weights exactly, and also the optimiser state if `optimisers` is given. Returns the JSON state. Raises
    KeyError for optimiser state of a parameter that the model does not have."""
    parameters = dict(model.named_parameters())
    weights: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        state: JsonObject = json.loads(file.metadata()["state"])
        for stored in file.keys():  # noqa: SIM118
            kind, _, name = stored.partition(".")
            if kind == "weights":
                weights[name] = file.get_tensor(stored)
            elif optimisers is not None:
                label, _, rest = name.partition(".")
                parameter_name, key = rest.rsplit(".", 1)
                parameter, value = parameters[parameter_name], file.get_tensor(stored)
                # AdamW keeps its step count on the CPU, and its other state on the device of the weights.
                optimisers[label].state[parameter][key] = value if key == "step" else value.to(parameter.device)
    model.load_state_dict(weights | {n: weights[first] for n, first in _find_aliases(model).items()})
    return state


def read_state(path: Path) -> JsonObject:
    """Return the JSON state of a checkpoint of this loop, without its weights. Raises TrainingError."""
    if not path.is_file():
        raise TrainingError(f"there is no checkpoint {path} to resume", fix="remove --resume, or correct --out")
    with (
        reading(f"{path} is not a checkpoint of a training run", "choose another --out", TrainingError),
        safe_open(path, framework="pt") as file,
    ):
        state: JsonObject = json.loads(file.metadata()["state"])
        recorded, _ = state["progress"], state["run"]
    check_progress(path, recorded)
    return state


def check_progress(path: Path, recorded: JsonObject) -> None:
    """Raise TrainingError for the progress of a run if it was written by another version of Slipstream."""
    if recorded.keys() != {each.name for each in fields(Progress)}:
        raise TrainingError(
            f"{path} was written by another version of Slipstream, and this version cannot resume it",
            fix="begin again with another --out, or resume it with that version",
        )


def check_same(path: Path, recorded: JsonObject, now: JsonObject) -> None:
    """Refuse to continue a run with other settings. recorded: settings in its checkpoint; now: the requested settings.

    Raises TrainingError."""
    for name in (name for name in now if name in recorded):
        was, wanted = recorded[name], now[name]
        if isinstance(was, dict) and isinstance(wanted, dict):
            changed = [key for key in was.keys() | wanted.keys() if was.get(key) != wanted.get(key)]
            was, wanted = ({key: each.get(key) for key in changed} for each in (was, wanted))
        if was != wanted:
            raise TrainingError(
                f"{path} belongs to another run: {name} was {was!r}, now it is {wanted!r}",
                fix="resume with the same settings, or choose another --out",
            )


def write_json(path: Path, value: object) -> None:
    """Write `to_json(value)` to a file, completely or not at all. Raises TrainingError."""
    with replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(to_json(value), indent=1) + "\n")
