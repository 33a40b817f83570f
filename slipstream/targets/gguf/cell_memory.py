"""`CellMemory`: what an engine may ask of a KV cache of llama.cpp, which has a fixed number of cells, one a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from slipstream.core.target import Usage
from slipstream.kv.blocks import BLOCK
from slipstream.targets.gguf.llama_context import IDS
from slipstream.targets.gguf.sequence_ids import SequenceIds


class CellMemory:
    """Implements `Memory`. Cells are counted in blocks, although llama.cpp gives out single ones: a sequence counts as
    whole blocks, and a text begins with whole blocks of an earlier one.

    ids: who holds which cells of the cache, and the texts that are kept for later ones.
    """

    block = BLOCK

    def __init__(self, ids: SequenceIds):
        self._ids, self._kept, self.capacity = ids, ids.kept, ids.context.cells // BLOCK

    @property
    def usage(self) -> Usage:
        """Cells that several sequences hold are counted for each. kept: at most what is not used."""
        used = _blocks(self._ids.lengths().values())
        return Usage(self.capacity, used, max(0, min(_blocks(self._kept.lengths), self.capacity - used)))

    def missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """See `Memory`. What is only kept gives way. Each sequence needs a sequence id, too."""
        ends = dict(self._ids.lengths())
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
        if not length or not self._ids.adopt(seq_id, source, length):
            return 0
        self._kept.use(source)
        return length

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """See `Memory`."""
        if len(tokens) < BLOCK or self._kept.longest(tokens)[0] == len(tokens):
            return
        copy = self._ids.copied(seq_id, len(tokens))
        if copy is not None:
            self._kept.add(copy, tokens)


def _blocks(lengths: Iterable[int]) -> int:
    return sum(-(-length // BLOCK) for length in lengths)
