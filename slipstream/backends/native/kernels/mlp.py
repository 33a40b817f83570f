"""MLPs and mixtures of experts.

A mixture computes all experts that any row of a pass chose, and reads each of these experts once. One product
multiplies all pairs of a row and an expert by the experts' first matrices, and another product by their second
matrices. Pairs are in the order of experts. R rows, P pairs, d width.
"""

import numpy as np

from slipstream.backends.native.kernels import matrices
from slipstream.backends.native.kernels.arithmetic import exp, maximum, rms_norm, sigmoid
from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.memory import address_of, floats, where
from slipstream.backends.native.kernels.products import ACTIVATE, GATE, NORM, PACKED, PLAIN, copy, matrix_at
from slipstream.backends.native.kernels.records import NOTHING, SECTION

UP, DOWN = NOTHING, np.int64(1)
MOST_PAIRS = 512
"""Most pairs that are computed at a time, unless one expert has more. The limit bounds the memory for prompts."""
_LEFT_OUT = np.float32(-3e38)
"""Rank of an expert outside of the best groups. It is chosen only after all experts of the best groups."""


@kernel()
def expert_of(model, number, part):
    """MATRIX record of an expert; part: UP or DOWN."""
    return matrix_at(model.experts, 2 * number + part)


@kernel()
def _weigh(model, row):
    """Turn the scores of experts into weights, by the sigmoid or by the softmax over all experts."""
    count = row.shape[0]
    if model.sigmoid_experts:
        for e in range(count):
            row[e] = sigmoid(row[e])
        return
    top, total = maximum(row, count), np.float32(0)
    for e in range(count):
        row[e] = exp(row[e] - top)
        total += row[e]
    for e in range(count):
        row[e] /= total


