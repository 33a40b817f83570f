"""`CellMemory`: what an engine may ask of a KV cache of llama.cpp, which has a fixed number of cells, one a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import Protocol

from slipstream.core.target import Usage
from slipstream.kv.blocks import BLOCK
from slipstream.targets.gguf.kept_texts import KeptTexts
from slipstream.targets.gguf.llama_context import IDS


class Cells(Protocol):
    """Who holds which cells: `SequenceIds`."""

    def lengths(self) -> Mapping[int, int]:
        """How many cells each sequence holds, at least."""
        ...

    def copied(self, seq_id: int, length: int) -> int | None:
        """A sequence id of llama.cpp that holds the first `length` tokens of a sequence, too; None if that is not to be
        had."""
        ...

    def adopt(self, seq_id: int, source: int, length: int) -> bool:
        """Begin a sequence with the first `length` tokens of such an id. Returns False, and has done nothing, where no
        further id is free."""
        ...


class CellMemory:
    """Implements `Memory`. Cells are counted in blocks, although llama.cpp gives out single ones: a sequence counts as
    whole blocks, and a text begins with whole blocks of an earlier one.

    cells: of the cache. held: who holds them. kept: texts for later ones.
    """

    block = BLOCK

    def __init__(self, cells: int, held: Cells, kept: KeptTexts):
        self._held, self._kept, self.capacity = held, kept, cells // BLOCK

    @property
    def usage(self) -> Usage:
        """Cells that several sequences hold are counted for each. kept: at most what is not used."""
        used = _blocks(self._held.lengths().values())
        return Usage(self.capacity, used, max(0, min(_blocks(self._kept.lengths), self.capacity - used)))

    def missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """See `Memory`. What is only kept gives way. Each sequence needs a sequence id, too."""
        ends = dict(self._held.lengths())
        for seq_id, _, stop in writes:
            ends[seq_id] = max(stop, ends.get(seq_id, 0))
        return max(0, _blocks(ends.values()) - self.capacity, len(ends) - IDS)

    def match(self, tokens: Seq[int]) -> int:
        """See `Memory`."""
        return self._kept.longest(tokens)[0] // BLOCK * BLOCK

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        """See `Memory`."""
        found, source = self._kept.longest(tokens)
        length = min(found, most) // BLOCK * BLOCK
        if not length or not self._held.adopt(seq_id, source, length):
            return 0
        self._kept.use(source)
        return length

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """See `Memory`."""
        if len(tokens) < BLOCK or self._kept.longest(tokens)[0] == len(tokens):
            return
        copy = self._held.copied(seq_id, len(tokens))
        if copy is not None:
            self._kept.add(copy, tokens)


def _blocks(lengths: Iterable[int]) -> int:
    return sum(-(-length // BLOCK) for length in lengths)
