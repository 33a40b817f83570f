"""A layer of a decoder over a paged KV cache, for models and draft heads.

R rows, d width, H query heads, Hk key/value heads, D head size, I inner width, B sequences.
"""

import numpy as np
from numba import carray, types

from slipstream.backends.native.kernels import matrices, memory, recurrent
from slipstream.backends.native.kernels.arithmetic import exp, maximum
from slipstream.backends.native.kernels.attention import rows_at
from slipstream.backends.native.kernels.compiled import callback, kernel
from slipstream.backends.native.kernels.formats import BFLOAT16_PAIRS, FLOAT16, FLOAT32, FORMATS
from slipstream.backends.native.kernels.memory import address_of, floats, half, integers, pointer, shorts, small, where
from slipstream.backends.native.kernels.processor import PANEL, byte_offset
from slipstream.backends.native.kernels.products import ACTIVATE, ALIGN, GATE, NORM, PLAIN, copy, matrix_at
from slipstream.backends.native.kernels.records import ADD, ATTENTION, BOARD, CACHE, LAYER, MODEL, NOTHING, ROWS

_FLIPPED = np.int64(-128 if byte_offset() else 0)
"""Turns a stored byte into the int8 that it stands for."""
_FLOAT32, _FLOAT16, _PAIRS = FORMATS.index(FLOAT32), FORMATS.index(FLOAT16), FORMATS.index(BFLOAT16_PAIRS)

UP, DOWN = NOTHING, np.int64(1)


@kernel()
def padded(n):
    return (n + ALIGN - 1) // ALIGN * ALIGN


@kernel()
def layer_of(model, number):
    """LAYER record of a model."""
    return carray(pointer(model.layers), (model.count,), LAYER)[number]


@kernel()
def expert_of(model, number, part):
    """MATRIX record of an expert; part: UP or DOWN."""
    return matrix_at(model.experts, 2 * number + part)


@kernel()
def next_rows(rows, last, after):
    """Fill `after` with one row per sequence b: the one after its row last[b], which sees all rows before it."""
    count = last.shape[0]
    old, new = rows_at(rows.at, rows.count), rows_at(after.at, count)
    for b in range(count):
        slot, position = old[last[b]].slot + 1, old[last[b]].position + 1
        new[b].sequence, new[b].slot, new[b].position = b, slot, position
        new[b].length, new[b].past = slot + 1, slot
    after.count, after.stride, after.cos_sin = count, 0, rows.cos_sin


@kernel()
def _widest(model):
    """(widest input of a matrix in columns, widest bytes of a packed row, widest output of an MLP's first matrix, of a
    layer's first matrix, widest input of its second, and scratch bytes of recurrent layers)"""
    columns, bytes, wide, first, second, scratch = model.head.columns, model.head.row_bytes, 0, 0, 0, 0
    for number in range(model.count):
        layer = layer_of(model, number)
        for matrix in (layer.qkv, layer.o, layer.up, layer.down, layer.router):
            columns, bytes = max(columns, matrix.columns), max(bytes, matrix.row_bytes)
        wide, first, second = max(wide, layer.up.outs), max(first, layer.qkv.outs), max(second, layer.o.width)
        scratch = max(scratch, recurrent.scratch_of(layer.recurrent))
    for number in range(model.expert_count):
        for part in (UP, DOWN):
            matrix = expert_of(model, number, part)
            columns, bytes = max(columns, matrix.columns), max(bytes, matrix.row_bytes)
        wide = max(wide, expert_of(model, number, UP).outs)
    return columns, bytes, wide, first, second, scratch


@kernel()
def room(board, model, rows, arena, columns, bytes):
    """Divide the arena (uint8) for R rows. columns, bytes: size of a further matrix that rows are prepared for, or 0.
    If the arena is too small, `bytes` of the result is larger than the arena."""
    count, at, longest = rows.count, rows_at(rows.at, rows.count), 0
    for r in range(count):
        longest = max(longest, at[r].length)
    widest, row_bytes, wide, first, second, least = _widest(model)
    widest, row_bytes = max(widest, columns), max(row_bytes, bytes)
    stride, wide_stride = padded(model.width), padded(max(wide, model.most_experts))
    qkv_stride, mixed_stride = padded(max(first, model.width)), padded(second)
    slots = (longest + 2 * PANEL - 1) // (2 * PANEL) * 2 * PANEL
    scratch = max(matrices.scratch_of(widest), matrices.attention_scratch(model.size, slots), least)
    scratch = (scratch + 63) // 64 * 64
    base = (address_of(arena) + 63) // 64 * 64
    board.prepare.scratch = board.attend.scratch = base
    board.prepare.scratch_bytes = board.attend.scratch_bytes = scratch
    x = base + 2 * board.size * scratch
    qkv = x + 4 * count * stride
    mixed = qkv + 4 * count * qkv_stride
    inner = mixed + 4 * count * mixed_stride
    packed = inner + 4 * count * wide_stride
    end = packed + (count * row_bytes + 63) // 64 * 64
    space = board.room
    space.x, space.stride, space.qkv, space.qkv_stride = x, stride, qkv, qkv_stride
    space.mixed, space.mixed_stride, space.wide, space.wide_stride = mixed, mixed_stride, inner, wide_stride
    space.packed, space.bytes = packed, end - address_of(arena)
    return space


