"""Units of work of a matrix product: rows of activations are transformed (norm, gate) and packed for the tiles of a
matrix, then multiplied."""

import numpy as np
from numba import carray

from slipstream.backends.native.kernels.arithmetic import activate, cap_in_place, gate, layer_norm, max_abs, rms_norm
from slipstream.backends.native.kernels.block_tiles import round_groups
from slipstream.backends.native.kernels.compiled import EXACT, kernel
from slipstream.backends.native.kernels.formats import BFLOAT16_PAIRS, FORMATS, INT8_PAIRS, INT8_QUADS_TWICE
from slipstream.backends.native.kernels.memory import address_of, call, floats, integers, pointer, small, words
from slipstream.backends.native.kernels.processor import byte_offset
from slipstream.backends.native.kernels.records import MATRIX, MODEL, SECTION
from slipstream.backends.native.kernels.vectors import locator

ALIGN = 64
"""The number of outputs of a matrix is padded with zeros to a multiple of this."""

BAND = 48
"""Maximum rows of a unit of work."""

PLAIN, NORM, GATE, ACTIVATE, PACKED = map(np.int64, range(5))  # typed: each literal argument would have its own type
"""How a row is transformed before a product. PACKED: the row is packed already, as a tile of its own."""

_PAIRS, _INT8_PAIRS, _TWICE = (FORMATS.index(fmt) for fmt in (BFLOAT16_PAIRS, INT8_PAIRS, INT8_QUADS_TWICE))
_round_16, _round_32, _round_64 = (locator(round_groups, group, 8) for group in (16, 32, 64))
_wide_16, _wide_32, _wide_64 = (locator(round_groups, group, 16) for group in (16, 32, 64))
_WIDE, _ADDED = tuple(fmt.wide for fmt in FORMATS), tuple(fmt.added for fmt in FORMATS)
_OFFSET = np.int32(byte_offset())
_MOST = 127 * 256 + 127  # the largest number whose rounded upper byte is 127


@kernel()
def copy(x, out):
    for i in range(out.shape[0]):
        out[i] = x[i]


@kernel()
def matrix_at(address, number):
    """Record `number` of the array of MATRIX records at an address."""
    return carray(pointer(address), (number + 1,), MATRIX)[number]


@kernel()
def section_at(address, number):
    """Record `number` of the array of SECTION records at an address."""
    return carray(pointer(address), (number + 1,), SECTION)[number]


@kernel()
def tiles_of(rows, most):
    """Number of tiles for `rows` rows, of at most `most` rows each."""
    return (rows + most - 1) // most


@kernel()
def first_of(tile, rows, most):
    """The first row of a tile. Tiles have similar numbers of rows, because a tile of one row loads as many weights as a
    full tile."""
    return tile * rows // tiles_of(rows, most)


@kernel(fastmath=EXACT)
def _round(x, most, out):
    """Round a row to integers in [-most, most]; its largest absolute value becomes `most`. Returns the value of the
    integer 1."""
    top = max_abs(x)
    factor = np.float32(most) / max(top, np.float32(1e-30))
    for i in range(x.shape[0]):
        out[i] = np.int32(np.floor(x[i] * factor + np.float32(0.5)))
    return top / np.float32(most)


