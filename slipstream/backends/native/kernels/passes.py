"""Complete passes as compiled functions:

    _forward, decode   a decoder over packed rows; several decoding steps in one call
    draft_eagle        the draft of an EAGLE head (see `heads.eagle_head`) or an MTP layer
    read_context       the context of a DFlash head (see `heads.dflash_head`); its blocks are passes of a decoder
    draft_medusa       the logits of all Medusa heads (see `heads.medusa_heads`)

Nothing is prepared again when the number of rows changes, as it does in nearly every step of speculative decoding. Rows
are batch-invariant.

R rows, d width, V vocabulary (of the draft), K steps or heads, B sequences; W width of the target's states, T taps.
"""

import numpy as np

from slipstream.backends.native.kernels.arithmetic import add_silu, is_finite, pick, rms_norm
from slipstream.backends.native.kernels.attention import rows_at
from slipstream.backends.native.kernels.compiled import entry, kernel
from slipstream.backends.native.kernels.layer import embed, layer_of, next_rows, room, run_layer, side_embeddings
from slipstream.backends.native.kernels.matrices import linear, logits_of, scratch_of
from slipstream.backends.native.kernels.memory import address_of, floats, integers
from slipstream.backends.native.kernels.products import NORM, PLAIN, copy, matrix_at, norm_row
from slipstream.backends.native.kernels.records import ADD, FINE, NO_SUCH_POSITION, NO_SUCH_TOKEN, NOT_FINITE, NOTHING
from slipstream.backends.native.kernels.recurrent import advance

# --- decoders --------------------------------------------------------------------------------------------------------


@kernel()
def _copy_tap(model, space, count, taps, tap, tapped):
    """Copy the residual stream to the elements of `tapped` whose entry in `taps` is this tap."""
    for i in range(taps.shape[0]):
        if taps[i] == tap:
            for r in range(count):
                copy(floats(space.x + 4 * space.stride * r, model.width), tapped[i, r])


@kernel()
def _scale(x, factor):
    for i in range(x.shape[0]):
        x[i] *= factor


def _forward(
    boards, models, caches, packed, tokens, given, first, last, wanted, alone, taps, tapped, stream, logits, arena,
    threads,
):  # fmt: skip
    """Run layers first..last-1 over R rows (`packed`); keys and values are written to the cache.

    tokens   int64 [R], if first is 0; else `given` float32 [R, d] is the residual stream that the layers start from
    wanted   int64 [A], increasing: the rows whose logits [A, padded V] are computed, by the final norm and head
    alone    whether only the wanted rows are needed; the last layer then computes only these rows
    taps     int64 [T]: numbers of layers (-1: after the final norm); the residual stream of these layers is written to
             tapped [T, R, d]
    stream   [R, d] receives the residual stream at the end, or is empty
    arena    uint8: scratch memory; threads: number of threads
    Returns FINE, NOT_FINITE (some logits are computed from an infinite or NaN value), NO_SUCH_TOKEN or NO_SUCH_POSITION
    (nothing was done), or -n if n bytes of arena are needed.
    """
    board, model, cache, rows = boards[0], models[0], caches[0], packed[0]
    board.threads, board.experts_read = threads, 0
    count = rows.count
    space = room(board, model, rows, arena, NOTHING, NOTHING)
    if space.bytes > arena.shape[0]:
        return -space.bytes
    if first == 0:
        if not embed(model.embed, tokens, space.x, space.stride, NOTHING):
            return NO_SUCH_TOKEN
        if model.embedding_scale != 1:
            for r in range(count):
                _scale(floats(space.x + 4 * space.stride * r, model.width), model.embedding_scale)
        if model.embed_norm:
            for r in range(count):
                row = floats(space.x + 4 * space.stride * r, model.width)
                rms_norm(row, floats(model.embed_norm, model.width), model.eps, row)
        if model.positions.count > 0:
            positions, at = np.empty(count, np.int64), rows_at(rows.at, count)
            for r in range(count):
                positions[r] = at[r].position
            if not embed(model.positions, positions, space.x, space.stride, ADD):
                return NO_SUCH_POSITION
    else:
        for r in range(count):
            copy(given[r], floats(space.x + 4 * space.stride * r, model.width))
    if model.side_width > 0 and not side_embeddings(board, model, tokens):
        return NO_SUCH_TOKEN
    everyone = np.arange(count)
    _copy_tap(model, space, count, taps, first, tapped)
    for number in range(first, last):
        layer = layer_of(model, number)
        # The last layer computes only keys and values for the other rows.
        active = wanted if alone and number == last - 1 else everyone
        mode = NORM if layer.norm else PLAIN
        run_layer(board, model, cache, rows, number, space.x, space.stride, mode, layer.norm, layer.norm_bias, active)
        _copy_tap(model, space, count, taps, number + 1, tapped)
    for i in range(taps.shape[0]):
        if taps[i] == -1:
            for r in range(count):
                x = floats(space.x + 4 * space.stride * r, model.width)
                norm_row(model, x, model.norm, model.norm_bias, tapped[i, r])
    for r in range(stream.shape[0]):
        copy(floats(space.x + 4 * space.stride * r, model.width), stream[r])
    state, asked = FINE, wanted.shape[0]
    for a in range(asked):
        if not is_finite(floats(space.x + 4 * space.stride * (a if alone else wanted[a]), model.width)):
            state = NOT_FINITE
    if asked > 0:
        gather, mode = NOTHING if alone else address_of(wanted), NORM if model.norm else PLAIN
        logits_of(board, model, space.x, space.stride, asked, mode, gather, address_of(logits), logits.shape[1])
    if cache.states:
        advance(cache.states, cache.sequences, cache.lag)
    return state


