"""A layer of a decoder over a paged KV cache, for models and draft heads.

R rows, d width, H query heads, Hk key/value heads, D head size, I inner width, B sequences.
"""

import numpy as np
from numba import carray, types

from slipstream.backends.native.kernels import latent, matrices, memory, recurrent
from slipstream.backends.native.kernels.arithmetic import activate, rms_norm
from slipstream.backends.native.kernels.attention import rows_at
from slipstream.backends.native.kernels.compiled import callback, kernel
from slipstream.backends.native.kernels.formats import BFLOAT16_PAIRS, FLOAT16, FLOAT32, FORMATS
from slipstream.backends.native.kernels.memory import address_of, floats, half, integers, pointer, shorts, small, where
from slipstream.backends.native.kernels.mlp import DOWN, MOST_PAIRS, UP, expert_of, inner, mixture, outer
from slipstream.backends.native.kernels.processor import PANEL, byte_offset
from slipstream.backends.native.kernels.products import ALIGN, copy
from slipstream.backends.native.kernels.records import ADD, ATTENTION, BOARD, CACHE, LAYER, MODEL, NOTHING, ROWS

_FLIPPED = np.int64(-128 if byte_offset() else 0)
"""XOR with this turns a stored byte into an int8."""
_NUMBERS = np.array([4 * fmt.table or range(-fmt.zero, 64 - fmt.zero) for fmt in FORMATS]).astype(np.int8)
"""The value of each integer of fewer than 8 bits, by format."""
_POWERS = np.array([fmt.powers for fmt in FORMATS])
_FLOAT32, _FLOAT16, _PAIRS = FORMATS.index(FLOAT32), FORMATS.index(FLOAT16), FORMATS.index(BFLOAT16_PAIRS)

_ONE = np.float32(1)


@kernel()
def padded(n):
    return (n + ALIGN - 1) // ALIGN * ALIGN


@kernel()
def layer_of(model, number):
    """LAYER record of a model."""
    return carray(pointer(model.layers), (model.count,), LAYER)[number]


@kernel()
def next_rows(rows, last, after):
    """Fill `after` with one row per sequence b: the row that follows row last[b] and sees all rows before it."""
    count = last.shape[0]
    old, new = rows_at(rows.at, rows.count), rows_at(after.at, count)
    for b in range(count):
        slot, position = old[last[b]].slot + 1, old[last[b]].position + 1
        new[b].sequence, new[b].slot, new[b].position = b, slot, position
        new[b].length, new[b].past = slot + 1, slot
    after.count, after.stride, after.tables = count, 0, rows.tables


@kernel()
def _widest(model):
    """The largest values over all layers: (columns of a matrix, bytes of a packed row, outputs of the first product of
    an MLP, size of a head, inputs of a layer's output product, outputs of a layer's first product, scratch bytes of a
    recurrence, and for latent attention floats and packed bytes of the vectors of all heads)"""
    columns, bytes, wide, size, queries, projected = model.head.columns, model.head.row_bytes, 0, 0, 0, 0
    scratch, up, up_bytes = 0, 0, 0
    for number in range(model.count):
        layer = layer_of(model, number)
        inner = (layer.up, layer.down, layer.router, layer.shared_router, layer.side_gate, layer.side_out)
        outer = (layer.qkv, layer.second, layer.third, layer.o, layer.beside, layer.beside_o, layer.latent.q_b)
        for matrix in (*outer, *inner, model.side_projection):
            columns, bytes = max(columns, matrix.columns), max(bytes, matrix.row_bytes)
        wide = max(wide, layer.up.outs, layer.shared_router.outs, layer.side_gate.outs)
        size, queries = max(size, layer.size), max(queries, layer.o.width + layer.beside_o.width)
        projected = max(projected, layer.qkv.outs, layer.beside.outs, (layer.heads + 2 * layer.kv_heads) * layer.size)
        projected = max(projected, layer.second_at + layer.second.outs, layer.third_at + layer.third.outs)
        scratch = max(scratch, recurrent.scratch_of(layer.recurrent))
        if layer.latent.rank:
            wanted, read, here, here_bytes = latent.widths(layer)
            columns, queries, up, up_bytes = (
                max(columns, wanted), max(queries, read), max(up, here), max(up_bytes, here_bytes)
            )  # fmt: skip
    for number in range(model.expert_count):
        for part in (UP, DOWN):
            matrix = expert_of(model, number, part)
            columns, bytes = max(columns, matrix.columns), max(bytes, matrix.row_bytes)
        wide = max(wide, expert_of(model, number, UP).outs)
    return columns, bytes, wide, size, queries, projected, scratch, up, up_bytes


