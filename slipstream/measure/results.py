"""Writes and reads result files: measurements, which are dataclasses, as JSON.

    {"format": "slipstream-lab", "format_version": 2, "kind": "bench", "complete": true,
     "settings": {...}, "provenance": {...}, "warnings": [...], "data": {...}}

kind        the command that wrote the file: "bench", "tune", "trace", ...; determines the class of `data`.
complete    false if the run was interrupted or failed; `data` then holds the measurements so far.
settings    the settings of the command.
provenance  the conditions of the measurement (see `slipstream.measure.provenance`).
warnings    reasons to trust the numbers less.

A file of another version is refused. Fields that have a default were added later and may be missing in a file.
"""

import json
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from slipstream.core.strict import JsonObject, parse_json
from slipstream.errors import ResultError

FORMAT, FORMAT_VERSION = "slipstream-lab", 2
MEASURED = ("arms", "drafters", "tokens", "control", "greedy")
"""Parts of `data` that hold measurements; each kind of result has some of them."""
INTERRUPTED = "the run was interrupted: these are the measurements up to that point"

T = TypeVar("T")


def to_json(value: object) -> Any:
    """Turn dataclasses, mappings and sequences into JSON values. NaN and infinity, which JSON does not have, become
    null; keys become strings."""
    if is_dataclass(value):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def from_json(kind: Any, value: object) -> Any:
    """Make a value of type `kind` from the output of `to_json`. Values without dataclasses are returned
    unchanged. Raises KeyError for a missing field, TypeError if a dataclass is not given as an object."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [each for each in get_args(kind) if each is not type(None)]
        return value if value is None or len(inner) > 1 else from_json(inner[0], value)
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind.__name__} must be a JSON object, but is {value!r:.80}")
        known, hints = [each for each in fields(kind) if each.init], get_type_hints(kind)
        given = [each for each in known if each.name in value or each.default is each.default_factory is MISSING]
        return kind(**{each.name: from_json(hints[each.name], value[each.name]) for each in given})
    arguments = get_args(kind)
    if get_origin(kind) in (list, tuple, Seq) and isinstance(value, list):
        made = [from_json(arguments[0], one) for one in value]
        return tuple(made) if get_origin(kind) is tuple else made
    if get_origin(kind) in (dict, Mapping) and isinstance(value, Mapping):
        return {key: from_json(arguments[1], one) for key, one in value.items()}
    return value


@dataclass
class Result:
    """A result file (see the module docstring). data: a dataclass of measurements, or JSON values after reading."""

    kind: str
    settings: JsonObject
    provenance: JsonObject
    data: Any = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    complete: bool = False

    def as_dict(self) -> JsonObject:
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "kind": self.kind, "complete": self.complete}
        return head | to_json(self)

    def read_data(self, kind: type[T]) -> T:
        """Return the data as this class, also if the result was read from a file. Raises as `from_json`."""
        made: T = self.data if isinstance(self.data, kind) else from_json(kind, to_json(self.data))
        return made


def write(result: Result, path: str | Path) -> None:
    """Write the result atomically: to a temporary file, which is then renamed. Raises ResultError."""
    write_text(Path(path), json.dumps(result.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str | bytes, option: str = "--out") -> None:
    """Replace the file atomically: no reader sees a partial file. Raises ResultError, whose message names `option`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(temporary, path)
    except OSError as fault:
        with suppress(OSError):
            temporary.unlink()
        raise ResultError(
            f"{path} cannot be written: {fault.strerror}", fix=f"give another file with {option}"
        ) from fault


def check_writable(path: str | Path, option: str = "--out") -> None:
    """Raise ResultError, which names `option`, if `path` cannot be written. Call this before a long measurement."""
    path = Path(path)
    if path.is_dir():
        raise ResultError(f"{path} is a folder, but must be a file", fix=f"give a file name: {path / 'result.json'}")
    if not path.parent.is_dir():
        fix = f"create it with mkdir -p {path.parent}, or give another {option}"
        raise ResultError(f"the folder {path.parent} does not exist", fix=fix)
    for place, what in ((path, f"{path} exists and cannot"), (path.parent, f"the folder {path.parent} cannot")):
        if place.exists() and not os.access(place, os.W_OK):
            why, fix = "the results of the run could not be saved", f"give another {option}"
            raise ResultError(f"{what} be written to", why=why, fix=fix)


def read(path: str | Path) -> Result:
    """Read a result file. Raises ResultError if the file is not a result of this version."""
    return _check(str(path), _load(path))


def read_all(path: str | Path) -> list[Result]:
    """Read all results of a file: one, or several under "runs" (as benchmarks write them). Raises ResultError."""
    content = _load(path)
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, dict) or not runs:
        return [_check(str(path), content)]
    return [_check(f"{path}, run {name!r},", run) for name, run in runs.items()]


def _load(path: str | Path) -> object:
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise ResultError(f"{path} cannot be read: {fault.strerror}", fix="check the file name") from fault
    except (UnicodeDecodeError, json.JSONDecodeError) as fault:
        raise ResultError(f"{path} is not JSON: {fault}", fix="give a file that a slipstream command wrote") from fault


def _check(path: str, content: object) -> Result:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultError(
            f"{path} is not a result file",
            fix="give a file that bench, tune, trace or verify wrote with --out",
        )
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ResultError(
            f"{path} has the format version {version}, but this version of Slipstream reads only {FORMAT_VERSION}",
            why="the meaning of the fields differs between versions",
            fix="measure again with this version, or read it with the version of Slipstream that wrote it",
        )
    names = [each.name for each in fields(Result)]
    missing = [name for name in names if name not in content]
    if missing:
        raise ResultError(f"{path} lacks the fields {', '.join(missing)}", why="it is damaged", fix="measure again")
    return Result(**{name: content[name] for name in names})


@contextmanager
def record(result: Result, path: str | Path | None, collect: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Save the measurements that the `with` block makes, also if the block is interrupted. Yields `save`, which writes
    the measurements so far.

    path     None writes no file, but `result.data` is still set.
    collect  returns the measurements so far, as `data` of the result; must also work after an interruption.

    After an exception (Ctrl-C included), the file has `complete` false, and the exception is raised again. If something
    was measured, the exception's attribute `result` is the unfinished result, so that a caller can show it.
    """
    if path is not None:
        check_writable(path)

    def save() -> None:
        result.data = collect()
        if path is not None:
            write(result, path)

    try:
        yield save
    except BaseException as fault:
        result.complete = False
        save()
        if any(to_json(result.data).get(name) for name in MEASURED):
            fault.result = result  # type: ignore[attr-defined]
        raise
    result.complete = True
    save()
