"""A decoder like Llama's without a runtime: a pass over packed rows, and chains that draft in one call.

A draft of two million parameters is made of operators more than of arithmetic: a hundred operators for a guess cost a
runtime several times what their numbers do, and a runtime readies each of them anew whenever the number of rows
changes, as it does in nearly every round of speculation. Here a pass is one call that knows no shapes beforehand.

Weights are read as they are kept, in 16 bits where the checkpoint has no more, which is exact and half the memory
traffic of float32, the bound of plain decoding. A row comes out the same, bit for bit, whichever rows are beside it.

R rows, d width, H query heads, Hk key/value heads, D head size, I inner width, V vocabulary, L layers, K steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.kernels.arithmetic import first_above, first_maximum, gated, norm, softmax, turn
from slipstream.kernels.attention import attend
from slipstream.kernels.compiled import entry, kernel
from slipstream.kernels.linear import Matrix, look_up, multiply

MAXIMUM, UNIFORMS, NOISE = range(3)


class Model(NamedTuple):
    """RMS norms, rotary positions, gated MLPs with silu."""

    embed: np.ndarray  # [V, d] in panels, of any kind but int8
    norms: np.ndarray  # float32 [2 L + 1, d]: of each layer before attention and before the MLP, then the final one
    inv_freq: np.ndarray  # float64 [D/2]
    turn_scale: float
    eps: np.float32
    heads: int
    windows: np.ndarray  # int64 [L]: see `attention.attend`
    head_norms: np.ndarray  # float32 [2 L, D]: RMS norms of query and of key heads, or empty
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    head: Matrix  # L = 1


class Cache(NamedTuple):
    """Paged keys [blocks, Hk, D, slots] and values [blocks, Hk, slots, D], float32, of each layer, and int64 tables
    [B, blocks] of who owns which block. Of keys, all slots are asked at once; of values, all D."""

    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    tables: np.ndarray


class Rows(NamedTuple):
    """Where R rows stand; int64 [R], but for `hidden`.

    sequence  row of the block tables
    slots     where the row's keys and values go
    position  of its rotation
    length    how many slots it looks at, its own being the last or, in a tree, among the last
    past      slots of its sequence that were there before, ...
    hidden    bool [R, n]: ... and which of those behind it does not see; n = 0 where every row sees its whole length
    """

    sequence: np.ndarray
    slots: np.ndarray
    position: np.ndarray
    length: np.ndarray
    past: np.ndarray
    hidden: np.ndarray


class Picks(NamedTuple):
    """How tokens are picked (see `Draws`), among the ids below `vocab`."""

    kind: int  # MAXIMUM, UNIFORMS or NOISE
    vocab: int
    heat: np.ndarray  # float64 [B], 1 / temperature
    uniforms: np.ndarray  # float64 [K, B]
    noise: np.ndarray  # float64 [K, B, V]


@kernel()
def _copy(x, out):
    for i in range(out.shape[0]):
        out[i] = x[i]


@kernel()
def _add(x, out):
    for i in range(out.shape[0]):
        out[i] += x[i]


@kernel()
def _keep(stream, taps, tap, tapped):
    """Copy the rows to wherever this tap is wanted."""
    for i in range(taps.shape[0]):
        if taps[i] == tap:
            for r in range(stream.shape[0]):
                _copy(stream[r], tapped[i, r])


@kernel()
def _forward(model, cache, rows, x, first, last, wanted, alone, taps, tapped, logits, threads):
    """See `forward`."""
    count, width, size = x.shape[0], x.shape[1], 2 * model.inv_freq.shape[0]
    heads, inner = model.heads, model.down.values.shape[2]
    kv_heads, slots = cache.values[0].shape[1:3]
    turned = (heads + kv_heads) * size
    flat, back = np.empty((count, width), np.float32), np.empty((count, model.down.values.shape[1]), np.float32)
    qkv, mixed = np.empty((count, model.qkv.values.shape[1]), np.float32), np.empty((count, heads * size), np.float32)
    wide, slim = np.empty((count, model.gate_up.values.shape[1]), np.float32), np.empty((count, inner), np.float32)
    cos, sin = np.empty((count, size // 2), np.float32), np.empty((count, size // 2), np.float32)
    for r in range(count):
        for j in range(size // 2):
            angle = rows.position[r] * model.inv_freq[j]
            cos[r, j], sin[r, j] = np.cos(angle) * model.turn_scale, np.sin(angle) * model.turn_scale
    place = np.arange(count)  # of each row that goes on
    _keep(x, taps, first, tapped)
    for layer in range(first, last):
        keys, values = cache.keys[layer], cache.values[layer]
        for r in range(count):
            norm(x[r], model.norms[2 * layer], model.eps, flat[r])
        multiply(model.qkv, layer, flat, count, qkv, threads)
        for r in range(count):
            for h in range(heads + kv_heads if model.head_norms.shape[0] > 0 else 0):
                own = qkv[r, h * size : (h + 1) * size]
                norm(own, model.head_norms[2 * layer if h < heads else 2 * layer + 1], model.eps, own)
            turn(qkv[r], heads + kv_heads, size, cos[r], sin[r])
            block, slot = cache.tables[rows.sequence[r], rows.slots[r] // slots], rows.slots[r] % slots
            for g in range(kv_heads):
                _copy(qkv[r, (heads + g) * size :], keys[block, g, :, slot])
                _copy(qkv[r, turned + g * size :], values[block, g, slot])
        if alone and layer == last - 1:  # of the others, keys and values were all that was wanted
            place = wanted
            for a in range(wanted.shape[0]):
                _copy(x[wanted[a]], x[a])  # wanted[a] >= a
        going = place.shape[0]
        attend(qkv, keys, values, cache.tables, rows, place, heads, model.windows[layer], mixed, threads)
        multiply(model.o, layer, mixed, going, back, threads)
        for a in range(going):
            _add(back[a], x[a])
            norm(x[a], model.norms[2 * layer + 1], model.eps, flat[a])
        multiply(model.gate_up, layer, flat, going, wide, threads)
        for a in range(going):
            gated(wide[a], slim[a])
        multiply(model.down, layer, slim, going, back, threads)
        for a in range(going):
            _add(back[a], x[a])
        _keep(x, taps, layer + 1, tapped)
    final = model.norms[model.norms.shape[0] - 1]
    for i in range(taps.shape[0]):
        if taps[i] == -1:
            for r in range(count):
                norm(x[r], final, model.eps, tapped[i, r])
    sound = True
    for a in range(wanted.shape[0]):
        sound &= norm(x[a if alone else wanted[a]], final, model.eps, flat[a])
    multiply(model.head, 0, flat, wanted.shape[0], logits, threads)
    return sound


@entry
def lookup(embed, tokens, x):
    """x[r] = the embedding of tokens[r]: see `Model.embed`."""
    look_up(embed, tokens, x)


@entry
def forward(model, cache, rows, x, first, last, wanted, alone, taps, tapped, logits, threads):
    """Layers first..last-1 on the residual stream x [R, d], in place; keys and values go into the cache.

    wanted   int64 [A], increasing: the rows whose logits [A, padded V] are made, by the final norm and head
    alone    whether nothing else is wanted: the last layer then goes on with these rows, in x[:A], and x[A:] is lost
    taps     int64 [T], the residual stream after so many layers, -1: after the final norm; tapped [T, R, d] gains them
    Returns whether the rows of the logits are finite.
    """
    return _forward(model, cache, rows, x, first, last, wanted, alone, taps, tapped, logits, threads)


@entry
def draft(model, cache, rows, tokens, last, depth, draws, drawn, logits, laws, stream, later, threads):
    """Draft K tokens for each of B sequences: the pending rows first, then a row a sequence, each fed with the last.

    tokens [M]   of the pending rows; last int64 [B]: the last row of each sequence
    depth        layers that are run
    draws        `Picks`: how
    drawn        [K, B] gains the tokens, logits [K, B, padded V] the raw logits, and laws [K, B, V], in float64, what
                 each was drawn from; of the kind MAXIMUM they stay as they are
    stream       if not empty, the residual stream at the end of the pending rows [M, d]; the last guesses are then run,
                 too, and later [K, B, d] is theirs
    Returns whether all was finite.
    """
    steps, count, streams = drawn.shape[0], drawn.shape[1], stream.shape[0] > 0
    width, none = model.embed.shape[1], np.empty((0, 0), np.float32)
    taps, tapped = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    each, sound = np.arange(count), True
    x = np.empty((tokens.shape[0], width), np.float32)
    for j in range(steps + 1 if streams else steps):
        if j > 0:
            slots = np.empty(count, np.int64)
            for b in range(count):
                slots[b] = rows.slots[last[b]] + 1
            hidden = np.empty((count, 0), np.bool_)
            rows = Rows(each, slots, slots, slots + 1, slots, hidden)
            tokens, last, x = drawn[j - 1], each, np.empty((count, width), np.float32)
        look_up(model.embed, tokens, x)
        if j == steps:
            _forward(model, cache, rows, x, 0, depth, each[:0], False, taps, tapped, none, threads)
        else:
            sound &= _forward(model, cache, rows, x, 0, depth, last, not streams, taps, tapped, logits[j], threads)
        if streams:
            for r in range(x.shape[0]):
                _copy(x[r], stream[r] if j == 0 else later[j - 1, r])
        if j == steps:
            break
        for b in range(count):
            if draws.kind == MAXIMUM:
                drawn[j, b] = np.argmax(logits[j, b, : draws.vocab])
                continue
            law = laws[j, b, : draws.vocab]
            softmax(logits[j, b], draws.heat[b], law)
            laws[j, b, draws.vocab :] = 0
            if draws.kind == UNIFORMS:
                drawn[j, b] = first_above(law, draws.uniforms[j, b])
            else:
                drawn[j, b] = first_maximum(logits[j, b], draws.heat[b], draws.noise[j, b, : draws.vocab])
    return sound
