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

    def columns(lanes: int, count: int, first: ir.Value) -> None:
        """Generate the tile of `count` vectors of `lanes` columns, from column `first` on."""
        kind = ir.VectorType(FLOAT, lanes)
        at = [b.mul(b.add(first, WORD(lanes * p)), WORD(4)) for p in range(count)]
        load = lambda place, p: b.load_vector(b.gep(place, [at[p]]), FLOAT, lanes, 4)  # noqa: E731
        number = lambda place, byte: b.spread(b.load(b.place_at(place, byte, FLOAT), align=4), lanes)  # noqa: E731
        sums = {part: [cgutils.alloca_once(b, kind) for _ in at] for part in (out, recalled)}
        for place in (*sums[out], *sums[recalled]):
            b.store(ir.Constant(kind, [0.0] * lanes), place)
        factor = number(decay, WORD(0))
        changed = [load(change, p) for p in range(count)]

        def add(part: ir.Value, p: int, weight: ir.Value, cell: ir.Value) -> None:
            b.store(b.multiply_add(weight, cell, b.load(sums[part][p])), sums[part][p])

        with cgutils.for_range_slice(b, WORD(0), keys, WORD(1), inc=True) as (i, _):
            row, byte = b.gep(cells, [b.mul(b.mul(i, values), WORD(4))]), b.mul(i, WORD(4))
            weight, asked, sought = (number(place, byte) for place in (k, q, following))
            for p in range(count):
                cell = load(row, p)
                if changes:
                    # The first product is rounded, so that there is only one way to write this with fused operations.
                    cell = b.multiply_add(weight, changed[p], b.fmul(factor, cell))
                    b.store(cell, b.bitcast(b.gep(row, [at[p]]), kind.as_pointer()), align=4)
                    add(out, p, asked, cell)
                if recalls:
                    add(recalled, p, sought, cell)
        for part in ([out] if changes else []) + ([recalled] if recalls else []):
            for p in range(count):
                b.store(b.load(sums[part][p]), b.bitcast(b.gep(part, [at[p]]), kind.as_pointer()), align=4)

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