@kernel()
def _as_bfloat16(bits):
    """The bits of a float32, rounded to a bfloat16 (to nearest, ties to even) in the lower half."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@kernel()
def _pack_pairs(x, base, r, count):
    bits, half = x.view(np.uint32), x.shape[0] // 2
    out = words(base, half * count)
    for i in range(half):
        low, high = np.uint32(_as_bfloat16(bits[2 * i])), np.uint32(_as_bfloat16(bits[2 * i + 1]))
        out[i * count + r] = np.int32(np.uint32(low | np.uint32(high << np.uint32(16))))


@kernel()
def _pack_int8_pairs(x, base, r, count, narrow):
    n = x.shape[0]
    most = min(2**15 - 1, (2**31 - 1) // (127 * n))  # so that no sum overflows
    floats(base, count)[r] = _round(x, most, narrow[:n])
    out = words(base + 4 * count, n // 2 * count)
    for i in range(n // 2):
        out[i * count + r] = np.int32((narrow[2 * i] & np.int32(0xFFFF)) | np.int32(narrow[2 * i + 1] << np.int32(16)))


@kernel()
def _pack_quads_twice(x, base, r, count, narrow, bytes):
    n = x.shape[0]
    floats(base, count)[r] = _round(x, _MOST, narrow[:n])
    firsts = words(base + 4 * count, 2 * count)
    upper, lower = bytes[:n], bytes[n : 2 * n]
    above, below = np.int32(0), np.int32(0)
    for i in range(n):
        high = np.int32((narrow[i] + 128) >> 8)
        low = np.int32(narrow[i] - 256 * high)
        upper[i], lower[i] = np.int8(high), np.int8(low)
        above += high
        below += low
    firsts[r], firsts[count + r] = np.int32(-_OFFSET * above), np.int32(-_OFFSET * below)
    out = words(base + 12 * count, n // 2 * count)
    whole_upper, whole_lower = upper.view(np.int32), lower.view(np.int32)
    for i in range(n // 4):
        out[2 * i * count + r] = whole_upper[i]
        out[(2 * i + 1) * count + r] = whole_lower[i]


@kernel()
def norm_row(model, row, weight, bias, out):
    """Apply the model's kind of norm to one row [d]."""
    n = row.shape[0]
    if model.layer_norm:
        layer_norm(row, floats(weight, n), floats(bias, n), model.eps, out)
    else:
        rms_norm(row, floats(weight, n), model.eps, out)


@kernel()
def _transform(job, row, out):
    """out [width] = the transformation of a row by `mode`."""
    model = carray(pointer(job.model), (1,), MODEL)[0]
    if job.mode == NORM:
        norm_row(model, row, job.weight, job.bias, out)
    elif job.mode == GATE:
        gate(model.activation, model.limit, row, out)
    elif job.mode == ACTIVATE:
        activate(model.activation, row, out)