forward, _pass = entry(_forward), kernel()(_forward)


@entry
def decode(
    boards, models, caches, rows, after, tokens, last, depth, picks, taps, tapped, drawn, logits, probs, stream, later,
    arena, threads,
):  # fmt: skip
    """Decode K tokens of each of B sequences: first the pending rows, then one row per sequence and step, with the
    token of the step before.

    tokens [M]   tokens of the pending rows
    last         int64 [B]: the last row of each sequence
    depth        number of layers to run
    picks        `Picks`: how tokens are picked, and whether the call may end before K steps (not if `stream` is filled)
    taps, tapped [K, T, B, d]: see `forward`; with taps, one row of each sequence is pending
    drawn        [K, B] receives the tokens
    logits       [K, B, padded V] receives the raw logits
    probs        float64 [K, B, V] receives the distributions of the tokens; unchanged if argmaxes are picked
    stream       if not empty, receives the residual stream of the pending rows [M, d]; the last tokens are then run
                 through the model, too, and later [K, B, d] receives the residual stream of the drawn tokens
    Returns the same as `forward`; NOT_FINITE if any step returned it.
    """
    steps, streams = drawn.shape[0], stream.shape[0] > 0
    nothing, bottom, each, state, here = np.empty((0, 0), np.float32), NOTHING, np.arange(drawn.shape[1]), FINE, rows
    for j in range(steps + 1 if streams else steps):
        if j > 0:
            next_rows(here[0], last, after[0])
            tokens, here, last = drawn[j - 1], after, each
        wanted, out = (last, logits[j]) if j < steps else (each[:0], nothing)
        kept = nothing
        if streams:
            kept = stream if j == 0 else later[j - 1]
        result = _pass(
            boards, models, caches, here, tokens, nothing, bottom, depth, wanted, not streams, taps,
            tapped[min(j, steps - 1)], kept, out, arena, threads,
        )  # fmt: skip
        if result != FINE:
            if result != NOT_FINITE:
                return result
            state = result
        if j < steps and not pick(picks, j, logits[j], probs[j], drawn[j]) and not streams:
            break
    return state


# --- draft heads -----------------------------------------------------------------------------------------------------


@kernel()
def _product(board, matrix, x, y):
    """y [R, padded outs] = x [R, columns] times a matrix. The arguments are arrays, because an array of which only the
    address is passed may be freed before the call returns."""
    linear(board, matrix, address_of(x), x.shape[1], x.shape[0], address_of(y), y.shape[1], NOTHING)


