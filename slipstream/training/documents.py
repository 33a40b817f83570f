"""Reads training documents from the sources that `--data` accepts. All sources are checked before a run starts.

    text        any UTF-8 file (.txt, .md, .py, ...): one document
        folders     every text file in the folder and its subfolders, except hidden files
        JSON lines  one object per line (.jsonl), or one list of objects (.json); an object is one of
                        {"text": ...}
                        {"prompt": ..., "response" or "completion" or "answer": ...}
                        {"messages" or "conversations": [{"role" or "from": ..., "content" or "value": ...}, ...]}
        .bin        a stream of token ids, with its .starts.npy (`packing`)

An error for an unreadable source names the file and, if possible, the line. A file that is given by name must be
readable; from a folder, only files with a known extension are read.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.strict import parse_json
from slipstream.errors import DataError, did_you_mean

TEXT = frozenset({
    ".txt", ".md", ".rst", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".mjs",
    ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".kt", ".scala", ".cs", ".sh", ".bash", ".sql",
    ".html", ".css", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".tex", ".lua", ".pl", ".r", ".jl", ".hs",
    ".ml", ".ex", ".exs", ".clj", ".dart",
})  # fmt: skip
"""Extensions that are read from folders. A file that is named directly may have any extension."""

_ANSWERS = ("response", "completion", "answer", "output")
_TALKS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}

Turn = Mapping[str, str]


@dataclass(frozen=True)
class Document:
    """One text, or one conversation.

    key    a stable name; its hash decides the split of the document.
    text   plain text, or the prompt if there is an `answer`.
    turns  messages {"role", "content"} of a conversation; then `text` is empty.
    """

    key: str
    text: str = ""
    answer: str | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def place(self) -> float:
        return place_of_text(f"{self.key}\0{self.text[:4096]}\0{self.answer}")


def place_of_text(text: str) -> float:
    """Return a number in [0, 1) that is the same on every machine. It decides which documents are held out."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def check_documents(name: str) -> None:
    """Check a source without reading its contents. Raises DataError if it cannot be used."""
    path = Path(name)
    if not path.exists():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise DataError(
            f"training data {name!r} does not exist",
            why=near if near.startswith("did you mean") else "",
            fix="give a file or a folder; `python -m recipes.embedded.corpus FILE.jsonl` writes one from Python source",
        )
    if path.suffix == ".bin" and not path.with_suffix(".starts.npy").is_file():
        raise DataError(
            f"training data {name!r} has no {path.with_suffix('.starts.npy').name} next to it",
            why="a .bin file is a stream of token ids, and its .starts.npy says where documents begin",
            fix="give the text itself, or a stream that a training run wrote",
        )
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"training data {name!r} is empty", fix="give a file that holds text")
    if not any(files_of(path)):
        raise DataError(
            f"the folder {name!r} holds no text files",
            why=f"looked for .txt, .md, .py, .jsonl and {len(TEXT) - 3} other extensions",
            fix="name the files themselves if they have other extensions",
        )


def read_documents(name: str) -> Iterator[Document]:
    """Yield the documents of one source, in a fixed order. Raises DataError at the first file that is not text."""
    path = Path(name)
    for file in files_of(path):
        key = str(file.relative_to(path)) if path.is_dir() else file.name
        if file.suffix.lower() in (".jsonl", ".json"):
            yield from _read_records(file, key)
        else:
            text = _decode(file)
            if text.strip():
                yield Document(key, text)


def files_of(place: Path) -> Iterator[Path]:
    """Yield the files of a source: the file itself, or the files of a folder in a fixed order."""
    if not place.is_dir():
        yield place
        return
    for path in sorted(place.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(place).parts)
        if path.suffix.lower() in TEXT | {".jsonl"} and path.is_file() and not hidden and path.stat().st_size:
            yield path


def _decode(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as fault:
        raise DataError(f"{path} cannot be read ({fault.strerror})", fix="check its permissions") from fault
    if b"\0" in raw:
        raise DataError(
            f"{path} is not text: byte {raw.index(0)} is zero",
            why="supported are text files, folders of them, JSON lines and .bin streams",
            fix='convert it to JSON lines with one {"text": ...} per line',
        )
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as fault:
        raise DataError(
            f"{path} is not UTF-8 text: byte {fault.start} is {raw[fault.start]:#04x}",
            fix="convert it to UTF-8, or leave it out",
        ) from fault


def _read_records(path: Path, key: str) -> Iterator[Document]:
    text = _decode(path)
    if path.suffix.lower() == ".json":
        whole = _parse(text, path, 1, "correct the file")
        if not isinstance(whole, list):
            raise DataError(f"{path} holds one JSON {type(whole).__name__}, not a list of records", fix="see --help")
        for i, record in enumerate(whole, 1):
            yield _read_document(record, f"{path}, record {i}", f"{key}:{i}")
        return
    # Not splitlines(): a JSON string may contain U+2028 and similar characters, which end no line here.
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _read_document(_parse(line, path, i, "write one object per line"), f"{path}, line {i}", f"{key}:{i}")


def _parse(text: str, path: Path, first_line: int, fix: str) -> object:
    try:
        return parse_json(text)
    except json.JSONDecodeError as fault:
        raise DataError(f"{path}, line {first_line + fault.lineno - 1}: not JSON ({fault.msg})", fix=fix) from fault


def _read_document(record: object, where: str, key: str) -> Document:
    if not isinstance(record, dict):
        raise DataError(f"{where}: a {type(record).__name__}, not an object", fix='write {"text": ...}')
    talk = next((record[name] for name in _TALKS if name in record), None)
    if talk is not None:
        return Document(key, turns=_read_turns(talk, where))
    answer = next((record[name] for name in _ANSWERS if name in record), None)
    if "prompt" in record and answer is not None:
        return Document(
            key, _check_text(record["prompt"], f"{where}: prompt"), _check_text(answer, f"{where}: the answer")
        )
    if "text" in record:
        return Document(key, _check_text(record["text"], f"{where}: text"))
    raise DataError(
        f"{where}: no known field, only " + ", ".join(map(repr, sorted(record)[:8])),
        why='known fields are {"text"}, {"prompt", "response"} and {"messages"}',
        fix="rename the fields",
    )


def _read_turns(talk: object, where: str) -> tuple[Turn, ...]:
    if not isinstance(talk, list) or not talk:
        raise DataError(f"{where}: the conversation is {'empty' if talk == [] else type(talk).__name__}, not a list")
    turns = []
    for i, turn in enumerate(talk):
        said = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        if role not in _ROLES:
            raise DataError(f"{where}, turn {i + 1}: the role is {role!r}", fix="use " + ", ".join(sorted(_ROLES)))
        turns.append({"role": _ROLES[role], "content": _check_text(said, f"{where}, turn {i + 1}: content")})
    return tuple(turns)


def _check_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} is {type(value).__name__}, not a string", fix="write text there")
    return value
