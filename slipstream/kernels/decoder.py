"""A decoder like Llama's without a runtime: a pass over packed rows, and chains that draft in one call.

A draft of two million parameters is made of operators more than of arithmetic: a hundred operators for a guess cost a
runtime several times what their numbers do, and a runtime readies each of them anew whenever the number of rows
changes, as it does in nearly every round of speculation. Here a pass is one call that knows no shapes beforehand.

Weights are read as they are kept, in 16 bits where the checkpoint has no more, which is exact and half the memory
traffic of float32, the bound of plain decoding. A row comes out the same, bit for bit, whichever rows are beside it.

R rows, d width, V vocabulary, K steps, B sequences.
"""

from __future__ import annotations

import numpy as np

from slipstream.kernels.arithmetic import norm
from slipstream.kernels.compiled import entry, kernel
from slipstream.kernels.layer import behind, copy, room, run_layer
from slipstream.kernels.linear import look_up, multiply
from slipstream.kernels.picks import pick


@kernel()
def _keep(stream, taps, tap, tapped):
    """Copy the rows to wherever this tap is wanted."""
    for i in range(taps.shape[0]):
        if taps[i] == tap:
            for r in range(stream.shape[0]):
                copy(stream[r], tapped[i, r])


@kernel(inline="always")
def _forward(model, cache, rows, x, first, last, wanted, alone, taps, tapped, logits, threads):
    """See `forward`."""
    everyone, own, sound = np.arange(x.shape[0]), room(model, rows), True
    _keep(x, taps, first, tapped)
    for layer in range(first, last):
        for r in range(x.shape[0]):
            norm(x[r], model.norms[2 * layer], model.eps, own.flat[r])
        # Of the others, keys and values are all that is wanted of the last layer.
        going = wanted if alone and layer == last - 1 else everyone
        run_layer(model, cache, rows, layer, own.flat, going, x, own, threads)
        _keep(x, taps, layer + 1, tapped)
    final = model.norms[model.norms.shape[0] - 1]
    for i in range(taps.shape[0]):
        if taps[i] == -1:
            for r in range(x.shape[0]):
                norm(x[r], final, model.eps, tapped[i, r])
    for a in range(wanted.shape[0]):
        sound &= norm(x[a if alone else wanted[a]], final, model.eps, own.flat[a])
    multiply(model.head, 0, own.flat, wanted.shape[0], logits, threads)
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
def draft(model, cache, rows, tokens, last, depth, picks, drawn, logits, laws, stream, later, threads):
    """Draft K tokens for each of B sequences: the pending rows first, then a row a sequence, each fed with the last.

    tokens [M]   of the pending rows; last int64 [B]: the last row of each sequence
    depth        layers that are run
    picks        `Picks`: how
    drawn        [K, B] gains the tokens, logits [K, B, padded V] the raw logits, and laws [K, B, V], in float64, what
                 each was drawn from; where maxima are picked they stay as they are
    stream       if not empty, the residual stream at the end of the pending rows [M, d]; the last guesses are then run,
                 too, and later [K, B, d] is theirs
    Returns whether all was finite.
    """
    steps, streams, width = drawn.shape[0], stream.shape[0] > 0, model.norms.shape[1]
    taps, tapped, none = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
    bottom, each, sound = np.int64(0), np.arange(drawn.shape[1]), True  # a literal 0 would compile all anew
    for j in range(steps + 1 if streams else steps):
        if j > 0:
            tokens, rows, last = drawn[j - 1], behind(rows, last), each
        x = np.empty((tokens.shape[0], width), np.float32)
        look_up(model.embed, tokens, x)
        wanted, out = (last, logits[j]) if j < steps else (each[:0], none)
        sound &= _forward(model, cache, rows, x, bottom, depth, wanted, not streams, taps, tapped, out, threads)
        if streams:
            for r in range(x.shape[0]):
                copy(x[r], stream[r] if j == 0 else later[j - 1, r])
        if j < steps:
            pick(picks, j, logits[j], laws[j], drawn[j])
    return sound