@kernel()
def _fuse(board, head, taps):
    """Map concatenated taps [R, T * W] to the input features of an EAGLE-3 or DFlash head [R, padded d]."""
    x, width, eps = taps.copy(), head.target_width, head.decoder.eps
    for r in range(x.shape[0]):
        for t in range(head.taps if head.tap_norms else 0):
            part = x[r, t * width : (t + 1) * width]
            rms_norm(part, floats(head.tap_norms + 4 * width * t, width), eps, part)
        if head.joint_norm:
            rms_norm(x[r], floats(head.joint_norm, x.shape[1]), eps, x[r])
    features = np.empty((x.shape[0], head.fc.outs), np.float32)
    _product(board, head.fc, x, features)
    return features


@kernel()
def _eagle_step(board, head, caches, rows, tokens, feature, wanted, after, logits, arena):
    """Run one pass over features [R, >= d] and the tokens that follow them. Writes the next features of the wanted rows
    to after [A, d], and their logits to logits [A, padded V]. Returns the same status as `_forward`."""
    model, count = head.decoder, rows.count
    space = room(board, model, rows, arena, head.fc.columns, head.fc.row_bytes)
    width, layers, first_version = model.width, model.count, head.feature_norm == 0
    plain = first_version and head.input_norms == 0
    side = np.empty((count, 2 * width if not first_version else head.fc.width), np.float32)
    embedded = np.empty((count, width), np.float32)
    if not embed(model.embed, tokens, address_of(embedded), width, NOTHING):
        return NO_SUCH_TOKEN
    for r in range(count):
        right, x = side[r, width:], floats(space.x + 4 * space.stride * r, width)
        if plain:
            copy(embedded[r], side[r, :width])
            copy(feature[r], right)
        elif first_version:
            rms_norm(embedded[r], floats(head.input_norms, width), model.eps, side[r, :width])
            rms_norm(feature[r], floats(head.input_norms + 4 * width, width), model.eps, right)
        else:
            rms_norm(embedded[r], floats(layer_of(model, NOTHING).norm, width), model.eps, side[r, :width])
            rms_norm(feature[r, :width], floats(head.feature_norm, width), model.eps, right)
            copy(right if head.normed_start else feature[r, :width], x)
    if first_version:
        linear(board, head.fc, address_of(side), side.shape[1], count, space.x, space.stride, NOTHING)
    everyone, side_at = np.arange(count), address_of(side)
    for number in range(layers):
        layer = layer_of(model, number)
        given, stride, mode = side_at, side.shape[1], PLAIN
        if first_version or number > 0:
            given, stride, mode = space.x, space.stride, PLAIN if plain and number == 0 else NORM
        active = wanted if number == layers - 1 else everyone
        run_layer(board, model, caches, rows, number, given, stride, mode, layer.norm, layer.norm_bias, active)
    state, asked = FINE, wanted.shape[0]
    for a in range(asked):
        x = floats(space.x + 4 * space.stride * a, width)
        if not is_finite(x):
            state = NOT_FINITE
        if head.normed_end:
            norm_row(model, x, model.norm, model.norm_bias, after[a])
        else:
            copy(x, after[a])
    if asked > 0:
        mode = PLAIN if plain or model.norm == 0 else NORM
        logits_of(board, model, space.x, space.stride, asked, mode, NOTHING, address_of(logits), logits.shape[1])
    return state


