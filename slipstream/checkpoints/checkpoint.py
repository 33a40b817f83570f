"""Finds a checkpoint's files: local folders, hub ids and GGUF files, JSON, single or sharded safetensors.

Checkpoints are not trusted: weights are read only from safetensors (a pickle can run code), and a name inside the
checkpoint cannot refer to a file outside its folder.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from slipstream.core.strict import parse_json
from slipstream.errors import CheckpointError, ConfigError, reading

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["original/*", "onnx/*", "openvino/*", "consolidated*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF_MAGIC = b"GGUF"
"""First bytes of a GGUF file."""


def resolve(checkpoint: str | Path, weights: bool = True) -> Path:
    """Where a checkpoint is: `checkpoint` itself if it is a folder or a GGUF file, else the hub repository of that id,
    downloaded into the usual cache (safetensors and text files only; `weights=False`: text files only). What is not a
    folder then is a GGUF file.

    Raises CheckpointError if it is none of these, LoadError if the hub cannot be reached and nothing is cached.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    name = str(checkpoint)
    if path.is_file() or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is not a folder" + (" but a file" if path.is_file() else " and not a hub id"),
            why="a checkpoint is a GGUF file, or a folder that holds config.json and safetensors",
            fix="give the folder, or a hub id such as 'org/model'",
        )
    from huggingface_hub import snapshot_download

    fix = "check the spelling and the network, log in if the model is gated, or give a local folder"
    with reading(f"there is no folder {name!r}, and the hub did not provide {name!r}", fix):
        patterns = _WANTED if weights else _WANTED[1:]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_UNWANTED))


def is_gguf(checkpoint: str | Path) -> bool:
    """Whether a name means a GGUF file: by its ending, or by the first bytes of the file."""
    path = Path(checkpoint).expanduser()
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; an empty one if the file is missing and may be. Raises ConfigError if it is missing,
    unreadable or not an object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if missing_ok:
            return {}
        raise ConfigError(f"{path} does not exist", fix="complete the checkpoint's folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}",
            why="the model is configured by this file alone",
            fix="download or export it again",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected an object", fix="export it again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises ConfigError as `read_json`, and for sizes that no model has: readers make
    lists with an entry for each layer, expert or label before anything is compared with the weights."""
    config = read_json(folder / "config.json")
    for inner in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in inner.items():
            most = 10_000 if "layer" in key else 100_000 if "expert" in key or "num_labels" in key else math.inf
            if isinstance(value, int) and value > most:
                raise ConfigError(f"{key} is {value}, at most {most} is possible", fix="correct config.json")
    return config


def open_tensors(path: Path, framework: str = "pt") -> Any:
    """A handle of a safetensors file. framework: "np" reserves no memory for the file, which may be larger than memory.
    Raises CheckpointError for one that cannot be read."""
    what = f"{path} is not a readable safetensors file but truncated or corrupt"
    with reading(what, "download or export this file again", CheckpointError):
        return safe_open(str(path), framework=framework)


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors of a checkpoint; does not read their values. Raises CheckpointError."""
    return [name for file in weight_files(folder) for name in open_tensors(folder / file, "np").keys()]  # noqa: SIM118


def tensor_shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype, as safetensors names it: "F16") of all tensors, as `tensor_names`."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in weight_files(folder):
        handle = open_tensors(folder / file, "np")
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - a handle is not a mapping
        shapes |= {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    return shapes


def few(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Weight files of a checkpoint: file name -> the tensor names that the index lists for it, or None without an
    index (the file's own header then lists them).

    Raises CheckpointError: no weights, only pickles, a missing shard, or a shard name outside the folder.
    """
    if (folder / SINGLE).exists():
        return {_inside(folder, SINGLE): None}
    if (folder / INDEX).exists():
        return _sharded(folder)
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    tensors = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
    if len(tensors) == 1:
        return {_inside(folder, tensors[0]): None}
    if len(tensors) > 1:
        raise CheckpointError(
            f"{folder} holds {len(tensors)} safetensors files ({tensors[0]}, ...) but no {INDEX}",
            why="it is unknown which of them make up the model",
            fix=f"add {INDEX}, or keep one file only",
        )
    pickles = [n for n in names if n.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as a pickle only ({pickles[0]})",
            why="loading a pickle can run any code",
            fix="convert it once, where you trust it: load it with transformers and call "
            "save_pretrained(folder), which writes safetensors",
        )
    why = "there are no weights to load"
    raise CheckpointError(f"{folder} holds no {SINGLE} and no {INDEX}", why=why, fix="download the weights")


def _sharded(folder: Path) -> dict[str, list[str] | None]:
    table = read_json(folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
        raise CheckpointError(f"{folder / INDEX} has no usable weight_map", fix="download or export it again")
    shards: dict[str, list[str]] = {}
    for tensor, shard in table.items():
        shards.setdefault(shard, []).append(tensor)
    missing = [shard for shard in shards if not (folder / _inside(folder, shard)).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(sorted(missing)[:4])}",
            why=f"{INDEX} names them",
            fix="download the missing files",
        )
    return dict(shards)


def _inside(folder: Path, name: str) -> str:
    """`name`, after a check that it is a safetensors file in the folder itself, and no link to one elsewhere. Links of
    the hub's cache to its `blobs` folder are allowed."""
    root, plain = folder.resolve(), not any(part in name for part in "/\\\0") and name.endswith(".safetensors")
    real = (folder / name).resolve() if plain else None
    if real is None or not (real.is_relative_to(root) or real.is_relative_to(root.parent.parent / "blobs")):
        raise CheckpointError(
            f"{str(folder / name)!r} is not a safetensors file of this checkpoint, or is a link out of it",
            why="a checkpoint must not make Slipstream open other files",
            fix="use a checkpoint that you trust, with its files in its folder",
        )
    return name
