"""A model of the KV cache without blocks: a list of values for each sequence. The pool is compared with it."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence as Seq

import pytest

from slipstream.errors import TargetError
from slipstream.kv.blocks import BlockPool


class Cells:
    """A block store with one value per slot. It grows exactly to the requested size."""

    def __init__(self, block: int):
        self.block, self.cells = block, list[int]()

    def grow(self, blocks: int) -> None:
        self.cells += [-1] * (blocks * self.block - len(self.cells))

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            cells = self.cells[source * self.block : (source + 1) * self.block]
            self.cells[target * self.block : (target + 1) * self.block] = cells


class World:
    """A block pool, and the values that its sequences should contain. `write` fills slots start..stop-1, and drops
    later slots, as after a rollback."""

    def __init__(self, capacity: int | None, block: int = 4, spread: int = 0):
        self.store = Cells(block)
        self.pool = BlockPool(self.store, capacity, block, spread)
        self.texts: dict[int, list[int]] = {}
        self._values = itertools.count()

    def write(self, seq_id: int, start: int, stop: int) -> None:
        self.pool.reserve(seq_id, start, stop)
        values = [next(self._values) for _ in range(start, stop)]
        for place, value in zip(self.pool.places(seq_id, range(start, stop)), values, strict=True):
            self.store.cells[place] = value
        self.texts[seq_id] = self.texts.get(seq_id, [])[:start] + values

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        self.pool.fork(parent_id, child_id, length)
        self.texts[child_id] = self.texts[parent_id][:length]

    def release(self, seq_id: int) -> None:
        self.pool.release(seq_id)
        self.texts.pop(seq_id, None)

    def move(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> None:
        """Move the slots `src` of accepted draft tokens to `dst`, and drop later slots."""
        text = self.texts[seq_id]
        values = [text[s] for s in src]
        sources, targets = self.pool.moves(seq_id, src, dst)
        for target, value in zip(targets, [self.store.cells[source] for source in sources], strict=True):
            self.store.cells[target] = value
        self.texts[seq_id] = text[: dst[0]] + values

    def step(self, draw: random.Random, most: int = 40) -> None:
        """Run one random operation. If the pool is full, the operation must raise an error and change nothing."""
        kind, ids = draw.random(), list(self.texts)
        if not ids or (kind < 0.15 and len(ids) < 6):
            self._try_write(draw.randrange(10**6), 0, draw.randint(0, most))
        elif kind < 0.55:
            seq_id = draw.choice(ids)
            length = len(self.texts[seq_id])
            start = length if draw.random() < 0.7 else draw.randint(0, length)
            self._try_write(seq_id, start, start + draw.randint(0, 9))
        elif kind < 0.7:
            parent = draw.choice(ids)
            self.fork(parent, draw.randrange(10**6, 2 * 10**6), draw.randint(0, len(self.texts[parent])))
        elif kind < 0.8:
            seq_id = draw.choice(ids)
            length = len(self.texts[seq_id])
            src = sorted(draw.sample(range(length // 2, length), min(3, length - length // 2)))
            dst = range(length // 2, length // 2 + len(src))
            if src and self._fits(seq_id, dst.start, dst.stop):
                self.move(seq_id, src, dst)
        elif kind < 0.9 or len(ids) > 5:
            self.release(draw.choice(ids))

    def _fits(self, seq_id: int, start: int, stop: int) -> bool:
        free = self.pool.free
        return free is None or self.pool.count_needed(seq_id, start, stop) <= free

    def _try_write(self, seq_id: int, start: int, stop: int) -> None:
        free, needed, fits = (
            self.pool.free,
            self.pool.count_needed(seq_id, start, stop),
            self._fits(seq_id, start, stop),
        )
        if fits:
            self.write(seq_id, start, stop)
            assert free is None or self.pool.free == free - needed
            return
        before = self.state()
        with pytest.raises(TargetError, match="out of KV blocks"):
            self.write(seq_id, start, stop)
        assert self.state() == before

    # --- invariants --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[object, ...]:
        pool = self.pool
        tables = {seq_id: list(table) for seq_id, table in pool.tables.items()}
        return tables, [c for c in pool._counts if c], bytes(pool._free).count(1), pool.version

    def check(self, leaks: bool = False) -> None:
        """Assert that every sequence reads its own values, and that the owners of every block are counted correctly.
        leaks: allow counts that are too high, and blocks without an owner that are not free."""
        pool = self.pool
        owners = Counter(block for table in pool.tables.values() for block in table)
        for seq_id, text in self.texts.items():
            read = [self.store.cells[place] for place in pool.places(seq_id, range(len(text)))]
            assert read == text, f"sequence {seq_id}"
            table = pool.tables[seq_id]
            assert len(set(table)) == len(table)
        for block in range(len(pool._free)):
            count = pool.count(block)
            if leaks:
                assert count >= owners[block], f"block {block} has more owners than are counted"
                assert not (pool._free[block] and owners[block]), f"block {block} is free and owned"
            else:
                assert count == owners[block], f"block {block}"
                assert pool._free[block] == (count == 0), f"block {block}"
        if pool.capacity is not None and not leaks:
            assert pool.free == pool.capacity - len(owners)