@entry
def draft_eagle(
    boards, heads, caches, rows, after_rows, tokens, features, from_head, wanted, picks, drawn, after, logits, probs,
    arena, threads
):  # fmt: skip
    """Run packed rows, then draft K tokens after the wanted rows, one after another.

    tokens [R]     the tokens that follow the features
    features       concatenated taps [R, T * W] or, with `from_head`, outputs of the head [R, d]
    after_rows     ROWS with room for B rows
    wanted         int64 [A], increasing; if K > 0, the last row of each sequence: A = B
    picks          `Picks`: how tokens are picked, and whether the call ends before K
    drawn          [K, B] receives the draft ids; K = 0: one pass, nothing is drawn
    after          [A, d] receives the next features of the wanted rows in the last step
    logits, probs  [K or 1, A, padded V] and float64 [K, B, V]: see `decode`
    Returns the same as `forward`; NOT_FINITE if any step returned it.
    """
    boards[0].threads = threads
    head, steps, state, here = heads[0], drawn.shape[0], FINE, rows[0]
    each, feature, tokens_now = np.arange(wanted.shape[0]), features, tokens
    space = room(boards[0], head.decoder, here, arena, head.fc.columns, head.fc.row_bytes)
    if space.bytes > arena.shape[0]:
        return -space.bytes
    if not from_head and head.feature_norm != 0:
        feature = _fuse(boards[0], head, features)
    for j in range(max(steps, 1)):
        if j > 0:
            ids = integers(head.ids, head.id_count)
            tokens_now = np.empty(drawn.shape[1], np.int64)
            for b in range(drawn.shape[1]):
                tokens_now[b] = ids[drawn[j - 1, b]]
            next_rows(here, wanted, after_rows[0])
            here, wanted, feature = after_rows[0], each, after
            if room(boards[0], head.decoder, here, arena, head.fc.columns, head.fc.row_bytes).bytes > arena.shape[0]:
                return -2 * arena.shape[0]
        result = _eagle_step(boards[0], head, caches[0], here, tokens_now, feature, wanted, after, logits[j], arena)
        if result != FINE:
            if result != NOT_FINITE:
                return result
            state = result
        if j < steps and not pick(picks, j, logits[j], probs[j], drawn[j]):
            break
    return state


@entry
def read_context(boards, heads, caches, packed, taps, arena, threads):
    """Write the keys and values of the context of a DFlash head: R rows with concatenated taps [R, T * W]. Returns
    FINE, or -n if n bytes of arena are needed."""
    board, head, rows = boards[0], heads[0], packed[0]
    board.threads = threads
    space = room(board, head.decoder, rows, arena, head.fc.columns, head.fc.row_bytes)
    if space.bytes > arena.shape[0]:
        return -space.bytes
    x, nobody, model, norm = _fuse(board, head, taps), np.empty(0, np.int64), head.decoder, head.feature_norm
    for number in range(model.count):
        run_layer(
            board, model, caches[0], rows, number, address_of(x), x.shape[1], NORM, norm, NOTHING, nobody
        )  # fmt: skip
    return FINE


@entry
def draft_medusa(boards, heads, hidden, states, logits, arena, threads):
    """Compute the logits of all Medusa heads: hidden [B, d] -> logits [K, B, padded V]. states [K, B, d] is scratch.
    Returns FINE, or -n if n bytes of arena are needed."""
    board, head = boards[0], heads[0]
    board.threads = threads
    count, rows, width = states.shape
    columns, bytes, together = head.first.columns, head.first.row_bytes, count // head.outs * rows
    for number in range(head.laters):
        bytes = max(bytes, matrix_at(head.later, number).row_bytes)
    for number in range(head.outs):
        matrix = matrix_at(head.out, number)
        bytes, columns = max(bytes, matrix.row_bytes), max(columns, matrix.columns)
    scratch = (scratch_of(columns) + 63) // 64 * 64
    base = (address_of(arena) + 63) // 64 * 64
    packed = base + board.size * scratch
    end = packed + max(rows, together) * bytes
    if end - address_of(arena) > arena.shape[0]:
        return address_of(arena) - end
    board.prepare.scratch, board.prepare.scratch_bytes, board.room.packed = base, scratch, packed
    wide = np.empty((rows, head.first.outs), np.float32)
    _product(board, head.first, hidden, wide)
    for k in range(count):
        for r in range(rows):
            copy(hidden[r], states[k, r])
            add_silu(wide[r, k * width : (k + 1) * width], states[k, r])
    for number in range(head.laters):
        state, matrix = states[number % count], matrix_at(head.later, number)
        _product(board, matrix, state, wide)
        for r in range(rows):
            add_silu(wide[r, :width], state[r])
    for part in range(head.outs):  # a matrix that all heads share is read once
        given, output = states[part * (count // head.outs)], logits[part * (count // head.outs)]
        matrix = matrix_at(head.out, part)
        linear(board, matrix, address_of(given), width, together, address_of(output), logits.shape[2], NOTHING)
    return FINE
