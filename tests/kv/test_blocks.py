"""`BlockPool` against a cache without blocks (`World`), through random sessions, errors and interrupts."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from slipstream.errors import ParameterError, TargetError
from slipstream.kv import blocks
from slipstream.kv.blocks import BlockPool
from tests.kv.model import Cells, World


@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("capacity", [None, 1, 7, 40])
def test_every_sequence_reads_its_own_text_and_every_owner_is_counted(capacity: int | None, spread: int) -> None:
    for seed in range(12):
        draw, world = random.Random(seed), World(capacity, spread=spread)
        for _ in range(150):
            world.step(draw)
            world.check()
        for seq_id in draw.sample(list(world.texts), len(world.texts)):
            world.release(seq_id)
            world.check()
        assert not any(world.pool._counts)


def test_a_copy_of_the_tables_is_valid_until_the_version_changes_and_pools_grow_by_doubling() -> None:
    draw, world, seen = random.Random(5), World(capacity=20), dict[int, object]()
    for _ in range(400):
        world.step(draw)
        tables = {seq_id: tuple(table) for seq_id, table in world.pool.tables.items() if table}
        assert seen.setdefault(world.pool.version, tables) == tables
    world = World(capacity=None, block=1)
    sizes = []
    for slot in range(200):
        world.write(1, slot, slot + 1)
        sizes.append(len(world.store.cells))
    assert sorted(set(sizes)) == [16, 32, 64, 128, 256]
    assert world.pool.free is None
    assert world.pool.used == 200


def test_sequences_get_consecutive_blocks_after_releases_and_with_a_spread_as_they_grow_together() -> None:
    world = World(capacity=None)
    for seq_id in range(6):
        world.write(seq_id, 0, 4 * (seq_id + 1))
    for seq_id in (3, 0, 5, 1, 4, 2):
        world.release(seq_id)
    for slot in range(0, 100, 5):
        world.write(9, slot, slot + 5)
    assert world.pool.tables[9] == list(range(25))
    world = World(capacity=None, spread=8)
    for slot in range(0, 36, 3):  # 9 blocks each
        for seq_id in range(5):
            world.write(seq_id, slot, slot + 3)
    for table in world.pool.tables.values():
        assert table == list(range(table[0], table[0] + 9))
    full = World(capacity=6, spread=8)  # no room to spread: all blocks are used
    for seq_id in range(6):
        full.write(seq_id, 0, 4)
    assert full.pool.free == 0


def test_ids_lengths_and_slots_out_of_bounds_are_refused_by_number_and_change_nothing() -> None:
    world = World(capacity=4)
    world.write(1, 0, 6)  # two blocks: 8 slots
    pool, before = world.pool, world.state()
    refused: list[tuple[str, Callable[[], object]]] = [
        ("sequence 1 has 8 KV slots, so it cannot write slots 9 to 9", lambda: pool.reserve(1, 9, 10)),
        ("sequence 1 has 8 KV slots, so it cannot write slots -1 to 2", lambda: pool.reserve(1, -1, 3)),
        ("sequence 2 has 0 KV slots, so it cannot write slots 1 to 1", lambda: pool.reserve(2, 1, 2)),
        ("sequence 1 needs 3 more to hold 20 slots, and 2 of 4 are free", lambda: pool.reserve(1, 6, 20)),
        ("sequence 2 needs 5 more to hold 17 slots, and 2 of 4 are free", lambda: pool.reserve(2, 0, 17)),
        ("9 KV slots of sequence 1 were requested, but it has only 8", lambda: pool.fork(1, 2, 9)),
        ("-1 KV slots of sequence 1", lambda: pool.fork(1, 2, -1)), ("sequence 5 has no", lambda: pool.fork(5, 2, 0)),
        ("sequence 1 already has 8 KV slots", lambda: pool.fork(1, 1, 3)),
        ("sequence 1 already has 8 KV slots", lambda: pool.adopt(1, [])),
        ("but slot 8", lambda: pool.places(1, [0, 8])), ("but slot -2", lambda: pool.places(1, [0, -2])),
        ("sequence 5 has no KV", lambda: pool.places(5, [])), ("but slot 11", lambda: pool.moves(1, [11], [3])),
        ("but slot -1", lambda: pool.moves(1, [3], [-1])), ("sequence 5 has no KV", lambda: pool.moves(5, [3], [1])),
    ]  # fmt: skip
    for message, call in refused:
        with pytest.raises(TargetError, match=message):
            call()
        assert world.state() == before
    pool.release(5)  # unknown ids are ignored
    assert world.state() == before
    for capacity in (0, -3):
        with pytest.raises(ParameterError, match=f"{capacity} blocks"):
            BlockPool(Cells(4), capacity)


def test_a_store_without_memory_does_not_change_the_pool() -> None:
    world = World(capacity=None)
    world.write(1, 0, 60)
    before = world.state()
    world.store.grow = _out_of_memory  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="no memory"):
        world.write(1, 60, 100)
    assert world.state() == before
    world.write(1, 60, 64)
    world.check()


def _out_of_memory(blocks: int) -> None:
    raise TargetError("no memory")


@contextmanager
def interrupted_after(instructions: int) -> Iterator[None]:
    """Raise KeyboardInterrupt after this number of instructions of the pool's methods."""
    left = instructions

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != blocks.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def example(capacity: int | None) -> World:
    """Two sequences that share blocks, one that does not, and a free block between others."""
    world = World(capacity)
    world.write(0, 0, 9)
    world.write(1, 0, 10)
    world.fork(1, 2, 7)
    world.write(3, 0, 13)
    world.release(0)
    return world


def _tables(world: World) -> dict[int, list[int]]:
    return {seq_id: list(table) for seq_id, table in world.pool.tables.items()}


OPERATIONS: dict[str, Callable[[World], None]] = {
    "grow": lambda w: w.pool.reserve(3, 13, 40), "begin": lambda w: w.pool.reserve(7, 0, 6),
    "copy on write, and grow": lambda w: w.pool.reserve(2, 2, 21), "fork": lambda w: w.pool.fork(3, 7, 11),
    "release what is shared": lambda w: w.pool.release(1), "release": lambda w: w.pool.release(3),
    "move": lambda w: (w.pool.moves(1, [8, 9], [3, 4]), None)[1],
}  # fmt: skip


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_instruction_leaks_and_never_shares(operation: str, capacity: int | None) -> None:
    for instructions in range(10_000):
        world = example(capacity)
        version, tables = world.pool.version, _tables(world)
        try:
            with interrupted_after(instructions):
                OPERATIONS[operation](world)
        except KeyboardInterrupt:
            pass
        else:
            break
        assert world.pool.version != version or _tables(world) == tables
        for seq_id in list(world.texts):  # a release may have finished
            if seq_id not in world.pool.tables:
                del world.texts[seq_id]
        for seq_id in set(world.pool.tables) - set(world.texts):  # and a fork or a new sequence
            world.texts[seq_id] = []
        world.check(leaks=True)
        draw = random.Random(instructions)
        for _ in range(15):
            world.step(draw, most=8)
            world.check(leaks=True)
    assert instructions > 30
