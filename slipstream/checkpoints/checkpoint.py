"""`Checkpoint`: the files of a model or a draft head, opened once. Each file is read at its first use, and its content
stays in memory.

Checkpoints are not trusted: weights are read only from safetensors (a pickle can run code), and a name inside the
checkpoint cannot refer to a file outside its folder. Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.checkpoints.gguf_keys import MAGIC
from slipstream.checkpoints.tensor_file import StoredTensor, TensorFile
from slipstream.core.strict import JsonMapping, JsonObject, parse_json
from slipstream.errors import CheckpointError, ConfigError, reading
from slipstream.zoo import NAMES, checkpoint_of

if TYPE_CHECKING:
    from slipstream.checkpoints.gguf_header import GgufHeader

T = TypeVar("T")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["original/*", "onnx/*", "openvino/*", "consolidated*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"


class Checkpoint:
    """A checkpoint in a folder, in a repository of the Hugging Face hub, or in a GGUF file.

    source    the folder, the GGUF file or the hub id, which `str(checkpoint)` shows.
    is_gguf   True for a GGUF file.
    is_local  False for a hub id.
    """

    def __init__(self, source: str | Path, local: Path | None, is_gguf: bool = False):
        self.source, self.is_gguf, self.is_local = source, is_gguf, local is not None
        self._place, self._is_complete = local, self.is_local
        self._json: dict[str, JsonObject] = {}
        self._kept: dict[Any, Any] = {}

    @staticmethod
    def open(name: CheckpointName, role: str = "target") -> Checkpoint:
        """Open a checkpoint by its name: a folder, a GGUF file, a hub id or the name of a model of the zoo. An open
        checkpoint is returned unchanged. Nothing is downloaded yet.

        role  says which model "embedded" means (see `zoo.checkpoint_of`).

        Raises CheckpointError for any other name, and the errors of `zoo.checkpoint_of`."""
        if isinstance(name, Checkpoint):
            return name
        source = checkpoint_of(name, role)
        path = Path(source).expanduser()
        if path.is_dir():
            return Checkpoint(source, path)
        if _is_gguf(path):
            return Checkpoint(source, path, is_gguf=True)
        if path.is_file() or not _HUB_ID.fullmatch(str(source)):
            raise CheckpointError(
                f"{str(source)!r} is not a folder" + (" but a file" if path.is_file() else " and not a hub id"),
                why="a checkpoint is a GGUF file, or a folder with config.json and safetensors files",
                fix="give the folder, or a hub id such as 'org/model'",
            )
        return Checkpoint(source, None)

    def __str__(self) -> str:
        return str(self.source)

    def __reduce__(self) -> Any:
        """Make copies and pickles open the checkpoint again."""
        return Checkpoint.open, (self.source,)

    @property
    def place(self) -> Path:
        """The path of the GGUF file, or of the folder, which has at least the small files. Downloads the small files of
        a hub id. Raises LoadError if the hub cannot be reached and its files are not cached."""
        if self._place is None:
            self._place = _snapshot(str(self), _WANTED[1:], None)
        return self._place

    def download(self) -> Path:
        """Download the weights of a hub id, and return `place`. Raises the errors of `place`."""
        if not self._is_complete:
            revision = None if self._place is None else self._place.name  # the revision whose small files were read
            self._place, self._is_complete = _snapshot(str(self), _WANTED, revision), True
        return self.place

    @cached_property
    def header(self) -> GgufHeader:
        """The header of a GGUF file. Raises the errors of `read_header`."""
        from slipstream.checkpoints.gguf_header import read_header  # imports NumPy, for which `--help` must not wait

        return read_header(self.place)

    def json(self, name: str) -> JsonMapping:
        """Return the JSON object in a file of the folder; an empty one if the file is missing. Raises ConfigError."""
        if name not in self._json:
            self._json[name] = read_json(self.place / name, missing_ok=True)
        return self._json[name]

    @cached_property
    def config(self) -> JsonMapping:
        """The config.json of a folder. Raises ConfigError if the file is missing or has sizes that no model has:
        readers make lists of this length before they compare the configuration with weights."""
        config = self.json(CONFIG) or read_json(self.place / CONFIG)  # raises if the file is missing
        for inner in (config, *(value for value in config.values() if isinstance(value, dict))):
            for key, value in inner.items():
                layers = "layer" in key and "vocab" not in key
                most = 10_000 if layers else 100_000 if "expert" in key or "num_labels" in key else math.inf
                if isinstance(value, int) and value > most:
                    raise ConfigError(f"{key} is {value}, but at most {most} is allowed", fix="correct config.json")
        return config

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of all weight files of a folder, by name. Their values are not read.

        Raises CheckpointError if there are no weights or only pickles, if a shard is missing or outside the folder, if
        a shard lacks tensors that the index lists, or if a file is damaged."""
        shards = self._shards()
        listed = {name for names in shards.values() for name in names or ()}
        found: dict[str, StoredTensor] = {}
        for file, promised in shards.items():
            stored = TensorFile(self.place / file).tensors
            if lost := sorted(set(promised or ()) - stored.keys()):
                raise CheckpointError(
                    f"{self.place / file} lacks {len(lost)} tensors that {INDEX} lists for this file: {few(lost)}",
                    fix="download the file and the index again",
                )
            elsewhere = listed.difference(promised or ())  # tensors that the index does not list are read, too
            found |= {name: tensor for name, tensor in stored.items() if name not in elsewhere}
        return found

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of the tensors of a folder, even if shards are missing. Raises CheckpointError."""
        if not (self.place / SINGLE).exists() and isinstance(listed := self.json(INDEX).get("weight_map"), dict):
            return listed.keys()
        return self.tensors.keys()

    def unmap(self) -> None:
        """Unmap the weight files, because mapped pages count as memory. The next access maps them again."""
        for file in {tensor.file for tensor in (self.header.tensors if self.is_gguf else self.tensors.values())}:
            file.unmap()

    @property
    def stored(self) -> Mapping[str, int]:
        """Bytes of the weights by dtype; dtypes have the names of safetensors or GGUF. Raises CheckpointError if files
        are missing or damaged."""
        if self.is_gguf:
            return self.header.stored
        total = Counter[str]()
        for tensor in self.tensors.values():
            total[tensor.dtype] += tensor.nbytes
        return dict(total)

    def _shards(self) -> dict[str, list[str] | None]:
        """Return for each weight file the tensor names that the index lists for it, or None if there is no index."""
        folder = self.place
        if (folder / SINGLE).exists():
            return {_inside(folder, SINGLE): None}
        if (folder / INDEX).exists():
            return self._in_index()
        names = sorted(p.name for p in folder.iterdir() if p.is_file())
        tensors = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
        if len(tensors) == 1:
            return {_inside(folder, tensors[0]): None}
        if len(tensors) > 1:
            raise CheckpointError(
                f"the folder {folder} has {len(tensors)} safetensors files ({tensors[0]}, ...) but no {INDEX}",
                why="without the index, it is unknown which of the files belong to the model",
                fix=f"add {INDEX}, or leave only one safetensors file in the folder",
            )
        pickles = [n for n in names if n.endswith(_PICKLES)]
        if pickles:
            raise CheckpointError(
                f"the folder {folder} has its weights only as a pickle ({pickles[0]}), which Slipstream does not load",
                why="loading a pickle can run any code",
                fix="if you trust the file, load it with transformers and call save_pretrained(folder), which writes "
                "safetensors",
            )
        why = "without these files there are no weights to load"
        raise CheckpointError(
            f"the folder {folder} contains neither {SINGLE} nor {INDEX}",
            why=why,
            fix="download the weights into this folder, or give another folder",
        )

    def _in_index(self) -> dict[str, list[str] | None]:
        folder, table = self.place, self.json(INDEX).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise CheckpointError(
                f"weight_map in {folder / INDEX} is missing, or does not map names of tensors to names of files",
                fix="download or export it again",
            )
        shards: dict[str, list[str]] = {}
        for tensor, shard in table.items():
            shards.setdefault(shard, []).append(tensor)
        missing = [shard for shard in shards if not (folder / _inside(folder, shard)).exists()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(sorted(missing)[:4])}",
                why=f"{INDEX} lists these files",
                fix="download the missing files",
            )
        return dict(shards)


CheckpointName = str | Path | Checkpoint
"""The argument of `Checkpoint.open`."""


def read_once(read: Callable[[Checkpoint], T]) -> Callable[[CheckpointName], T]:
    """Decorate a function of a checkpoint, so that the checkpoint caches the function's result. The function then also
    accepts the name of a checkpoint, and opens it."""

    @wraps(read)
    def read_once(checkpoint: CheckpointName) -> T:
        results = (opened := Checkpoint.open(checkpoint))._kept
        if read not in results:
            results[read] = read(opened)
        return results[read]  # type: ignore[no-any-return]

    return read_once


def read_json(path: Path, missing_ok: bool = False) -> JsonObject:
    """Return the JSON object in `path`; an empty object if the file is missing and `missing_ok` is true. Raises
    ConfigError if the file is missing and `missing_ok` is false, if it is unreadable, or if it is not an object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if missing_ok:
            return {}
        raise ConfigError(f"{path} does not exist", fix="download the file, or give another folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}",
            why="only this file describes the model",
            fix="download or export it again",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is a JSON {type(value).__name__}, but must be an object", fix="export it again")
    return value


def few(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _is_gguf(path: Path) -> bool:
    """Return True for the path of a GGUF file, by its ending or by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _snapshot(name: str, patterns: list[str], revision: str | None) -> Path:
    """Download files of a hub id into the usual cache."""
    from huggingface_hub import snapshot_download

    fix = "check the spelling and the network, log in if the model is gated, or give a local folder"
    if near := difflib.get_close_matches(name, NAMES, 1):
        fix = f"write {near[0]!r} if you mean that model; otherwise {fix}"
    with reading(f"there is no folder {name!r}, and the hub did not provide {name!r}", fix):
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED)
        return Path(folder)


def _inside(folder: Path, name: str) -> str:
    """Return `name` after checking that it is a safetensors file in the folder itself, and no link to another place.
    Links from the hub's cache to its `blobs` folder are allowed."""
    root, plain = folder.resolve(), not any(part in name for part in "/\\\0") and name.endswith(".safetensors")
    real = (folder / name).resolve() if plain else None
    if real is None or not (real.is_relative_to(root) or real.is_relative_to(root.parent.parent / "blobs")):
        raise CheckpointError(
            f"{str(folder / name)!r} is not a safetensors file of this checkpoint, or links to a file outside",
            why="a checkpoint must not make Slipstream open other files",
            fix="use a checkpoint that you trust, with its files in its folder",
        )
    return name
