"""The units of work that threads share, behind one function pointer.

They are compiled once: a kernel that calls another one by name contains all of its code, which for the units of work
would be every kernel of a pass.
"""

from __future__ import annotations

from numba import carray, types

from slipstream.backends.native.kernels.attention import attend, attend_scores, attend_values, attend_weights, place
from slipstream.backends.native.kernels.compiled import callback
from slipstream.backends.native.kernels.memory import pointer
from slipstream.backends.native.kernels.products import product
from slipstream.backends.native.kernels.records import (
    ATTENDED,
    BOARD,
    MIXED,
    PLACED,
    PREPARED,
    PRODUCTS,
    SCORED,
    SOFTENED,
)  # fmt: skip
from slipstream.backends.native.kernels.rows import prepare


@callback(types.void(types.int64, types.int64, types.int64))
def run_unit(address, unit, thread):
    """Do one unit of the work that the BOARD at `address` describes."""
    board = carray(pointer(address), (1,), BOARD)[0]
    op = board.op
    if op == PRODUCTS:
        product(board.product, unit, thread)
    elif op == ATTENDED:
        attend(board.attend, unit, thread)
    elif op == PREPARED:
        prepare(board.prepare, unit, thread)
    elif op == PLACED:
        place(board.place, unit, thread)
    elif op == SCORED:
        attend_scores(board.attend, unit, thread)
    elif op == SOFTENED:
        attend_weights(board.attend, unit, thread)
    elif op == MIXED:
        attend_values(board.attend, unit, thread)