@kernel()
def room(board, model, rows, arena, columns, bytes):
    """Divide the arena (uint8) into the scratch memory of a pass over R rows. columns, bytes: columns, and bytes of a
    packed row, of a further matrix for which rows are prepared, or 0. If the arena is too small, `bytes` of the result
    is larger than the arena."""
    count, at, longest = rows.count, rows_at(rows.at, rows.count), 0
    for r in range(count):
        longest = max(longest, at[r].length)
    widest, row_bytes, inner_width, size, queries, projected, least, up_width, up_bytes = _widest(model)
    widest, row_bytes = max(widest, columns), max(row_bytes, bytes)
    stride, wide_stride = padded(model.width), padded(max(inner_width, model.most_experts))
    pairs = min(count * model.experts_per_token, max(count, MOST_PAIRS))
    qkv_stride, mixed_stride = padded(max(projected, model.width)), padded(queries)
    slots = (longest + 2 * PANEL - 1) // (2 * PANEL) * 2 * PANEL
    scratch = max(matrices.scratch_of(widest), matrices.attention_scratch(size, slots), least)
    scratch = (scratch + 63) // 64 * 64
    base = (address_of(arena) + 63) // 64 * 64
    board.prepare.scratch = board.attend.scratch = base
    board.prepare.scratch_bytes = board.attend.scratch_bytes = scratch
    x = base + 2 * board.size * scratch
    qkv = x + 4 * count * stride
    mixed = qkv + 4 * count * qkv_stride
    wide = mixed + 4 * count * mixed_stride
    chosen = wide + 4 * max(count, pairs) * wide_stride
    packed = chosen + 4 * pairs * stride
    alone = packed + (max(max(count, pairs) * row_bytes, count * up_bytes) + 63) // 64 * 64
    side = alone + (min(count, pairs) * row_bytes + 63) // 64 * 64
    up = side + 4 * count * model.side_projection.outs
    end = up + 4 * count * padded(up_width)
    space = board.room
    space.up, space.up_stride = up, padded(up_width)
    space.side, space.side_stride = side, model.side_projection.outs
    space.x, space.stride, space.qkv, space.qkv_stride = x, stride, qkv, qkv_stride
    space.mixed, space.mixed_stride, space.wide, space.wide_stride = mixed, mixed_stride, wide, wide_stride
    space.packed, space.alone, space.chosen, space.pairs = packed, alone, chosen, pairs
    space.bytes = end - address_of(arena)
    return space


