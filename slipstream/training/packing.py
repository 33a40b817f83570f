"""The token cache on disk and the batches cut from it.

Every kind of document ("raw" files, "write" and "edit" pairs) of every split is one memory-mapped stream of
ids with the starts of its documents beside it, and, where documents have answers, a mask of them. A batch is a
pure function of (seed, step, counters), so a resumed run sees exactly what the uninterrupted one would have seen.

    NAME.bin         ids, uint16, or uint32 where the vocabulary has more than 65536 of them
    NAME.starts.npy  int64 [documents + 1]: where each begins; the last entry is the number of ids
    NAME.mask.bin    uint8 [N], 1 where the id belongs to an answer; absent where documents have none
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from slipstream.errors import ParameterError
from slipstream.zoo.corpus import SourceFile
from slipstream.zoo.pairs import Pair, make_pairs
from slipstream.zoo.tokenizer import ASSISTANT, END, EOS, USER, special_id, train_tokenizer

KINDS = ("raw", "write", "edit")
SPLITS = ("train", "heldout")


def pair_ids(tokenizer: Tokenizer, pairs: list[Pair]) -> Iterator[list[int]]:
    """Token ids of exchanges, as the chat template would give them. Special tokens in the text stay text."""
    tokenizer.encode_special_tokens = True
    user, assistant, end = (special_id(tokenizer, t) for t in (USER, ASSISTANT, END))
    line = tokenizer.encode("\n").ids
    asked = tokenizer.encode_batch(["\n" + p.user for p in pairs])
    answered = tokenizer.encode_batch(["\n" + p.assistant for p in pairs])
    for a, b in zip(asked, answered, strict=True):
        yield [user, *a.ids, end, *line, assistant, *b.ids, end, *line]


def write_stream(path: Path, documents: Iterable[list[int]], eos: int | None, vocab_size: int = 2**16) -> int:
    """Write one stream, each document closed by `eos`, if there is one; returns its number of tokens."""
    return write_masked(path, ((ids, None) for ids in documents), eos, vocab_size)


def write_masked(
    path: Path, documents: Iterable[tuple[list[int], list[bool] | None]], eos: int | None, vocab_size: int = 2**16
) -> int:
    """`write_stream` of documents with the masks of their answers (None: nothing is one); the closing `eos` belongs
    to an answer that reaches the end."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    end = [] if eos is None else [eos]
    starts, total, masked = [0], 0, False
    marks = path.with_suffix(".mask.bin")
    with path.with_suffix(".tmp").open("wb") as out, marks.with_suffix(".tmp").open("wb") as inside:
        for ids, mask in documents:
            out.write(np.asarray([*ids, *end], dtype=dtype).tobytes())
            masked = masked or mask is not None
            closed = [False] * len(ids) if mask is None else mask
            inside.write(bytes([*closed, *(closed[-1:] if end else [])]).ljust(len(ids) + len(end), b"\0"))
            total += len(ids) + len(end)
            starts.append(total)
    np.save(path.with_suffix(".starts.npy"), np.asarray(starts, dtype=np.int64))
    if masked:
        os.replace(marks.with_suffix(".tmp"), marks)
    else:
        os.remove(marks.with_suffix(".tmp"))
        marks.unlink(missing_ok=True)
    os.replace(path.with_suffix(".tmp"), path)
    return total


