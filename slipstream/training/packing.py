"""Token streams on disk and the windows cut from them.

A stream is a memory-mapped file of token ids. A second file has the starts of its documents. If documents have answers,
a third file has a mask of the answers. A batch is a pure function of (seed, step, counters), so a resumed run gets
exactly the batches of an uninterrupted run.

    NAME.bin         ids, uint16, or uint32 if the vocabulary has more than 65536 ids
    NAME.starts.npy  int64 [documents + 1]: start of each document; the last entry is the number of ids
    NAME.mask.bin    uint8 [N], 1 if the id belongs to an answer; absent if no document has answers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import ParameterError
from slipstream.training.resume_state import replace_atomically

Marked = tuple[list[int], list[bool] | None]
"""Ids of a document, and for each id whether it belongs to an answer (None: the document has no answers)."""


def write_stream(path: Path, documents: Iterable[list[int]], eos: int | None) -> int:
    """Write one stream. Each document is followed by `eos` if it is not None. Returns the number of tokens."""
    return write_masked(path, ((ids, None) for ids in documents), eos)


def write_masked(path: Path, documents: Iterable[Marked], eos: int | None, vocab_size: int = 2**16) -> int:
    """Write a stream as `write_stream` does, from documents with answer masks.

    The `eos` after a document belongs to the answer if the document ends with an answer."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    end = [] if eos is None else [eos]
    starts, marks, masked = [0], list[bytes](), False
    with replace_atomically(path, "the token stream ") as temporary:
        with temporary.open("wb") as out:
            for ids, mask in documents:
                out.write(np.asarray([*ids, *end], dtype=dtype).tobytes())
                starts.append(starts[-1] + len(ids) + len(end))
                closed = [] if mask is None else [*mask, *(mask[-1:] if end else [])]
                marks.append(bytes(closed).ljust(starts[-1] - starts[-2], b"\0"))
                masked = masked or mask is not None
        np.save(path.with_suffix(".starts.npy"), np.asarray(starts, dtype=np.int64))
        marks_file = path.with_suffix(".mask.bin")
        if masked:
            marks_file.write_bytes(b"".join(marks))
        else:
            marks_file.unlink(missing_ok=True)
    return starts[-1]


@dataclass
class TokenStream:
    """The documents of one source or kind, in one split."""

    tokens: NDArray[np.unsignedinteger]  # [N], unsigned
    starts: NDArray[np.int64]  # [documents + 1]
    whole: bool  # windows begin at document starts (short documents), otherwise on a grid (long documents)
    mask: NDArray[np.uint8] | None = None  # [N], 1 inside answers
    _windows: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, whole: bool) -> TokenStream:
        starts = np.load(path.with_suffix(".starts.npy"))
        size, count = path.stat().st_size, int(starts[-1])
        if size < 2 * count:  # more bytes are allowed: the stream is still being written
            raise ParameterError(
                f"{path} has {size} bytes, but {path.with_suffix('.starts.npy').name} has {count} ids of 2 or 4 bytes",
                why="the two files do not belong together",
                fix="write both files again",
            )
        wide = size == 4 * count
        tokens = np.memmap(path, np.uint32 if wide else np.uint16, "r")[:count] if size else np.zeros(0, np.uint16)
        marks = path.with_suffix(".mask.bin")
        mask = np.memmap(marks, np.uint8, "r") if size and marks.is_file() else None
        return cls(tokens, starts, whole, mask)

    def documents(self) -> Iterator[Marked]:
        """Yield ids and mask of each document, in the form that `write_masked` takes."""
        for a, b in pairwise(self.starts.tolist()):
            yield self.tokens[a:b].tolist(), None if self.mask is None else self.mask[a:b].astype(bool).tolist()

    def windows(self, length: int) -> NDArray[np.int64]:
        """Return the starts of the windows of `length + 1` tokens; a document that is cut starts the next window."""
        if length not in self._windows:
            last = len(self.tokens) - length - 1
            if self.whole:
                windows, at = [], 0
                while at <= last:
                    windows.append(at)
                    following = int(self.starts[np.searchsorted(self.starts, at + length, "right") - 1])
                    at = following if following > at else int(self.starts[np.searchsorted(self.starts, at, "right")])
                self._windows[length] = np.asarray(windows, dtype=np.int64)
            else:
                self._windows[length] = np.arange(0, last + 1, length, dtype=np.int64)
            if not len(self._windows[length]):
                raise ParameterError(
                    f"a token stream has only {len(self.tokens)} tokens, but a window needs {length + 1}",
                    fix="give a smaller --length, or more text",
                )
        return self._windows[length]

    def _locate(self, indices: Iterable[int], length: int) -> NDArray[np.int64]:
        return self.windows(length)[list(indices)][:, None] + np.arange(length + 1)

    def rows(self, indices: Iterable[int], length: int) -> Tensor:
        """Return windows by index, `[rows, length + 1]` int64."""
        return torch.from_numpy(self.tokens[self._locate(indices, length)].astype(np.int64))

    def masks(self, indices: Iterable[int], length: int) -> Tensor:
        """Return which tokens of the windows belong to answers, bool `[rows, length + 1]`; without a mask, all."""
        places = self._locate(indices, length)
        return torch.from_numpy(np.ones(places.shape, bool) if self.mask is None else self.mask[places].astype(bool))


class Orders:
    """Chooses the windows of each batch. Every epoch of a stream is a new permutation of all its windows.

    `counters`, the number of windows drawn so far by stream and length, is its complete state."""

    def __init__(self, streams: dict[str, TokenStream], shares: dict[str, float], seed: int) -> None:
        self.streams, self.seed = streams, seed
        self.shares = np.array([shares[name] for name in streams], dtype=np.float64)
        self.shares /= self.shares.sum()
        self.counters: dict[str, int] = {}
        self._orders: dict[tuple[str, int, int], NDArray[np.int64]] = {}

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
        """Choose (stream, window) for each row of a step."""
        names = list(self.streams)
        rng = np.random.default_rng([self.seed, 7, step])
        return [
            (name, self._next(name, length))
            for name in (names[i] for i in rng.choice(len(names), size=rows, p=self.shares))
        ]