@kernel()
def _add_block_row(table, token, out):
    """out += the embedding of one token, from a table stored in blocks; see `block_tiles`."""
    powers = _POWERS[table.format]
    heading, per, scale_bytes = (2 - powers) * PANEL * (1 + table.minima), table.span // table.group, 0
    if table.span > table.group:
        scale_bytes = PANEL * (1 + table.minima)
    block = scale_bytes + PANEL * table.group * table.bits // 8
    lane, count, upper = token % PANEL, table.width // table.group, table.bits - 4
    panel = table.values + token // PANEL * (count // per * (heading + per * block))
    for g in range(count):
        span = panel + g // per * (heading + per * block)
        here, minimum = span + heading + g % per * block, np.float32(0)
        if powers:
            exponent = np.int64(np.uint8(small(span + lane, 1)[0])) - 128
            scale = np.float32(np.int64((exponent + 1023) << 52).view(np.float64))
        else:
            scale = half(span + 2 * lane)
        if table.minima:
            minimum = half(span + 2 * PANEL + 2 * lane)
        if scale_bytes:
            scale *= np.float32(small(here + lane, 1)[0])
            minimum *= np.float32(small(here + scale_bytes - PANEL + lane, 1)[0])
        upper_at = here + scale_bytes + PANEL * table.group // 2
        for c in range(table.group):
            number = np.int32(0)
            if table.bits < 8:
                byte = small(here + scale_bytes + c // 8 * 4 * PANEL + 4 * lane + c % 4, 1)[0]
                stored = byte >> (c % 8 // 4 * 4) & 15
                if upper:
                    byte = small(upper_at + c * upper // 32 * 4 * PANEL + 4 * lane + c % 4, 1)[0]
                    stored |= (byte >> (c // 4 * upper % 8) & (1 << upper) - 1) << 4
                number = np.int32(_NUMBERS[table.format, stored])
            else:
                number = np.int32(small(here + scale_bytes + c // 4 * 4 * PANEL + 4 * lane + c % 4, 1)[0] ^ _FLIPPED)
            out[g * table.group + c] += np.float32(number) * scale + minimum


@kernel()
def _bfloat16(address):
    """Read the bfloat16 at an address as float32."""
    return np.int32(np.uint32(shorts(address, 1)[0]) << np.uint32(16)).view(np.float32)


@kernel()
def embed(table, tokens, x, stride, add):
    """Row r of x (an address) = (add ? row r : 0) + embedding of tokens[r]. Returns whether all tokens are in the
    table."""
    width = table.width
    for r in range(tokens.shape[0]):
        if tokens[r] < 0 or tokens[r] >= table.count:
            return False
    for r in range(tokens.shape[0]):
        out = floats(x + 4 * stride * r, width)
        first, apart = tokens[r] * width, 1
        if table.panelled:
            first, apart = tokens[r] // PANEL * PANEL * width + tokens[r] % PANEL, PANEL
        if not add:
            for i in range(width):
                out[i] = 0
        if table.span:
            _add_block_row(table, tokens[r], out)
        elif table.format == _FLOAT32:
            values = floats(table.values + 4 * first, apart * width)
            for i in range(width):
                out[i] += values[i * apart]
        elif table.format == _FLOAT16:
            for i in range(width):
                out[i] += half(table.values + 2 * (first + i * apart))
        elif table.format == _PAIRS and table.panelled:  # [width / 2, PANEL, 2] of a panel
            columns = width + width % 2  # the last pair is padded
            start = table.values + 2 * (tokens[r] // PANEL * PANEL * columns + 2 * (tokens[r] % PANEL))
            for i in range(width):
                out[i] += _bfloat16(start + 2 * (i // 2 * 2 * PANEL + i % 2))
        else:
            for i in range(width):
                out[i] += _bfloat16(table.values + 2 * (first + i * apart))
    return True


@kernel()
def _add_attention(board, model, layer, count):
    """x += the output product of attention, of a recurrence, or the sum of both."""
    room, scale = board.room, model.residual_scale * layer.out_scale
    if layer.beside_o.outs > 0:
        mixed = room.mixed + 4 * layer.o.width
        matrices.linear(board, layer.beside_o, mixed, room.mixed_stride, count, room.x, room.stride, ADD)
    if layer.out_norm == 0 and scale == 1:
        matrices.linear(board, layer.o, room.mixed, room.mixed_stride, count, room.x, room.stride, ADD)
        return
    matrices.linear(board, layer.o, room.mixed, room.mixed_stride, count, room.qkv, room.qkv_stride, NOTHING)
    matrices.merge(board, model, layer.out_norm, room.qkv, room.qkv_stride, count, scale, _ONE)


@kernel()
def _merge_array(board, model, norm, y, scale, factor):
    """Call `matrices.merge` for the rows of array y. As an argument of this function, y stays alive during the call."""
    matrices.merge(board, model, norm, address_of(y), y.shape[1], y.shape[0], scale, factor)


@kernel()
def _add_mlp(board, model, layer, count, factor):
    """x = factor * (x + the output of the MLP or of the mixture of experts)."""
    room, scale = board.room, model.residual_scale
    if layer.experts > 0:
        sums = np.empty((count, model.width), np.float32)
        mixture(board, model, layer, count, sums)
        _merge_array(board, model, layer.mlp_out_norm, sums, scale, factor)
        return
    inner(board, model, layer, layer.up, layer.mlp_norm, count)
    if layer.mlp_out_norm == 0 and scale == 1 and factor == 1:
        outer(board, model, layer.down, count, room.x, room.stride, ADD)
        return
    outer(board, model, layer.down, count, room.qkv, room.qkv_stride, NOTHING)
    matrices.merge(board, model, layer.mlp_out_norm, room.qkv, room.qkv_stride, count, scale, factor)


@kernel()
def _add_side(board, model, layer, number, active, count):
    """x = factor * (x + a projection of the rows' embeddings for this layer, gated by x)."""
    room, width = board.room, model.side_width
    matrices.linear(board, layer.side_gate, room.x, room.stride, count, room.wide, room.wide_stride, NOTHING)
    for a in range(count):
        row = floats(room.wide + 4 * room.wide_stride * a, width)
        side = floats(room.side + 4 * (room.side_stride * active[a] + number * width), width)
        activate(model.activation, row, row)
        for i in range(width):
            row[i] *= side[i]
    matrices.linear(board, layer.side_out, room.wide, room.wide_stride, count, room.qkv, room.qkv_stride, NOTHING)
    matrices.merge(
        board, model, layer.side_out_norm, room.qkv, room.qkv_stride, count, model.residual_scale, layer.factor
    )  # fmt: skip


@kernel()
def _project_array(board, matrix, x, y, stride):
    """Rows at address y = rows of array x times a matrix. As an argument of this function, x stays alive during the
    call."""
    matrices.linear(board, matrix, address_of(x), x.shape[1], x.shape[0], y, stride, NOTHING)


@kernel()
def side_embeddings(board, model, tokens):
    """Fill `room.side` with each token's embeddings for all layers (Gemma 4). Such an embedding is the sum of a row of
    `side_embed` and the normalised projection of the token's usual embedding. Returns whether all tokens are in the
    tables."""
    room, count, width, every = board.room, tokens.shape[0], model.side_width, model.count * model.side_width
    embedded, listed = np.empty((count, model.width), np.float32), np.empty((count, every), np.float32)
    if not embed(model.embed, tokens, address_of(embedded), model.width, NOTHING):
        return False
    if not embed(model.side_embed, tokens, address_of(listed), every, NOTHING):
        return False
    for r in range(count):
        for i in range(model.width):
            embedded[r, i] *= model.embedding_scale
    _project_array(board, model.side_projection, embedded, room.side, room.side_stride)
    shrink, grow = np.float32(model.width) ** np.float32(-0.5), np.float32(width) ** np.float32(0.5)
    for r in range(count):
        side = floats(room.side + 4 * room.side_stride * r, every)
        for i in range(every):
            side[i] *= shrink
        for number in range(model.count):
            part = side[number * width : (number + 1) * width]
            rms_norm(part, floats(model.side_norm, width), model.eps, part)
        for i in range(every):
            side[i] = (side[i] + grow * listed[r, i]) * np.float32(0.70710678118)
    return True


@callback(types.void(*[types.int64] * 12))
def one_layer(
    boards, models, caches, row, number, given, given_stride, mode, norm, norm_bias, active_rows, active_count
):
    """`run_layer` as a callback: `boards`, `models`, `caches`, `row` and `active_rows` are addresses."""
    board, model = carray(pointer(boards), (1,), BOARD)[0], carray(pointer(models), (1,), MODEL)[0]
    cache, rows = carray(pointer(caches), (1,), CACHE)[0], carray(pointer(row), (1,), ROWS)[0]
    active, room = integers(active_rows, active_count), board.room
    layer, count = layer_of(model, number), rows.count
    recurs, beside = layer.recurrent.kind != ATTENTION, layer.beside.outs > 0
    mixes = layer.qkv.outs > 0
    products = 3 if layer.third.outs else 2 if layer.second.outs else 1 if mixes else 0
    first, stride = latent.first_room(board, layer)
    for product in range(products):  # in order: each product overwrites the padding of the product before
        matrix, place = layer.qkv, first
        if product == 1:
            matrix, place = layer.second, room.qkv + 4 * layer.second_at
        elif product == 2:
            matrix, place = layer.third, room.qkv + 4 * layer.third_at
        matrices.transformed(
            board, model, matrix, given, given_stride, count, mode, norm, norm_bias, place, stride, NOTHING,
        )  # fmt: skip
    if layer.latent.rank:
        latent.absorb(board, model, layer, count, first, stride)
    if recurs:
        matrices.recur(board, layer.recurrent, cache, rows, room.qkv, room.qkv_stride, room.mixed, room.mixed_stride)
    if beside:
        matrices.transformed(
            board, model, layer.beside, given, given_stride, count, mode, norm, norm_bias, room.qkv, room.qkv_stride,
            NOTHING,
        )  # fmt: skip
    attends = beside or (mixes and not recurs)
    if attends:
        matrices.write_kv(board, model, layer, cache, rows, room.qkv, room.qkv_stride)
    if active_count == 0:
        return
    for a in range(active_count):
        if active[a] > a:
            row = floats(room.x + 4 * room.stride * active[a], model.width)
            copy(row, floats(room.x + 4 * room.stride * a, model.width))
            if recurs:
                row = floats(room.mixed + 4 * room.mixed_stride * active[a], layer.o.width)
                copy(row, floats(room.mixed + 4 * room.mixed_stride * a, layer.o.width))
    if attends:
        starts = np.empty(active_count + 1, np.int64)
        bundles, longest = matrices.group_rows(rows, active, layer.heads // layer.kv_heads, starts)
        matrices.attend(
            board, layer, cache, rows, active, starts, bundles, longest, room.qkv, room.qkv_stride,
            room.mixed + (4 * layer.o.width if beside else 0), room.mixed_stride,
        )  # fmt: skip
    if layer.latent.rank:
        latent.expand(board, model, layer, active_count)
    if layer.parallel:
        inner(board, model, layer, layer.up, layer.mlp_norm, active_count)
        _add_attention(board, model, layer, active_count)
        outer(board, model, layer.down, active_count, room.x, room.stride, ADD)
        return
    if mixes:
        _add_attention(board, model, layer, active_count)
    if layer.up.outs == 0 and layer.experts == 0:
        return
    if model.side_width > 0:
        _add_mlp(board, model, layer, active_count, _ONE)
        _add_side(board, model, layer, number, active, active_count)
    else:
        _add_mlp(board, model, layer, active_count, layer.factor)


@kernel()
def run_layer(board, model, cache, rows, number, given, given_stride, mode, norm, norm_bias, active):
    """Run one layer over R rows. Afterwards the first A rows of the residual stream [R, d] are the active rows; its
    other rows are undefined.

    given   address of the input of attention, before the transformation `mode` (NORM or PLAIN); keys and values of all
            R rows are written to the cache
    active  int64 [A], increasing: the rows for which the rest of the layer is computed
    """
    records = (where(board), where(model), where(cache), where(rows))
    args = (number, given, given_stride, mode, norm, norm_bias, address_of(active), active.shape[0])
    memory.call(board.run_layer, records + args)