def prepare(folder: Path, corpus: list[SourceFile], licences: dict[str, str], vocab_size: int) -> dict[str, Any]:
    """Train the tokenizer and write the cache. Returns what the model card needs to know about the data."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [f for f in corpus if f.split == "train"]
    # Every fifth file is plenty for 4096 merges, and keeps this within seconds.
    sample = train[::5] if len(train) > 500 else train
    tokenizer = train_tokenizer((f.text for f in sample), vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    eos = special_id(tokenizer, EOS)
    tokens: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        files = [f for f in corpus if f.split == split]
        pairs = [p for f in files for p in make_pairs(f)]
        # Neighbours in the stream end up in one window: mix the packages, or a window is all of one kind.
        order = np.random.default_rng(0).permutation(len(pairs))
        pairs = [pairs[i] for i in order]
        raw = (
            e.ids for i in range(0, len(files), 64) for e in tokenizer.encode_batch([f.text for f in files[i : i + 64]])
        )
        writes, edits = [p for p in pairs if p.kind == "write"], [p for p in pairs if p.kind != "write"]
        tokens[split] = {
            "raw": write_stream(folder / f"{split}-raw.bin", raw, eos),
            "write": write_stream(folder / f"{split}-write.bin", pair_ids(tokenizer, writes), eos),
            "edit": write_stream(folder / f"{split}-edit.bin", pair_ids(tokenizer, edits), eos),
        }
    origins: dict[str, dict[str, Any]] = {}
    for f in corpus:
        origin = origins.setdefault(
            f.package, {"version": f.version, "licence": licences.get(f.package, "?"), "files": 0, "characters": 0}
        )
        origin["files"] += 1
        origin["characters"] += len(f.text)
    about = {
        "files": {s: sum(f.split == s for f in corpus) for s in SPLITS},
        "tokens": tokens,
        "heldout_files": [f"{f.package}/{f.path}" for f in corpus if f.split == "heldout"],
        "packages": origins,
    }
    (folder / "data.json.tmp").write_text(json.dumps(about, indent=1) + "\n")
    os.replace(folder / "data.json.tmp", folder / "data.json")
    return about


@dataclass
class Stream:
    """One kind of documents of one split."""

    tokens: np.ndarray[Any, np.dtype[Any]]  # [N], unsigned
    starts: np.ndarray[Any, np.dtype[np.int64]]  # [documents + 1]
    whole: bool  # windows begin at a document's start (pairs) or anywhere on a grid (files)
    mask: np.ndarray[Any, np.dtype[np.uint8]] | None = None  # [N], 1 inside answers
    _windows: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, whole: bool) -> Stream:
        starts = np.load(path.with_suffix(".starts.npy"))
        size, count = path.stat().st_size, int(starts[-1])
        if size < 2 * count:  # it may have more: a stream that is still being written
            raise ParameterError(
                f"{path} has {size} bytes, {path.with_suffix('.starts.npy').name} tells of {count} ids of 2 or 4 bytes",
                why="they are not of one writing",
                fix="write the stream again",
            )
        wide = size == 4 * count
        tokens = np.memmap(path, np.uint32 if wide else np.uint16, "r")[:count] if size else np.zeros(0, np.uint16)
        marks = path.with_suffix(".mask.bin")
        mask = np.memmap(marks, np.uint8, "r") if size and marks.is_file() else None
        return cls(tokens, starts, whole, mask)

    def documents(self) -> Iterator[tuple[list[int], list[bool] | None]]:
        """Ids and mask of each document, as `write_masked` takes them."""
        for a, b in pairwise(self.starts.tolist()):
            yield self.tokens[a:b].tolist(), None if self.mask is None else self.mask[a:b].astype(bool).tolist()

    def windows(self, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Starts of the windows of `length + 1` tokens; pairs that a window cuts begin the next window again."""
        if length not in self._windows:
            last = len(self.tokens) - length - 1
            if self.whole:
                found, at = [], 0
                while at <= last:
                    found.append(at)
                    following = int(self.starts[np.searchsorted(self.starts, at + length, "right") - 1])
                    at = following if following > at else int(self.starts[np.searchsorted(self.starts, at, "right")])
                self._windows[length] = np.asarray(found, dtype=np.int64)
            else:
                self._windows[length] = np.arange(0, last + 1, length, dtype=np.int64)
            if not len(self._windows[length]):
                raise ParameterError(
                    f"A stream of {len(self.tokens)} tokens is too short for a window of {length + 1}",
                    fix="use a shorter sequence length or a larger corpus",
                )
        return self._windows[length]

    def rows(self, indices: Iterable[int], length: int) -> Tensor:
        """Windows by index, `[rows, length + 1]` int64."""
        starts = self.windows(length)
        return torch.from_numpy(
            np.stack([self.tokens[starts[i] : starts[i] + length + 1] for i in indices]).astype(np.int64)
        )

    def masks(self, indices: Iterable[int], length: int) -> Tensor:
        """Which tokens of the windows belong to answers, bool `[rows, length + 1]`; all, if the stream knows none."""
        starts = self.windows(length)
        if self.mask is None:
            return torch.ones(len(list(indices)), length + 1, dtype=torch.bool)
        return torch.from_numpy(
            np.stack([self.mask[starts[i] : starts[i] + length + 1] for i in indices]).astype(np.bool_)
        )


