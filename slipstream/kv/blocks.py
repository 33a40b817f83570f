"""`BlockPool`: which sequence owns which block of a KV cache. Keys and values are in a `BlockStore`.

A block holds the keys and values of `block` consecutive slots of one sequence, for every layer. A sequence has a table:
its slot s is in block table[s // block], at place s % block. Sequences that share a prefix share blocks, and each block
counts the tables that contain it. A shared block is never written: the first writer gets a copy (copy on write).

    reserve(7, 0, 70)       7: [0, 1, 2]       counts [1, 1, 1]       with blocks of 32 slots
    fork(7, 8, 40)          8: [0, 1]          counts [2, 2, 1]       8 has the first 40 slots of 7
    reserve(8, 40, 41)      8: [0, 3]          counts [2, 1, 1, 1]    block 1 was copied to block 3
    release(7)              8: [0, 3]          counts [1, 0, 0, 1]    blocks 1 and 2 are free

An interrupt (Ctrl-C) at any point can leak blocks. But each block still has at most one writer, and each table contains
only filled blocks: every method changes counts and copies blocks first, tables last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from slipstream.errors import ParameterError, TargetError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Slots in a block, on every backend."""

FIRST_BLOCKS = 16
"""Number of blocks that a growing pool begins with."""


class BlockStore(Protocol):
    """The memory of the blocks. A place is block * BLOCK + slot in the block."""

    def grow(self, blocks: int) -> None:
        """Make room for `blocks` blocks and keep the content of existing blocks. Raises TargetError if there is too
        little memory."""
        ...

    def copy(self, originals: Seq[int], copies: Seq[int]) -> None:
        """Copy whole blocks, in every layer."""
        ...

    def move(self, src: Seq[int], dst: Seq[int]) -> None:
        """Copy places `src` to `dst` in every layer. All places are read before any is written."""
        ...

    def read(self, places: Seq[int]) -> Tensor:
        """Return a copy of these places, [L, 2, Hk, places, D]."""
        ...


