"""A decoder: a pass over packed rows, and several steps in one call.

A pass is one call that knows no shapes beforehand: nothing is prepared anew when the number of rows changes, as it does
in nearly every step of speculation. Weights are read as they are kept, in 16 bits where the checkpoint has no more,
which is exact and half the memory traffic of float32, the bound of plain decoding. A row is bitwise the same whichever
rows are beside it (batch-invariant).

R rows, d width, V vocabulary, K steps, B sequences.
"""

from __future__ import annotations

import numpy as np

from slipstream.backends.native.kernels.arithmetic import is_finite
from slipstream.backends.native.kernels.attention import rows_at
from slipstream.backends.native.kernels.compiled import entry, kernel
from slipstream.backends.native.kernels.layer import (
    ADD,
    FINE,
    NO_SUCH_POSITION,
    NO_SUCH_TOKEN,
    NOT_FINITE,
    copy,
    embed,
    layer_of,
    norm_row,
    put_behind,
    room,
    run_layer,
)  # fmt: skip
from slipstream.backends.native.kernels.matrices import multiply, prepare
from slipstream.backends.native.kernels.memory import address_of, floats
from slipstream.backends.native.kernels.picks import pick
from slipstream.backends.native.kernels.records import NOTHING
from slipstream.backends.native.kernels.rows import NORM


@kernel()
def _keep(model, own, count, taps, tap, tapped):
    """Copy the residual stream to wherever this tap is wanted."""
    for i in range(taps.shape[0]):
        if taps[i] == tap:
            for r in range(count):
                copy(floats(own.x + 4 * own.stride * r, model.width), tapped[i, r])


@kernel()
def _pass(
    board, model, cache, rows, tokens, given, first, last, wanted, alone, taps, tapped, stream, logits, arena, threads
):
    """See `forward`."""
    board.threads = threads
    count = rows.count
    own = room(board, model, rows, arena, NOTHING, NOTHING)
    if own.bytes > arena.shape[0]:
        return -own.bytes
    if first == 0:
        if not embed(model.embed, tokens, own.x, own.stride, NOTHING):
            return NO_SUCH_TOKEN
        if model.positions.count > 0:
            positions, at = np.empty(count, np.int64), rows_at(rows.at, count)
            for r in range(count):
                positions[r] = at[r].position
            if not embed(model.positions, positions, own.x, own.stride, ADD):
                return NO_SUCH_POSITION
    else:
        for r in range(count):
            copy(given[r], floats(own.x + 4 * own.stride * r, model.width))
    everyone = np.arange(count)
    _keep(model, own, count, taps, first, tapped)
    for number in range(first, last):
        layer = layer_of(model, number)
        # Of the other rows, keys and values are all that is wanted of the last layer.
        going = wanted if alone and number == last - 1 else everyone
        run_layer(
            board, model, cache, rows, number, own.x, own.stride, NORM, layer.norm, layer.norm_bias, going,
        )  # fmt: skip
        _keep(model, own, count, taps, number + 1, tapped)
    for i in range(taps.shape[0]):
        if taps[i] == -1:
            for r in range(count):
                norm_row(
                    model, floats(own.x + 4 * own.stride * r, model.width), model.norm, model.norm_bias, tapped[i, r]
                )
    for r in range(stream.shape[0]):
        copy(floats(own.x + 4 * own.stride * r, model.width), stream[r])
    state, asked = FINE, wanted.shape[0]
    for a in range(asked):
        if not is_finite(floats(own.x + 4 * own.stride * (a if alone else wanted[a]), model.width)):
            state = NOT_FINITE
    if asked > 0:
        prepare(
            board, model.head, own.x, own.stride, asked, NORM, model.norm, model.norm_bias, model.layer_norm, NOTHING,
            model.eps, NOTHING if alone else address_of(wanted), own.packed,
        )  # fmt: skip
        multiply(board, model.head, asked, own.packed, address_of(logits), logits.shape[1], NOTHING)
    return state


@entry
def forward(
    boards,
    models,
    caches,
    rows,
    tokens,
    given,
    first,
    last,
    wanted,
    alone,
    taps,
    tapped,
    stream,
    logits,
    arena,
    threads,
):
    """Layers first..last-1 over R rows; keys and values go into the cache.

    tokens   int64 [R], where first is 0; else `given` float32 [R, d] is the residual stream that the layers start from
    wanted   int64 [A], increasing: the rows whose logits [A, padded V] are made, by the final norm and head
    alone    whether nothing else is wanted: the last layer then goes on with these rows only
    taps     int64 [T], the residual stream after so many layers, -1: after the final norm; tapped [T, R, d] gains them
    stream   [R, d] gains the residual stream at the end, or is empty
    arena    uint8: memory for what lies between; threads: how many work
    Returns FINE, NOT_FINITE (an infinite or NaN value is behind some logits), NO_SUCH_TOKEN or NO_SUCH_POSITION
    (nothing was done), or a negative number: so many bytes of arena are needed.
    """
    return _pass(
        boards[0], models[0], caches[0], rows[0], tokens, given, first, last, wanted, alone, taps, tapped, stream,
        logits, arena, threads,
    )  # fmt: skip


@entry
def decode(
    boards, models, caches, rows, after, tokens, last, depth, picks, drawn, logits, probs, stream, later, arena, threads
):
    """Decode K tokens of each of B sequences: the pending rows first, then a row a sequence, each fed with the last.

    tokens [M]   of the pending rows; last int64 [B]: the last row of each sequence
    depth        layers that are run
    picks        `Picks`: how tokens are picked
    drawn        [K, B] gains the tokens, logits [K, B, padded V] the raw logits, and probs [K, B, V], in float64, what
                 each was drawn from; unchanged where maxima are picked
    stream       if not empty, the residual stream at the end of the pending rows [M, d]; the last tokens are then run,
                 too, and later [K, B, d] is theirs
    Returns as `forward`; NOT_FINITE if anything was.
    """
    steps, streams = drawn.shape[0], stream.shape[0] > 0
    taps, tapped = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    given, no_stream, no_logits = (
        np.empty((0, 0), np.float32),
        np.empty((0, 0), np.float32),
        np.empty((0, 0), np.float32),
    )
    bottom, each, state, here = NOTHING, np.arange(drawn.shape[1]), FINE, rows[0]
    for j in range(steps + 1 if streams else steps):
        if j > 0:
            put_behind(here, last, after[0])
            tokens, here, last = drawn[j - 1], after[0], each
        wanted, out = (last, logits[j]) if j < steps else (each[:0], no_logits)
        kept = no_stream
        if streams:
            kept = stream if j == 0 else later[j - 1]
        found = _pass(
            boards[0], models[0], caches[0], here, tokens, given, bottom, depth, wanted, not streams, taps, tapped,
            kept, out, arena, threads,
        )  # fmt: skip
        if found != FINE:
            if found != NOT_FINITE:
                return found
            state = found
        if j < steps:
            pick(picks, j, logits[j], probs[j], drawn[j])
    return state
