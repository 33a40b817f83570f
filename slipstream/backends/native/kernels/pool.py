"""How threads share the work of a pass. The main thread posts work as numbered units, which do not write to the same
memory. Each thread takes units of its slice one by one, then units of other slices. The main thread waits until all
units are done, so a suspended thread delays a pass only if it has taken a unit. A thread takes a unit by decrementing
the counter of a slice, without a lock. The records that describe the work do not change before all units are done.
"""

from slipstream.backends.native.kernels.compiled import entry, kernel
from slipstream.backends.native.kernels.memory import call, fetch_add, load, pause, store
from slipstream.backends.native.kernels.records import NOTHING

MOST_THREADS = 256
LINE = 64
"""Bytes of a cache line. Each counter has its own cache line."""

DONE, POSTED, STOP = MOST_THREADS * LINE, (MOST_THREADS + 1) * LINE, (MOST_THREADS + 2) * LINE
"""Offsets of the counters that follow the counters of slices: units done, number of posts, and whether threads stop."""

COUNTER_BYTES = (MOST_THREADS + 3) * LINE


@kernel()
def _work(board, thread):
    """Do units until none is left."""
    done, threads = 0, board.threads
    for k in range(threads):
        slice = (thread + k) % threads
        while load(board.counters + slice * LINE) > 0:
            left = fetch_add(board.counters + slice * LINE, -1)
            if left <= 0:
                break
            # The board does not change until this unit is done.
            unit = (slice + 1) * board.units // board.threads - left
            call(board.run, (board.address, unit, thread))
            done += 1
    if done > 0:
        fetch_add(board.counters + DONE, done)


@kernel()
def share(board, op, units, shared):
    """Do `units` units of work, on all threads if `shared`."""
    board.op, board.units = op, units
    if board.threads == 1 or units < 2 or not shared:
        for unit in range(units):
            call(board.run, (board.address, unit, NOTHING))
        return
    store(board.counters + DONE, 0)
    for slice in range(board.threads):
        here = (slice + 1) * units // board.threads - slice * units // board.threads
        store(board.counters + slice * LINE, here)
    fetch_add(board.counters + POSTED, 1)
    _work(board, NOTHING)
    while load(board.counters + DONE) < units:
        pause()


@entry
def serve(boards, thread, spins):
    """Help with posted work. Returns False after `spins` idle spins, True if the pool was stopped."""
    board = boards[0]
    seen, idle = load(board.counters + POSTED), 0
    if load(board.counters + STOP) != 0:
        return True
    while idle < spins:
        posted = load(board.counters + POSTED)
        if posted == seen:
            pause()
            idle += 1
            continue
        seen, idle = posted, 0
        if thread < board.threads:
            _work(board, thread)
        if load(board.counters + STOP) != 0:
            return True
    return False