@kernel()
def _interleave(job, matrix, first, count):
    """Join rows that are packed alone to one tile, by interleaving first their words of 32 bits, then their activations
    by groups."""
    bytes, group = matrix.row_bytes, max(matrix.group, 1)
    numbers, groups = bytes // 4, matrix.columns // group
    if matrix.group:
        numbers = 3 * groups  # see `block_tiles.block_tile`
    each = (bytes // 4 - numbers) // groups
    chosen, out = integers(job.gather, first + count), words(job.packed + first * bytes, count * bytes // 4)
    for r in range(count):
        row = words(job.inputs + bytes * chosen[first + r], bytes // 4)
        for i in range(numbers):
            out[i * count + r] = row[i]
        for g in range(groups if matrix.group else 0):
            copy(row[numbers + g * each :], out[count * numbers + (g * count + r) * each :][:each])


@kernel()
def prepare(job, unit, thread):
    """Unit of work: transform the rows of one tile of a section and pack them.

    inputs: float32 rows, `stride` apart. gather: int64 [rows], the numbers of the rows to pack, or 0 for all rows in
    order. The tile is written to packed + first * row_bytes, in the layout of `tiles.matrix_tile` for the format.
    """
    section, tile = section_at(job.sections, unit // job.pieces), unit % job.pieces
    scratch, matrix = job.scratch + thread * job.scratch_bytes, matrix_at(section.matrix, 0)
    if tile >= tiles_of(section.rows, matrix.most_rows):
        return
    width, columns, fmt = matrix.width, matrix.columns, matrix.format
    buffer = floats(scratch, columns)
    narrow, bytes = words(scratch + 4 * columns, columns), small(scratch + 8 * columns, 2 * columns)
    first = section.first + first_of(tile, section.rows, matrix.most_rows)
    count = section.first + first_of(tile + 1, section.rows, matrix.most_rows) - first
    if job.mode == PACKED:
        _interleave(job, matrix, first, count)
        return
    base = job.packed + first * matrix.row_bytes
    straight = count == 1 and fmt < _PAIRS  # the row itself is packed
    read = 2 * width if job.mode == GATE else width
    for r in range(count):
        number = first + r
        if job.gather:
            number = integers(job.gather, number + 1)[number]
        row = floats(job.inputs + 4 * job.stride * number, read)
        if straight:
            out = floats(base, width)
            if job.mode == PLAIN:
                copy(row, out)
            else:
                _transform(job, row, out)
            continue
        if job.mode != PLAIN:
            _transform(job, row, buffer[:width])
            row = buffer
        elif columns > width:
            copy(row, buffer[:width])
            row = buffer
        for i in range(width, columns):
            buffer[i] = 0
        row = row[:columns]
        if fmt < _PAIRS:
            interleaved = floats(base, columns * count)
            for i in range(columns):
                interleaved[i * count + r] = row[i]
        elif fmt == _PAIRS:
            _pack_pairs(row, base, r, count)
        elif fmt == _INT8_PAIRS:
            _pack_int8_pairs(row, base, r, count, narrow)
        elif fmt == _TWICE:
            _pack_quads_twice(row, base, r, count, narrow, bytes)
        else:
            if _WIDE[fmt]:
                round_row = _wide_64() if matrix.group == 64 else _wide_32() if matrix.group == 32 else _wide_16()
            else:
                round_row = _round_64() if matrix.group == 64 else _round_32() if matrix.group == 32 else _round_16()
            call(round_row, (address_of(row), base, r, count, columns, _ADDED[fmt]))


@kernel()
def _finish(job, logits):
    """Scale and cap logits."""
    if job.cap > 0:
        cap_in_place(logits, job.scale, job.cap)
        return
    for i in range(logits.shape[0]):
        logits[i] *= job.scale


@kernel()
def product(job, unit, thread):
    """Unit of work: compute `share` outputs for a band of a section's packed rows; see `tiles.matrix_tile`."""
    section, piece = section_at(job.sections, unit // job.pieces), unit % job.pieces
    matrix = matrix_at(section.matrix, 0)
    tiles = tiles_of(section.rows, matrix.most_rows)
    band, block = piece % job.bands, piece // job.bands
    low = block * job.share
    high = min(low + job.share, matrix.outs)
    for o in range(low, high, ALIGN):  # the weights of ALIGN outputs stay in cache while all rows use them
        outs = min(ALIGN, high - o)
        for tile in range(band * tiles // job.bands, (band + 1) * tiles // job.bands):
            first = section.first + first_of(tile, section.rows, matrix.most_rows)
            count = section.first + first_of(tile + 1, section.rows, matrix.most_rows) - first
            x, y = job.packed + first * matrix.row_bytes, job.y + 4 * (first * job.stride + o)
            weights, scales, bias = matrix.weights + o * matrix.out_bytes, matrix.scales + 4 * o, matrix.bias + 4 * o
            call(matrix.tile, (weights, scales, bias, x, y, matrix.columns, outs, count, job.stride, job.add))
            if job.scale != 1 or job.cap > 0:
                for r in range(count):
                    _finish(job, floats(y + 4 * job.stride * r, outs))


@kernel()
def merge(job, unit, thread):
    """Unit of work: `each` rows. x = factor * (x + scale * y), where y is normalised first if there is a norm."""
    for r in range(unit * job.each, min((unit + 1) * job.each, job.rows)):
        x, y = floats(job.x + 4 * job.stride * r, job.width), floats(job.y + 4 * job.y_stride * r, job.width)
        if job.norm:
            rms_norm(y, floats(job.norm, job.width), job.eps, y)
        for i in range(job.width):
            x[i] = (x[i] + job.scale * y[i]) * job.factor
