"""The inner loop of Gated DeltaNet and Mamba-2 (see `recurrent`). It goes through a state S [K, V] once for each token.

The columns of S are independent of each other. A tile is a block of columns for which the change, the output and the
sums for the next token stay in vector registers, while the loop goes through the rows of S. Columns left over make
smaller tiles. All sums of a column are added in the order of the rows, so they are bitwise the same in all tiles, and
in passes over one token or many.
"""

from llvmlite import ir
from numba.core import cgutils

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.vectors import FLOAT, WORD, Builder, emit, locator

BLOCK = max(1, min(4, (processor.registers() - 8) * processor.lanes() // (3 * PANEL)))
"""Panels of the largest tile: its three vectors for each panel, and eight more, fit in registers."""


@emit(10)
def state_tile(b: Builder, changes: bool, recalls: bool) -> None:
    """changes: S = g S + k change', and then out = q' S. recalls: after that, recalled = following' S.

    Arguments: the addresses of S, g, k, q, change, out, following and recalled, and the numbers K and V."""
    cells, decay, k, q, change, out, following, recalled = map(b.bytes_at, b.function.args[:8])
    keys, values = b.function.args[8:]
    parts = [part for part, is_wanted in ((out, changes), (recalled, recalls)) if is_wanted]

    def columns(lanes: int, count: int, first: ir.Value) -> None:
        """Generate the tile of `count` vectors of `lanes` columns, from column `first` on."""
        kind = ir.VectorType(FLOAT, lanes)
        at = [b.mul(b.add(first, WORD(lanes * p)), WORD(4)) for p in range(count)]
        place = lambda pointer, p: b.place_at(pointer, at[p], kind)  # noqa: E731
        number = lambda pointer, byte: b.spread(b.load(b.place_at(pointer, byte, FLOAT), align=4), lanes)  # noqa: E731
        sums = {part: [cgutils.alloca_once(b, kind) for _ in at] for part in parts}
        for each in sums.values():
            for total in each:
                b.store(ir.Constant(kind, [0.0] * lanes), total)
        factor = number(decay, WORD(0))
        changed = [b.load(place(change, p), align=4) for p in range(count)]

        def add(part: ir.Value, p: int, weight: ir.Value, cell: ir.Value) -> None:
            b.store(b.multiply_add(weight, cell, b.load(sums[part][p])), sums[part][p])

        with cgutils.for_range_slice(b, WORD(0), keys, WORD(1), inc=True) as (i, _):
            row, byte = b.gep(cells, [b.mul(b.mul(i, values), WORD(4))]), b.mul(i, WORD(4))
            weight, asked, sought = (number(pointer, byte) for pointer in (k, q, following))
            for p in range(count):
                cell = b.load(place(row, p), align=4)
                if changes:
                    # The first product is rounded, so that there is only one way to write this with fused operations.
                    cell = b.multiply_add(weight, changed[p], b.fmul(factor, cell))
                    b.store(cell, place(row, p), align=4)
                    add(out, p, asked, cell)
                if recalls:
                    add(recalled, p, sought, cell)
        for part in parts:
            for p in range(count):
                b.store(b.load(sums[part][p]), place(part, p), align=4)

    start: ir.Value = WORD(0)
    for lanes, count in ((PANEL, BLOCK), (PANEL, 1), (1, 1)):
        stop = b.sub(values, b.urem(values, WORD(lanes * count)))
        with cgutils.for_range_slice(b, start, stop, WORD(lanes * count), inc=True) as (first, _):
            columns(lanes, count, first)
        start = stop
    b.ret_void()


recall_tile = locator(state_tile, False, True)
change_tile = locator(state_tile, True, False)
change_and_recall_tile = locator(state_tile, True, True)