@kernel()
def _add_block_row(table, token, out):
    """out += the row of one token, of weights in blocks; see `block_tiles`."""
    heading, per, scale_bytes = 2 * PANEL * (1 + table.minima), table.span // table.group, 0
    if table.span > table.group:
        scale_bytes = PANEL * (1 + table.minima)
    block = scale_bytes + PANEL * table.group * table.bits // 8
    lane, count = token % PANEL, table.width // table.group
    panel = table.values + token // PANEL * (count // per * (heading + per * block))
    for g in range(count):
        span = panel + g // per * (heading + per * block)
        here, scale, minimum = span + heading + g % per * block, half(span + 2 * lane), np.float32(0)
        if table.minima:
            minimum = half(span + 2 * PANEL + 2 * lane)
        if scale_bytes:
            scale *= np.float32(small(here + lane, 1)[0])
            minimum *= np.float32(small(here + scale_bytes - PANEL + lane, 1)[0])
        for c in range(table.group):
            number = np.int32(0)
            if table.bits == 4:
                number = np.int32(
                    small(here + scale_bytes + c // 8 * 4 * PANEL + 4 * lane + c % 4, 1)[0] >> (c % 8 // 4 * 4) & 15
                )
            else:
                number = np.int32(small(here + scale_bytes + c // 4 * 4 * PANEL + 4 * lane + c % 4, 1)[0] ^ _FLIPPED)
            out[g * table.group + c] += np.float32(number) * scale + minimum


@kernel()
def _bfloat16(address):
    """The bfloat16 at an address, as float32."""
    return np.int32(np.uint32(shorts(address, 1)[0]) << np.uint32(16)).view(np.float32)


@kernel()
def embed(table, tokens, x, stride, add):
    """Row r of x (an address) = (add ? row r : 0) + embedding of tokens[r]; returns whether all are in the table."""
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
def _choose(model, layer, scores, stride, count, chosen, shares):
    """Choose the `experts_per_token` best experts of each row, by the softmax of scores [count, experts]; shares
    receives their weights. They are distinct, even if scores are NaN: `_mixture` has room for each row once."""
    most = model.experts_per_token
    for r in range(count):
        row = floats(scores + 4 * stride * r, layer.experts)
        top, total = maximum(row, layer.experts), np.float32(0)
        for e in range(layer.experts):
            row[e] = exp(row[e] - top)
            total += row[e]
        taken = np.float32(0)
        for k in range(most):
            best = -1
            for e in range(layer.experts):
                if row[e] != -1 and (best < 0 or row[e] > row[best]):
                    best = e
            chosen[r, k], shares[r, k] = best, row[best] / total
            taken += shares[r, k]
            row[best] = -1
        if model.normed_experts:
            for k in range(most):
                shares[r, k] /= taken


@kernel()
def _mlp(board, model, layer, up, down, count, gather, y, stride, add):
    """y = the output of an MLP for `count` rows of the residual stream: the first, or those of `gather` if not 0."""
    room = board.room
    matrices.transformed(
        board, model, up, room.x, room.stride, count, NORM, layer.mlp_norm, layer.mlp_norm_bias, gather, room.wide,
        room.wide_stride, NOTHING,
    )  # fmt: skip
    matrices.transformed(
        board, model, down, room.wide, room.wide_stride, count, GATE if model.gated else ACTIVATE, NOTHING, NOTHING,
        NOTHING, y, stride, add,
    )  # fmt: skip


@kernel()
def _mixture(board, model, layer, count, room):
    """x += the weighted outputs of each row's chosen experts. Only chosen experts are read. Their input is the layer's
    second norm of x; each row adds its experts in the order of their numbers."""
    most = model.experts_per_token
    chosen, shares = np.empty((count, most), np.int64), np.empty((count, most), np.float32)
    matrices.transformed(
        board, model, layer.router, room.x, room.stride, count, NORM, layer.mlp_norm, layer.mlp_norm_bias, NOTHING,
        room.wide, room.wide_stride, NOTHING,
    )  # fmt: skip
    _choose(model, layer, room.wide, room.wide_stride, count, chosen, shares)
    chosen_by, places = np.empty(count, np.int64), np.empty(count, np.int64)
    sums = np.zeros((count, model.width), np.float32)
    for e in range(layer.experts):
        count_here = NOTHING
        for r in range(count):
            for k in range(most):
                if chosen[r, k] == e:
                    chosen_by[count_here], places[count_here] = r, k
                    count_here += 1
        if count_here == 0:
            continue
        up, down = expert_of(model, layer.first_expert + e, UP), expert_of(model, layer.first_expert + e, DOWN)
        _mlp(board, model, layer, up, down, count_here, address_of(chosen_by), room.qkv, room.qkv_stride, NOTHING)
        for i in range(count_here):
            share, out = shares[chosen_by[i], places[i]], floats(room.qkv + 4 * room.qkv_stride * i, model.width)
            for j in range(model.width):
                sums[chosen_by[i], j] += share * out[j]
    for r in range(count):
        out = floats(room.x + 4 * room.stride * r, model.width)
        for j in range(model.width):
            out[j] += sums[r, j]


@callback(types.void(*[types.int64] * 12))
def one_layer(
    boards, models, caches, row, number, given, given_stride, mode, norm, norm_bias, active_rows, active_count
):
    """`run_layer` as a callback: `boards`, `models`, `caches`, `row` and `active_rows` are addresses."""
    board, model = carray(pointer(boards), (1,), BOARD)[0], carray(pointer(models), (1,), MODEL)[0]
    cache, rows = carray(pointer(caches), (1,), CACHE)[0], carray(pointer(row), (1,), ROWS)[0]
    active, room = integers(active_rows, active_count), board.room
    layer, count = layer_of(model, number), rows.count
    matrices.transformed(
        board, model, layer.qkv, given, given_stride, count, mode, norm, norm_bias, NOTHING, room.qkv, room.qkv_stride,
        NOTHING,
    )  # fmt: skip
    attention = layer.recurrent.kind == ATTENTION
    if not attention:
        matrices.recur(
            board, layer.recurrent, cache, rows, room.qkv, room.qkv_stride, room.mixed, room.mixed_stride
        )  # fmt: skip
    else:
        matrices.write_kv(board, model, layer, cache, number, rows, room.qkv, room.qkv_stride)
    if active_count == 0:
        return
    for a in range(active_count):
        if active[a] > a:
            row = floats(room.x + 4 * room.stride * active[a], model.width)
            copy(row, floats(room.x + 4 * room.stride * a, model.width))
    gather = active_rows
    if attention:
        starts = np.empty(active_count + 1, np.int64)
        bundles, longest = matrices.group_rows(rows, active, model.heads // model.kv_heads, starts)
        matrices.attend(
            board, model, layer, cache, number, rows, active, starts, bundles, longest, room.qkv, room.qkv_stride,
            room.mixed, room.mixed_stride,
        )  # fmt: skip
        gather = NOTHING
    matrices.transformed(
        board, model, layer.o, room.mixed, room.mixed_stride, active_count, PLAIN, NOTHING, NOTHING, gather, room.x,
        room.stride, ADD,
    )  # fmt: skip
    if layer.experts > 0:
        _mixture(board, model, layer, active_count, room)
    else:
        _mlp(board, model, layer, layer.up, layer.down, active_count, NOTHING, room.x, room.stride, ADD)


@kernel()
def run_layer(board, model, cache, rows, number, given, given_stride, mode, norm, norm_bias, active):
    """One layer over R rows. Afterwards the first A rows of the residual stream [R, d] are the active ones; the others
    are undefined.

    given   address of the input of attention, before the transformation `mode` (NORM or PLAIN); keys and values of all
            R rows are written to the cache
    active  int64 [A], increasing: the rows that are computed further
    """
    records = (where(board), where(model), where(cache), where(rows))
    args = (number, given, given_stride, mode, norm, norm_bias, address_of(active), active.shape[0])
    memory.call(board.run_layer, records + args)