@dataclass(frozen=True)
class Mix:
    """Shares of the rows of a batch by kind."""

    raw: float = 0.78
    write: float = 0.08
    edit: float = 0.14


class Orders:
    """Which window of which stream comes next; `counters` (windows drawn so far by stream and length) is the whole
    state. Every epoch of a stream is its own permutation of all its windows."""

    def __init__(self, streams: dict[str, Stream], shares: dict[str, float], seed: int) -> None:
        self.streams, self.seed = streams, seed
        self.shares = np.array([shares[name] for name in streams], dtype=np.float64)
        self.shares /= self.shares.sum()
        self.counters: dict[str, int] = {}
        self._orders: dict[tuple[str, int, int], np.ndarray[Any, np.dtype[np.int64]]] = {}

    def _next(self, name: str, length: int) -> int:
        key = f"{name}-{length}"
        drawn = self.counters.get(key, 0)
        self.counters[key] = drawn + 1
        count = len(self.streams[name].windows(length))
        epoch, place = divmod(drawn, count)
        cache = (name, length, epoch)
        if cache not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[:2] != (name, length)}
            seed = [self.seed, list(self.streams).index(name), length, epoch]
            self._orders[cache] = np.random.default_rng(seed).permutation(count)
        return int(self._orders[cache][place])

    def choose(self, step: int, rows: int, length: int) -> list[tuple[str, int]]:
        """(stream, window) of each row of a step."""
        names = list(self.streams)
        rng = np.random.default_rng([self.seed, 7, step])
        return [
            (name, self._next(name, length))
            for name in (names[i] for i in rng.choice(len(names), size=rows, p=self.shares))
        ]


class Batches(Orders):
    """Packed training batches of the recipe's three kinds."""

    def __init__(self, folder: Path, mix: Mix, seed: int) -> None:
        super().__init__(
            {k: Stream.open(folder / f"train-{k}.bin", whole=k != "raw") for k in KINDS}, asdict(mix), seed
        )

    def draw(self, step: int, rows: int, length: int) -> Tensor:
        """The batch of a step, `[rows, length + 1]`: inputs and, shifted by one, labels."""
        return torch.cat([self.streams[k].rows([i], length) for k, i in self.choose(step, rows, length)])


def answer_mask(tokens: Tensor, assistant: int, end: int) -> Tensor:
    """Positions inside an assistant's answer, its closing token included; tokens `[B, T]` -> bool `[B, T]`."""
    inside = torch.zeros_like(tokens, dtype=torch.bool)
    state = torch.zeros(tokens.shape[0], dtype=torch.bool)
    for t in range(tokens.shape[1]):
        inside[:, t] = state & (tokens[:, t] != assistant)
        state = (state | (tokens[:, t] == assistant)) & (tokens[:, t] != end)
    return inside


@dataclass
class HeldOut:
    """Fixed held-out batches: files, and edit pairs with the mask of the answers."""

    raw: Tensor  # [R, T+1]
    edit: Tensor  # [R, T+1]
    edit_mask: Tensor  # [R, T], true where the label belongs to an answer

    @classmethod
    def open(cls, folder: Path, rows: int, length: int, assistant: int, end: int) -> HeldOut:
        def pick(kind: str) -> Tensor:
            stream = Stream.open(folder / f"heldout-{kind}.bin", whole=kind != "raw")
            count = len(stream.windows(length))
            return stream.rows(np.random.default_rng(1).permutation(count)[:rows], length)

        edit = pick("edit")
        return cls(pick("raw"), edit, answer_mask(edit, assistant, end)[:, 1:])
