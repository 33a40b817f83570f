"""A decoder: a pass over packed rows, and several steps in one call. Nothing is prepared again when the number of rows
changes, as it does in nearly every step of speculation. Rows are batch-invariant.

R rows, d width, V vocabulary, K steps, B sequences.
"""

from __future__ import annotations

import numpy as np

from slipstream.backends.native.kernels.arithmetic import is_finite, pick
from slipstream.backends.native.kernels.attention import rows_at
from slipstream.backends.native.kernels.compiled import entry, kernel
from slipstream.backends.native.kernels.layer import embed, layer_of, next_rows, room, run_layer
from slipstream.backends.native.kernels.matrices import transformed
from slipstream.backends.native.kernels.memory import address_of, floats
from slipstream.backends.native.kernels.products import NORM, copy, norm_row
from slipstream.backends.native.kernels.records import ADD, FINE, NO_SUCH_POSITION, NO_SUCH_TOKEN, NOT_FINITE, NOTHING


@kernel()
def _copy_tap(model, space, count, taps, tap, tapped):
    """Copy the residual stream to each element of `tapped` that asks for this tap."""
    for i in range(taps.shape[0]):
        if taps[i] == tap:
            for r in range(count):
                copy(floats(space.x + 4 * space.stride * r, model.width), tapped[i, r])


@kernel()
def _pass(
    board, model, cache, rows, tokens, given, first, last, wanted, alone, taps, tapped, stream, logits, arena, threads
):
    """See `forward`."""
    board.threads = threads
    count = rows.count
    space = room(board, model, rows, arena, NOTHING, NOTHING)
    if space.bytes > arena.shape[0]:
        return -space.bytes
    if first == 0:
        if not embed(model.embed, tokens, space.x, space.stride, NOTHING):
            return NO_SUCH_TOKEN
        if model.positions.count > 0:
            positions, at = np.empty(count, np.int64), rows_at(rows.at, count)
            for r in range(count):
                positions[r] = at[r].position
            if not embed(model.positions, positions, space.x, space.stride, ADD):
                return NO_SUCH_POSITION
    else:
        for r in range(count):
            copy(given[r], floats(space.x + 4 * space.stride * r, model.width))
    everyone = np.arange(count)
    _copy_tap(model, space, count, taps, first, tapped)
    for number in range(first, last):
        layer = layer_of(model, number)
        # The last layer computes only keys and values for the other rows.
        active = wanted if alone and number == last - 1 else everyone
        run_layer(
            board, model, cache, rows, number, space.x, space.stride, NORM, layer.norm, layer.norm_bias, active,
        )  # fmt: skip
        _copy_tap(model, space, count, taps, number + 1, tapped)
    for i in range(taps.shape[0]):
        if taps[i] == -1:
            for r in range(count):
                norm_row(
                    model,
                    floats(space.x + 4 * space.stride * r, model.width),
                    model.norm,
                    model.norm_bias,
                    tapped[i, r],
                )
    for r in range(stream.shape[0]):
        copy(floats(space.x + 4 * space.stride * r, model.width), stream[r])
    state, asked = FINE, wanted.shape[0]
    for a in range(asked):
        if not is_finite(floats(space.x + 4 * space.stride * (a if alone else wanted[a]), model.width)):
            state = NOT_FINITE
    if asked > 0:
        gather = NOTHING if alone else address_of(wanted)
        transformed(
            board, model, model.head, space.x, space.stride, asked, NORM, model.norm, model.norm_bias, gather,
            address_of(logits), logits.shape[1], NOTHING,
        )  # fmt: skip
    return state


@entry
def forward(
    boards, models, caches, rows, tokens, given, first, last, wanted, alone, taps, tapped, stream, logits, arena,
    threads,
):  # fmt: skip
    """Run layers first..last-1 over R rows; keys and values are written to the cache.

    tokens   int64 [R], if first is 0; else `given` float32 [R, d] is the residual stream that the layers start from
    wanted   int64 [A], increasing: the rows whose logits [A, padded V] are computed, by the final norm and head
    alone    whether only these rows are needed: the last layer then computes only them
    taps     int64 [T]: numbers of layers, -1: after the final norm; the residual stream there is written to tapped
             [T, R, d]
    stream   [R, d] receives the residual stream at the end, or is empty
    arena    uint8: scratch memory; threads: number of threads
    Returns FINE, NOT_FINITE (some logits are computed from an infinite or NaN value), NO_SUCH_TOKEN or NO_SUCH_POSITION
    (nothing was done), or -n: n bytes of arena are needed.
    """
    return _pass(
        boards[0], models[0], caches[0], rows[0], tokens, given, first, last, wanted, alone, taps, tapped, stream,
        logits, arena, threads,
    )  # fmt: skip


@entry
def decode(
    boards, models, caches, rows, after, tokens, last, depth, picks, drawn, logits, probs, stream, later, arena, threads
):
    """Decode K tokens of each of B sequences: first the pending rows, then one row per sequence and step, with the
    token of the step before.

    tokens [M]   of the pending rows; last int64 [B]: the last row of each sequence
    depth        number of layers to run
    picks        `Picks`: how tokens are picked
    drawn        [K, B] receives the tokens, logits [K, B, padded V] the raw logits, and probs [K, B, V], in float64,
                 their distributions; unchanged if maxima are picked
    stream       if not empty: receives the residual stream of the pending rows [M, d]; the last tokens are then
                 processed, too, and later [K, B, d] receives the residual stream of the drawn tokens
    Returns the same as `forward`; NOT_FINITE if any step returned it.
    """
    steps, streams = drawn.shape[0], stream.shape[0] > 0
    taps, tapped = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    nothing, bottom, each, state, here = np.empty((0, 0), np.float32), NOTHING, np.arange(drawn.shape[1]), FINE, rows[0]
    for j in range(steps + 1 if streams else steps):
        if j > 0:
            next_rows(here, last, after[0])
            tokens, here, last = drawn[j - 1], after[0], each
        wanted, out = (last, logits[j]) if j < steps else (each[:0], nothing)
        kept = nothing
        if streams:
            kept = stream if j == 0 else later[j - 1]
        result = _pass(
            boards[0], models[0], caches[0], here, tokens, nothing, bottom, depth, wanted, not streams, taps, tapped,
            kept, out, arena, threads,
        )  # fmt: skip
        if result != FINE:
            if result != NOT_FINITE:
                return result
            state = result
        if j < steps:
            pick(picks, j, logits[j], probs[j], drawn[j])
    return state