@kernel()
def _leave_groups_out(model, ranks):
    """Give the experts outside of the best groups the lowest rank. Groups are ranked by their best experts."""
    each = ranks.shape[0] // model.groups
    worth = np.empty(model.groups, np.float32)
    for g in range(model.groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(g * each, (g + 1) * each):
            if ranks[e] > first:
                first, second = ranks[e], first
            elif ranks[e] > second:
                second = ranks[e]
        worth[g] = first if model.group_best == 1 else first + second
    for _ in range(model.groups - model.top_groups):
        worst = -1
        for g in range(model.groups):
            if worth[g] != np.inf and (worst < 0 or worth[g] <= worth[worst]):
                worst = g
        if worst >= 0:
            worth[worst] = np.inf
            ranks[worst * each : (worst + 1) * each] = _LEFT_OUT


@kernel()
def _choose(model, layer, scores, stride, count, chosen, shares):
    """Choose the `experts_per_token` best experts of each row by their scores [count, experts]; shares receives their
    weights. The chosen experts are distinct even if scores are NaN, because an expert has room for a row only once."""
    most = model.experts_per_token
    ranks = np.empty(layer.experts, np.float32)
    for r in range(count):
        row = floats(scores + 4 * stride * r, layer.experts)
        for e in range(layer.experts):  # compare scores, because the weights of large scores are equal
            ranks[e] = max(row[e], _LEFT_OUT)
        _weigh(model, row)
        if layer.correction or model.groups > model.top_groups:
            copy(row, ranks)
        if layer.correction:
            correction = floats(layer.correction, layer.experts)
            for e in range(layer.experts):
                ranks[e] += correction[e]
        if model.groups > model.top_groups:
            _leave_groups_out(model, ranks)
        taken = np.float32(0)
        for k in range(most):
            best = -1
            for e in range(layer.experts):
                if ranks[e] != -np.inf and (best < 0 or ranks[e] > ranks[best]):
                    best = e
            chosen[r, k], shares[r, k] = best, row[best]
            taken += row[best]
            ranks[best] = -np.inf
        for k in range(most):
            if model.normed_experts:
                shares[r, k] /= taken
            shares[r, k] *= model.experts_scale
            if layer.expert_scales:
                shares[r, k] *= floats(layer.expert_scales, layer.experts)[chosen[r, k]]


@kernel()
def inner(board, model, layer, up, norm, count):
    """Compute the first product of an MLP for the normalised first `count` rows of the residual stream."""
    room = board.room
    matrices.transformed(
        board, model, up, room.x, room.stride, count, NORM if norm else PLAIN, norm, layer.mlp_norm_bias, room.wide,
        room.wide_stride, NOTHING,
    )  # fmt: skip


@kernel()
def outer(board, model, down, count, y, stride, add):
    """y = the second product of an MLP, or y += it if `add`."""
    room = board.room
    matrices.transformed(
        board, model, down, room.wide, room.wide_stride, count, GATE if model.gated else ACTIVATE, NOTHING, NOTHING,
        y, stride, add,
    )  # fmt: skip


@kernel()
def _add_expert_of_all(board, model, layer, count, sums):
    """sums += the output of the shared expert, times the sigmoid of its score if there is a `shared_router`."""
    room = board.room
    shares = np.ones(count, np.float32)
    if layer.shared_gate:
        inner(board, model, layer, layer.shared_router, layer.mlp_norm, count)
        for r in range(count):
            shares[r] = sigmoid(floats(room.wide + 4 * room.wide_stride * r, 1)[0])
    inner(board, model, layer, layer.up, layer.mlp_norm, count)
    outer(board, model, layer.down, count, room.qkv, room.qkv_stride, NOTHING)
    for r in range(count):
        out = floats(room.qkv + 4 * room.qkv_stride * r, model.width)
        if layer.shared_out_norm:
            rms_norm(out, floats(layer.shared_out_norm, model.width), model.eps, out)
        for j in range(model.width):
            sums[r, j] += shares[r] * out[j]


@kernel()
def _sort(chosen, shares, starts, rows, weights):
    """Sort the pairs of a row and a chosen expert by expert: expert e has the pairs starts[e] to starts[e + 1] - 1.
    rows [P] and weights [P] receive row and weight of each pair. starts: int64 [experts + 1]."""
    starts[:] = 0
    for r in range(chosen.shape[0]):
        for k in range(chosen.shape[1]):
            starts[chosen[r, k] + 1] += 1
    for e in range(1, starts.shape[0]):
        starts[e] += starts[e - 1]
    free = starts.copy()
    for r in range(chosen.shape[0]):
        for k in range(chosen.shape[1]):
            at = free[chosen[r, k]]
            rows[at], weights[at] = r, shares[r, k]
            free[chosen[r, k]] += 1


@kernel()
def _fill_sections(model, layer, starts, first, last, part, sections):
    """Fill one SECTION with the pairs of each chosen expert among the experts first to last - 1. Returns the number of
    SECTIONs."""
    count = 0
    for e in range(first, last):
        if starts[e + 1] > starts[e]:
            section = sections[count]
            section.matrix = where(expert_of(model, layer.first_expert + e, part))
            section.first, section.rows = starts[e] - starts[first], starts[e + 1] - starts[e]
            count += 1
    return count


@kernel()
def _add_experts(board, model, layer, starts, first, last, rows, weights, sections, sums):
    """sums += the weighted outputs of the experts first to last - 1."""
    room, start = board.room, starts[first]
    count = _fill_sections(model, layer, starts, first, last, UP, sections)
    board.experts_read += count
    matrices.multiply_sections(
        board, model, sections, count, room.alone, NOTHING, PACKED, address_of(rows) + 8 * start, room.wide,
        room.wide_stride,
    )  # fmt: skip
    if model.weighted_inputs:  # scaling the output is the same: the product is linear
        outs = expert_of(model, layer.first_expert, UP).outs
        for p in range(start, starts[last]):
            row = floats(room.wide + 4 * room.wide_stride * (p - start), outs)
            for j in range(outs):
                row[j] *= weights[p]
            weights[p] = 1
    _fill_sections(model, layer, starts, first, last, DOWN, sections)
    matrices.multiply_sections(
        board, model, sections, count, room.wide, room.wide_stride, GATE if model.gated else ACTIVATE, NOTHING,
        room.chosen, room.stride,
    )  # fmt: skip
    for p in range(start, starts[last]):
        out = floats(room.chosen + 4 * room.stride * (p - start), model.width)
        for j in range(model.width):
            sums[rows[p], j] += weights[p] * out[j]


@kernel()
def mixture(board, model, layer, count, sums):
    """sums = the weighted outputs of each row's chosen experts. Only chosen experts are read. Their input is the norm
    of x. The outputs of a row are added in the order of experts."""
    room, most, experts = board.room, model.experts_per_token, layer.experts
    chosen, shares = np.empty((count, most), np.int64), np.empty((count, most), np.float32)
    inner(board, model, layer, layer.router, layer.router_norm, count)
    _choose(model, layer, room.wide, room.wide_stride, count, chosen, shares)
    starts, rows = np.empty(experts + 1, np.int64), np.empty(count * most, np.int64)
    weights, sections = np.empty(count * most, np.float32), np.empty(max(count, experts), SECTION)
    _sort(chosen, shares, starts, rows, weights)
    up = expert_of(model, layer.first_expert, UP)
    matrices.pack_alone(board, model, up, count, layer.experts_norm, layer.mlp_norm_bias, sections)
    sums[:] = 0
    first = 0
    while first < experts:
        last = first + 1
        while last < experts and starts[last + 1] - starts[first] <= room.pairs:
            last += 1
        if starts[last] > starts[first]:
            _add_experts(board, model, layer, starts, first, last, rows, weights, sections, sums)
        first = last
    if layer.experts_out_norm:
        for r in range(count):
            rms_norm(sums[r], floats(layer.experts_out_norm, model.width), model.eps, sums[r])
    if layer.up.outs > 0:
        _add_expert_of_all(board, model, layer, count, sums)
