"""How the threads of a pass share its work.

One thread, the *main* one, runs the pass from top to bottom. Where there is enough work, `share` posts it as numbered
units: every thread has a slice of them, takes the next unit of its slice until none is left, then helps with the slices
of others. The main thread does the same and waits until all units are done. So nothing depends on how many threads take
part, or whether they run at all: a thread that the system has put aside is only waited for while it holds a unit.

Results do not depend on who did what: no unit adds to what another one writes.

Why no lock is needed: a unit is taken by counting a slice down, and only numbers above 0 are units. Work cannot end
before each unit is done, so the records that describe it stay as they are while somebody holds one.
"""

from __future__ import annotations

from slipstream.backends.native.kernels.compiled import entry, kernel
from slipstream.backends.native.kernels.memory import call, fetch_add, load, pause, store
from slipstream.backends.native.kernels.records import NOTHING

LINE = 64
"""Bytes of a cache line: counters lie that far apart."""

MOST_THREADS = 256

DONE, POSTED, STOP = MOST_THREADS * LINE, (MOST_THREADS + 1) * LINE, (MOST_THREADS + 2) * LINE
"""Counters behind those of the slices: units done, a number that grows with every post, and whether threads shall
end."""

COUNTER_BYTES = (MOST_THREADS + 3) * LINE


@kernel()
def _work(board, thread):
    """Take units until none is left: first of the own slice, then of the others."""
    done, threads = 0, board.threads
    for k in range(threads):
        slice = (thread + k) % threads
        while load(board.counters + slice * LINE) > 0:
            left = fetch_add(board.counters + slice * LINE, -1)
            if left <= 0:
                break
            # From here on nothing of the board changes until this unit is done.
            unit = (slice + 1) * board.units // board.threads - left
            call(board.run, (board.address, unit, thread))
            done += 1
    if done > 0:
        fetch_add(board.counters + DONE, done)


@kernel()
def share(board, op, units, worth):
    """Do `units` units of work, by all threads if it is `worth` waking them."""
    board.op, board.units = op, units
    if board.threads == 1 or units < 2 or not worth:
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
def serve(boards, thread, turns):
    """Help with whatever is posted; returns after so many idle turns, or True where the pool has been stopped."""
    board = boards[0]
    seen, idle = load(board.counters + POSTED), 0
    if load(board.counters + STOP) != 0:
        return True
    while idle < turns:
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
