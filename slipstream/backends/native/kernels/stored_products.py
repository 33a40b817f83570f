"""Products of a few rows with a matrix in torch's memory layout, [out, in], which is neither copied nor packed.

y[r, o] = bias[o] + sum over i of x[r, i] * w[o, i], with weights in float32 or bfloat16, and all else in float32. A
tile is a few rows times a few outputs. Each sum has a vector of partial sums, which are added pairwise at the end. So
tiles of all sizes add in the same order, and a row of the result is bitwise the same alone and among other rows.
A product over a few rows waits for memory, so the weights of the next outputs are prefetched.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.compiled import callback
from slipstream.backends.native.kernels.formats import BFLOAT16, FLOAT32, Format
from slipstream.backends.native.kernels.memory import call, fetch_add, pointer
from slipstream.backends.native.kernels.products import first_of, tiles_of
from slipstream.backends.native.kernels.records import STORED_PRODUCT
from slipstream.backends.native.kernels.vectors import FLOAT, INT, WORD, Builder, emit, locator

LANES = processor.lanes()
OUTS, ROWS = (3, 8) if processor.registers() == 32 else (2, 5)
"""Most outputs and rows of a tile, so that sums, the weights of one step and a part of a row fit in registers."""
_VECTOR = ir.VectorType(FLOAT, LANES)


@emit(9)
def stored_tile(b: Builder, fmt: Format) -> None:
    """Arguments: w, bias, x, y (addresses; bias 0: none), columns, outs (OUTS or less), rows, stride (of y, in floats),
    ahead (distance in bytes from w to the prefetched weights)."""
    w, bias, x, y = map(b.bytes_at, b.function.args[:4])
    columns, outs, rows, stride, ahead = b.function.args[4:]
    row_bytes, weight_bytes = b.mul(columns, WORD(4)), b.mul(columns, WORD(fmt.bytes))
    whole = b.mul(b.udiv(columns, WORD(LANES)), WORD(LANES))

    def products(count: int, wide: int) -> None:
        """Generate the tile of `count` rows and `wide` outputs."""
        each = [(r, o) for r in range(count) for o in range(wide)]
        weights = [b.gep(w, [b.mul(weight_bytes, WORD(o))]) for o in range(wide)]
        inputs = [b.gep(x, [b.mul(row_bytes, WORD(r))]) for r in range(count)]
        zeros = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = {ro: cgutils.alloca_once(b, _VECTOR) for ro in each}
        rest = {ro: cgutils.alloca_once(b, FLOAT) for ro in each}
        for ro in each:
            b.store(zeros, sums[ro])
            b.store(FLOAT(0.0), rest[ro])
        with cgutils.for_range_slice(b, WORD(0), whole, WORD(LANES), inc=True) as (i, _):
            at = b.mul(i, WORD(4))
            near = []
            for place in weights:
                here = b.gep(place, [b.mul(i, WORD(fmt.bytes))])
                near.append(b.as_floats(here, fmt, LANES))
                b.call_builtin("llvm.prefetch.p0i8", ir.VoidType(), b.gep(here, [ahead]), INT(0), INT(2), INT(1))
            for r in range(count):
                numbers = b.load_vector(b.gep(inputs[r], [at]), FLOAT, LANES, 4)
                for o in range(wide):
                    b.store(b.multiply_add(numbers, near[o], b.load(sums[r, o])), sums[r, o])
        with cgutils.for_range_slice(b, whole, columns, WORD(1), inc=True) as (i, _):
            at = b.mul(i, WORD(4))
            for r, o in each:
                weight = b.as_floats(b.gep(weights[o], [b.mul(i, WORD(fmt.bytes))]), fmt, 1)
                number = b.load(b.place_at(inputs[r], at, FLOAT), align=4)
                b.store(b.multiply_add(number, b.extract_element(weight, INT(0)), b.load(rest[r, o])), rest[r, o])
        for r, o in each:
            total = b.fadd(b.sum_of(b.load(sums[r, o])), b.load(rest[r, o]))
            place = cgutils.alloca_once_value(b, total)
            with b.if_then(b.icmp_unsigned("!=", b.function.args[1], WORD(0))):
                b.store(b.fadd(total, b.load(b.place_at(bias, WORD(4 * o), FLOAT), align=4)), place)
            at = b.mul(b.add(b.mul(stride, WORD(r)), WORD(o)), WORD(4))
            b.store(b.load(place), b.place_at(y, at, FLOAT), align=4)

    end = b.append_basic_block("end")
    choice = b.switch(b.add(b.mul(outs, WORD(ROWS + 1)), rows), end)
    for wide in range(1, OUTS + 1):
        for count in range(1, ROWS + 1):
            block = b.append_basic_block(f"outs{wide}_rows{count}")
            choice.add_case(WORD(wide * (ROWS + 1) + count), block)
            b.position_at_end(block)
            products(count, wide)
            b.branch(end)
    b.position_at_end(end)
    b.ret_void()


_float32_tile, _bfloat16_tile = locator(stored_tile, FLOAT32), locator(stored_tile, BFLOAT16)


@callback(types.void(types.int64))
def stored_product(address):
    """Do units of the STORED_PRODUCT at `address` until none is left. Several threads call this at the same time."""
    job = carray(pointer(address), (1,), STORED_PRODUCT)[0]
    tile = _bfloat16_tile() if job.half else _float32_tile()
    tiles, bytes, out_bytes = tiles_of(job.rows, np.int64(ROWS)), 4 * job.columns, (4 - 2 * job.half) * job.columns
    while True:
        low = fetch_add(address, 1) * job.share
        if low >= job.outs:
            return
        high = min(low + job.share, job.outs)
        for o in range(low, high, OUTS):
            outs = min(np.int64(OUTS), high - o)
            bias = job.bias + 4 * o if job.bias != 0 else np.int64(0)
            for t in range(tiles):
                first = first_of(t, job.rows, np.int64(ROWS))
                count = first_of(t + 1, job.rows, np.int64(ROWS)) - first
                ahead = OUTS * out_bytes if t == 0 else np.int64(0)
                call(
                    tile,
                    (
                        job.weights + o * out_bytes, bias, job.x + first * bytes, job.y + 4 * (first * job.outs + o),
                        job.columns, outs, count, job.outs, ahead,
                    ),
                )  # fmt: skip
