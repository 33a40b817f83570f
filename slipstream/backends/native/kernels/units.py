"""The units of work of threads, as one callback.

A kernel that calls another one by name contains all of its code. With a function pointer, the units are compiled only
once.
"""

from __future__ import annotations

from numba import carray, types

from slipstream.backends.native.kernels.attention import attend, attend_scores, attend_values, attend_weights, write_kv
from slipstream.backends.native.kernels.compiled import callback
from slipstream.backends.native.kernels.memory import pointer
from slipstream.backends.native.kernels.products import product
from slipstream.backends.native.kernels.records import (
    ATTENDED,
    BOARD,
    KV_WRITTEN,
    MIXED,
    PREPARED,
    PRODUCTS,
    SCORED,
    SOFTMAX,
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
    elif op == KV_WRITTEN:
        write_kv(board.write_kv, unit, thread)
    elif op == SCORED:
        attend_scores(board.attend, unit, thread)
    elif op == SOFTMAX:
        attend_weights(board.attend, unit, thread)
    elif op == MIXED:
        attend_values(board.attend, unit, thread)