class BlockPool:
    """The blocks of one `store`, and the tables of its sequences.

    capacity  largest number of blocks; None for a pool that grows by doubling as long as the store can.
    spread    number of free blocks between a new sequence and the sequence before it, if there is room, so that both
              stay in consecutive blocks; for stores that read consecutive blocks without copying them.
    tables    sequence id -> its blocks, in the order of its slots. Changed by this class only.
    version   number that changes with every change of a table, so that copies of tables can be checked.
    used      blocks 0..used-1 were in use at least once.
    reclaim   called with a number of blocks if too few blocks are free. `kv_memory`, which keeps blocks for later
              sequences, then drops this many of them, if it can.
    """

    def __init__(self, store: BlockStore, capacity: int | None = None, block: int = BLOCK, spread: int = 0):
        if capacity is not None and capacity < 1:
            raise ParameterError(f"a KV cache of {capacity} blocks was requested", fix="give a larger kv_tokens")
        self.block, self.capacity, self.spread = block, capacity, spread
        self.tables: dict[int, list[int]] = {}
        self.version = self.used = 0
        self.reclaim: Callable[[int], None] = lambda count: None
        self._store = store
        self._counts: list[int] = []  # tables (and other holders) of each block
        self._free = bytearray()  # for each block of the store 1 if it is free, otherwise 0

    def count_needed(self, seq_id: int, start: int, stop: int) -> int:
        """Return the number of free blocks that `reserve(seq_id, start, stop)` would take."""
        shared, missing = self._plan(self.tables.get(seq_id, []), start, stop)
        return len(shared) + missing

    def reserve(self, seq_id: int, start: int, stop: int) -> None:
        """Prepare a sequence for writing slots start..stop-1: afterwards it owns blocks for `stop` slots, and no block
        to be written is shared. New sequences begin here, with start = 0.

        Raises TargetError if `start` is after the slots that the sequence has, or if blocks or memory run out; then
        nothing has changed."""
        table = self.tables.get(seq_id, [])
        size = len(table) * self.block
        if not 0 <= start <= min(stop, size):
            raise TargetError(
                f"sequence {seq_id} has {size} KV slots, so it cannot write slots {start} to {stop - 1}",
                why="slots must be written in order, without gaps",
            )
        shared, missing = self._plan(table, start, stop)
        if not missing and not shared:
            self.tables[seq_id] = table
            return
        after = table[-1] + 1 if table and not shared else None
        taken = self._take(missing + len(shared), after, seq_id, stop)
        copies, new = taken[: len(shared)], taken[len(shared) :]
        if shared:
            self._store.copy([table[i] for i in shared], copies)
        self.version += 1  # before the table changes: a copy of the old table must not be used from here on
        for i, block in zip(shared, copies, strict=True):
            old, table[i] = table[i], block
            self.drop([old])
        table.extend(new)
        self.tables[seq_id] = table

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """Begin sequence `child_id` with the first `length` slots of `parent_id`. Nothing is copied until one of the
        two writes to a shared block. Raises TargetError if the parent lacks these slots, or the child exists."""
        self.adopt(child_id, self._table(parent_id, length)[: -(-length // self.block)])

    def adopt(self, seq_id: int, blocks: Seq[int]) -> None:
        """Begin a sequence with blocks that already have holders, who keep holding them. Raises TargetError for a
        sequence that exists already."""
        if seq_id in self.tables:
            raise TargetError(
                f"sequence {seq_id} already has {len(self.tables[seq_id]) * self.block} KV slots",
                why="a new sequence needs an unused id",
                fix="release the sequence first, or give another id",
            )
        self.hold(blocks)
        self.version += 1
        self.tables[seq_id] = list(blocks)

    def release(self, seq_id: int) -> None:
        """Free the blocks of a sequence that have no other holder; unknown ids are ignored."""
        if seq_id in self.tables:
            self.version += 1
            self.drop(self.tables.pop(seq_id))

    def places(self, seq_id: int, slots: Seq[int]) -> list[int]:
        """Return the places of a sequence's slots: block * `self.block` + place in the block. Raises TargetError for
        slots that the sequence does not hold."""
        table, block = self._table(seq_id), self.block
        if len(slots) and not 0 <= min(slots) <= max(slots) < len(table) * block:
            outside = min(slots) if min(slots) < 0 else max(slots)
            raise TargetError(f"sequence {seq_id} has {len(table) * block} KV slots, but slot {outside} was requested")
        return [table[s // block] * block + s % block for s in slots]

    def moves(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> tuple[list[int], list[int]]:
        """Return the places of slots `src` and of slots `dst` of a sequence, and make `dst` writable. Raises the errors
        of `places` and `reserve`."""
        self.places(seq_id, [*src, *dst])
        if len(dst):
            self.reserve(seq_id, min(dst), max(dst) + 1)
        return self.places(seq_id, src), self.places(seq_id, dst)

    @property
    def allocated(self) -> int:
        """Number of blocks that some table, or the cache of earlier texts, holds."""
        return len(self._free) - self._free.count(1)

    @property
    def free(self) -> int | None:
        """Number of blocks that can still be taken; None if the pool grows."""
        return None if self.capacity is None else self.capacity - len(self._free) + self._free.count(1)

    def count(self, block: int) -> int:
        return self._counts[block]

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more holder for each of these blocks, which are not free."""
        for block in blocks:
            self._counts[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Count one holder less for each of these blocks; a block without holders is free."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is free already"
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free[block] = 1

    def _table(self, seq_id: int, length: int = 0) -> list[int]:
        """Return the blocks of a sequence that holds at least `length` slots. Raises TargetError."""
        table = self.tables.get(seq_id)
        if table is None:
            raise TargetError(f"sequence {seq_id} has no KV blocks", why="it has not run yet, or was released")
        if not 0 <= length <= len(table) * self.block:
            raise TargetError(
                f"{length} KV slots of sequence {seq_id} were requested, but it has only {len(table) * self.block}"
            )
        return table

    def _plan(self, table: list[int], start: int, stop: int) -> tuple[list[int], int]:
        """Return which entries of a table have to be copied, and how many are missing, to write slots start..stop-1."""
        count, last = len(table), -(-stop // self.block)
        written = range(start // self.block, min(last, count)) if start < stop else ()
        return [i for i in written if self._counts[table[i]] > 1], max(0, last - count)

    def _take(self, count: int, after: int | None, seq_id: int, slots: int) -> list[int]:
        """Take free blocks, with one owner each: consecutive if possible, preferably starting at `after`."""
        if len(self._free) == self.capacity and self._free.count(1) < count:  # only a full pool drops kept blocks
            self.reclaim(count - self._free.count(1))
        at = self._place(count, after)
        if at < 0 and (self._free.count(1) < count or (self.spread and self.capacity is None)):
            self._grow(count, seq_id, slots)
            at = self._place(count, after)
        if at < 0:
            at = self._free.find(b"\1" * count)
        if at >= 0:
            taken = list(range(at, at + count))
        else:
            taken = [block for block, is_free in enumerate(self._free) if is_free][:count]
        for block in taken:
            self._free[block], self._counts[block] = 0, 1
        self.used = max(self.used, taken[-1] + 1 if taken else 0)
        return taken

    def _place(self, count: int, after: int | None) -> int:
        """Return the first of `count` consecutive free blocks: `after`, or a block before which `spread` free blocks
        are left to the previous owner; -1 if there is none."""
        if after is not None and self._free.startswith(b"\1" * count, after):
            return after
        at = self._free.find(b"\1" * (self.spread + count))
        return at + self.spread if at > 0 else at

    def _grow(self, count: int, seq_id: int, slots: int) -> None:
        """Let the store allocate at least `count` more blocks."""
        size, free = len(self._free), self.free
        if free is not None and free < count:
            raise TargetError(
                f"out of KV blocks: sequence {seq_id} needs {count} more to hold {slots} slots, and {free} of "
                f"{self.capacity} are free",
                why=f"the KV cache has a fixed size, {self.capacity} blocks of {self.block} slots",
                fix="run fewer or shorter sequences, or make the cache larger",
            )
        blocks = self.capacity or max(size + count + self.spread, 2 * size, FIRST_BLOCKS)
        self._store.grow(blocks)
        self._counts.extend([0] * (blocks - len(self._counts)))
        self._free.extend(b"\1" * (blocks - size))
