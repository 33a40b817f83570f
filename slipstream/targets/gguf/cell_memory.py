"""`CellMemory`: which sequence ids of llama.cpp hold which sequences, and which texts that are kept for later ones.

A sequence holds one id, and so does a kept text, on the same cells as the sequence that computed it. A later text forks
it, up to the last block that both have in common. Kept texts give way, the one that was used longest ago first, where
ids or cells run short. Free ids hold nothing.
"""

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from slipstream.core.sequence import Sequence
from slipstream.core.target import Usage
from slipstream.core.text_ends import count_common
from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK
from slipstream.targets.decoder import check_fork
from slipstream.targets.gguf.llama_context import IDS, LlamaContext

MOST_TEXTS = 16
"""Kept texts: each is compared with every new text."""


@dataclass(slots=True)
class Running:
    """What llama.cpp holds of a sequence. id: its sequence id; cells: tokens, those of a draft included."""

    id: int
    cells: int = 0


class CellMemory:
    """Implements `Memory`. The cache has a fixed number of cells, one a token. They are counted in blocks, although
    llama.cpp gives out single ones: a sequence counts as whole blocks, and a text begins with whole blocks of an
    earlier one."""

    block = BLOCK

    def __init__(self, context: LlamaContext):
        self.context, self.capacity = context, context.cells // BLOCK
        self._free = list(range(IDS))
        self._running: dict[int, Running] = {}  # by sequence
        self._kept: dict[int, list[int]] = {}  # by id of llama.cpp: a text; used longest ago first

    def rolled_back(self, seq: Sequence) -> Running:
        """The cells of a sequence, cut to its accepted tokens; they are begun if it has none."""
        cells = self._running.get(seq.id) or self._begun(seq.id)
        self.cut(seq.id, seq.kv_len)
        return cells

    def cut(self, seq_id: int, length: int) -> None:
        """Remove what a sequence holds from `length` on."""
        cells = self._running[seq_id]
        if cells.cells > length:
            self.context.cut(cells.id, length)
            cells.cells = length

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `core.target.Fork`. Both sequence ids share the cells."""
        parent = self._running.get(parent_id)
        check_fork(parent_id, child_id, length, None if parent is None else parent.cells, child_id in self._running)
        assert parent is not None
        self._begin_with(child_id, parent.id, length)

    def release(self, seq_id: int) -> None:
        cells = self._running.pop(seq_id, None)
        if cells is not None:
            self._give_back(cells.id)

    def make_room(self, rows: int) -> None:
        """Drop kept texts where the cache may have no cells for so many rows. Shared cells are counted for each that
        holds them, so more may be dropped than is needed."""
        used = rows + sum(entry.cells for entry in self._running.values())
        while self._kept and used + sum(map(len, self._kept.values())) > self.context.cells:
            self._drop(next(iter(self._kept)))

    def _begun(self, seq_id: int) -> Running:
        """A sequence that holds nothing yet."""
        if not self._has_id():
            raise TargetError(
                f"{len(self._running)} sequences are held already, llama.cpp has {IDS} sequence ids",
                why="each sequence needs one",
                fix="release finished sequences, or choose a smaller max_batch",
            )
        cells = self._running[seq_id] = Running(self._free.pop())
        return cells

    def _begin_with(self, seq_id: int, parent: int, length: int) -> None:
        """Begin a sequence with the first `length` tokens of an id of llama.cpp."""
        cells = self._begun(seq_id)
        self.context.fork(parent, cells.id, length)
        cells.cells = length

    def _has_id(self) -> bool:
        """Whether an id is free, if need be after a kept text was dropped."""
        if not self._free and self._kept:
            self._drop(next(iter(self._kept)))
        return bool(self._free)

    def _drop(self, kept: int) -> None:
        del self._kept[kept]
        self._give_back(kept)

    def _give_back(self, one: int) -> None:
        self.context.cut(one, 0)
        self._free.append(one)

    @property
    def usage(self) -> Usage:
        """Cells that several sequences hold are counted for each. kept: at most what is not used."""
        used = _blocks(entry.cells for entry in self._running.values())
        return Usage(self.capacity, used, max(0, min(_blocks(map(len, self._kept.values())), self.capacity - used)))

    def missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """See `Memory`. What is only kept gives way. Each sequence needs a sequence id, too."""
        ends = {seq_id: entry.cells for seq_id, entry in self._running.items()}
        for seq_id, _, stop in writes:
            ends[seq_id] = max(stop, ends.get(seq_id, 0))
        return max(0, _blocks(ends.values()) - self.capacity, len(ends) - IDS)

    def match(self, tokens: Seq[int]) -> int:
        return self._longest(tokens)[0] // BLOCK * BLOCK

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        common, parent = self._longest(tokens)
        length = min(common, most) // BLOCK * BLOCK
        if not length or not self._free:
            return 0
        self._begin_with(seq_id, parent, length)
        self._kept[parent] = self._kept.pop(parent)  # used now
        return length

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """See `Memory`. Kept texts that are the beginning of this one are dropped."""
        cells = self._running.get(seq_id)
        if len(tokens) < BLOCK or cells is None or cells.cells < len(tokens):
            return
        text = list(tokens)
        if self._longest(text)[0] == len(text):
            return
        for other in [one for one, known in self._kept.items() if text[: len(known)] == known]:
            self._drop(other)
        if len(self._kept) >= MOST_TEXTS:
            self._drop(next(iter(self._kept)))
        if self._has_id():
            copy = self._free.pop()
            self.context.fork(cells.id, copy, len(text))
            self._kept[copy] = text

    def _longest(self, tokens: Seq[int]) -> tuple[int, int]:
        """(how many tokens are kept of the beginning of a text, by which id of llama.cpp); (0, -1) if none are."""
        lengths = ((count_common(text, tokens), one) for one, text in self._kept.items())
        return max(lengths, default=(0, -1), key=lambda each: each[0])


def _blocks(lengths: Iterable[int]) -> int:
    return sum(-(-length // BLOCK) for length in lengths)
