"""`CellMemory`: what an engine may ask of a KV cache of llama.cpp, which has a fixed number of cells, one a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq

from slipstream.core.target import Usage


class CellMemory:
    """Implements `Memory`, with blocks of one token. Nothing is kept for later texts.

    capacity  cells. lengths: how many of them each sequence holds now.
    """

    block = 1

    def __init__(self, capacity: int, lengths: Callable[[], Mapping[int, int]]):
        self._capacity, self._lengths = capacity, lengths

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def usage(self) -> Usage:
        return Usage(self._capacity, sum(self._lengths().values()), 0)

    def missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        held = self._lengths()
        wanted = sum(max(0, stop - held.get(seq_id, 0)) for seq_id, _, stop in writes)
        return max(0, wanted + sum(held.values()) - self._capacity)

    def match(self, tokens: Seq[int]) -> int:
        return 0

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        return 0

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """Nothing is kept."""
