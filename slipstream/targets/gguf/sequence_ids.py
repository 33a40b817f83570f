"""`SequenceIds`: which of llama.cpp's sequence ids hold which sequences, branches and kept texts.

A sequence holds one id. Between a pass and its commit, each further branch of its draft holds one, too; a kept text
holds one until it gives way. Free ids hold nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core.common_beginning import common_beginning
from slipstream.core.sequence import Sequence
from slipstream.errors import TargetError
from slipstream.targets.gguf.kept_texts import KeptTexts
from slipstream.targets.gguf.llama_context import IDS, LlamaContext


@dataclass(slots=True)
class Held:
    """What llama.cpp holds of a sequence.

    id        its sequence id. length: leading tokens of the sequence that it holds.
    cells     tokens that it holds, nodes of its own branch included.
    branches  id and nodes of each branch, between a pass and its commit.
    """

    id: int
    length: int = 0
    cells: int = 0
    branches: list[tuple[int, Seq[int]]] = field(default_factory=list)


class SequenceIds:
    """context  of llama.cpp; `widen` replaces it.
    free     ids that hold nothing. kept: texts for later ones.
    """

    def __init__(self, context: LlamaContext):
        self.context = context
        self.free = list(range(context.ids))[::-1]
        self.kept = KeptTexts(self.give_back)
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        """How many sequences are held."""
        return len(self._held)

    def __getitem__(self, seq_id: int) -> Held:
        return self._held[seq_id]

    def rolled_back(self, seq: Sequence) -> Held:
        """What is held of a sequence, with nothing that was not accepted; a new one if there is none."""
        held = self._held.get(seq.id)
        if held is None:
            held = self._begun(seq.id)
        if held.branches:  # nothing of the last run was committed
            self.drop_branches(held)
            held.cells = held.length + len(held.branches[0][1])
            held.branches = []
        held.length = min(held.length, seq.kv_len)
        self.cut(held, held.length)
        return held

    def commit(self, seq_id: int, nodes: Seq[int]) -> None:
        """Keep the id whose branch has the most of the accepted nodes, and no more of it than these."""
        held = self._held[seq_id]
        common = [common_beginning(branch, nodes) for _, branch in held.branches]
        best = common.index(max(common))
        for i, (own, branch) in enumerate(held.branches):
            if i == best:
                held.id, held.cells = own, held.length + len(branch)
            else:
                self.give_back(own)
        held.branches = []
        held.length += common[best]
        self.cut(held, held.length)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `core.target.Fork`. Both sequence ids share the cells."""
        parent = self._held.get(parent_id)
        if parent is None or parent.branches or length > parent.length or child_id in self._held:
            raise TargetError(
                f"sequence {child_id} cannot begin with {length} tokens of sequence {parent_id}",
                why=f"that one holds {0 if parent is None else parent.length}, and a sequence begins once",
                fix="fork between two runs, with another id",
            )
        child = self._begun(child_id)
        self.context.fork(parent.id, child.id)
        child.length, child.cells = min(length, parent.length), parent.cells  # 0 if the cache was widened
        self.cut(child, child.length)

    def release(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            for one in {held.id, *(each for each, _ in held.branches)}:
                self.give_back(one)

    # --- ids and cells -----------------------------------------------------------------------------------------------

    def has(self, count: int) -> bool:
        """Whether so many ids are free, if need be after kept texts were dropped."""
        while len(self.free) < count and self.kept.drop_oldest():
            pass
        return len(self.free) >= count

    def widen(self) -> None:
        """Have all ids of llama.cpp. That empties its cache: the texts that it holds are read again."""
        if self.context.ids < IDS:
            self.context = self.context.widened()
            self.free = list(range(IDS))[::-1]
            self.kept.forget()
            for held in self._held.values():
                held.id, held.length, held.cells, held.branches = self.free.pop(), 0, 0, []

    def make_room(self, rows: int) -> None:
        """Drop kept texts where the cache may have no cells for so many rows. Shared cells are counted for each that
        holds them, so more may be dropped than is needed."""
        lengths = self.kept.lengths
        if lengths:
            over = sum(lengths) + sum(held.cells for held in self._held.values()) + rows - self.context.cells
            while over > 0 and self.kept.drop_oldest():
                over -= lengths.pop(0)

    def cut(self, held: Held, length: int) -> None:
        """Remove what the sequence's own id holds from `length` on."""
        if held.cells > length:
            self.context.cut(held.id, length)
            held.cells = length

    def drop_branches(self, held: Held) -> None:
        """Give back the ids of all branches but the first, which is the sequence's own."""
        for one, _ in held.branches[1:]:
            self.give_back(one)
        del held.branches[1:]

    def give_back(self, one: int) -> None:
        """Empty an id of llama.cpp; it is free then."""
        self.context.clear(one)
        self.free.append(one)

    def _begun(self, seq_id: int) -> Held:
        """A sequence that holds nothing yet."""
        if not self.has(1):
            self.widen()
        if not self.free:
            raise TargetError(
                f"{len(self._held)} sequences are held already, llama.cpp has {IDS} sequence ids",
                why="each sequence needs one",
                fix="release finished sequences, or choose a smaller max_batch",
            )
        made = self._held[seq_id] = Held(self.free.pop())
        return made

    # --- what `CellMemory` asks ---------------------------------------------------------------------------------------

    def lengths(self) -> dict[int, int]:
        """How many cells each sequence holds, at least."""
        return {seq_id: held.cells for seq_id, held in self._held.items()}

    def copied(self, seq_id: int, length: int) -> int | None:
        """An id of llama.cpp that holds the first `length` tokens of a sequence, too; None if that is not to be had."""
        held = self._held.get(seq_id)
        if held is None or held.branches or held.length < length or not self.has(1):
            return None
        copy = self.free.pop()
        self.context.fork(held.id, copy)
        if held.cells > length:
            self.context.cut(copy, length)
        return copy

    def adopt(self, seq_id: int, source: int, length: int) -> bool:
        """Begin a sequence with the first `length` tokens of an id of llama.cpp. Returns False, and has done nothing,
        where no further id is free."""
        if not self.free:
            return False
        held = self._begun(seq_id)
        self.context.fork(source, held.id)
        self.context.cut(held.id, length)
        held.length = held.cells = length
        return True
