"""An EAGLE head (see `heads.eagle`), whose drafts are one call.

R rows, d width of the head, W of the target's states, T taps, V draft vocabulary, K steps, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.kernels.arithmetic import norm
from slipstream.kernels.compiled import entry, kernel
from slipstream.kernels.layer import Model, behind, copy, room, run_layer
from slipstream.kernels.linear import Matrix, look_up, multiply
from slipstream.kernels.picks import pick


class Head(NamedTuple):
    """own: its layers, with the embedding of the target's vocabulary and the norms of `Model`; the first of these is
    of the embedding in EAGLE-3, and neither first nor last is used in EAGLE-1."""

    own: Model
    fc: Matrix  # EAGLE-1: [1, d, d + W] of embedding and feature; EAGLE-3: [1, d, T * W] of the taps
    tap_norms: np.ndarray  # float32 [T, W], or empty
    joint_norm: np.ndarray  # float32 [1, T * W], or empty
    feature_norm: np.ndarray  # float32 [1, d], empty in EAGLE-1
    ids: np.ndarray  # int64 [V]: target id of each draft id
    normed_start: bool  # whether the residual stream begins with the normed feature, ...
    normed_end: bool  # ... and whether the next feature is what the output head reads


@kernel()
def _linear(matrix, x, threads):
    """[R, in] -> [R, out], of what fills up, too"""
    y = np.empty((x.shape[0], matrix.values.shape[1]), np.float32)
    multiply(matrix, 0, x, x.shape[0], y, threads)
    return y


@kernel()
def _fused(head, taps, threads):
    """Taps side by side [R, T * W] -> what EAGLE-3 starts from [R, d]."""
    x, width = taps.copy(), head.tap_norms.shape[1]
    for r in range(x.shape[0]):
        for t in range(head.tap_norms.shape[0]):
            part = x[r, t * width : (t + 1) * width]
            norm(part, head.tap_norms[t], head.own.eps, part)
        if head.joint_norm.shape[0] > 0:
            norm(x[r], head.joint_norm[0], head.own.eps, x[r])
    return _linear(head.fc, x, threads)


@kernel(inline="always")
def _step(head, cache, rows, tokens, feature, wanted, after, logits, threads):
    """The rows' features [R, >= d], which the tokens follow -> of those wanted the features to go on with, after
    [A, d], and their logits [A, padded V]; whether these are finite."""
    own, count, first_version = head.own, tokens.shape[0], head.feature_norm.shape[0] == 0
    width, layers = own.norms.shape[1], own.norms.shape[0] // 2
    space, everyone, sound = room(own, rows), np.arange(count), True
    side = np.empty((count, 2 * width if not first_version else head.fc.values.shape[2]), np.float32)
    x, embedded = np.empty((count, width), np.float32), np.empty((count, width), np.float32)
    look_up(own.embed, tokens, embedded)
    for r in range(count):
        right = side[r, width:]
        if first_version:
            copy(embedded[r], side[r, :width])
            copy(feature[r], right)
        else:
            norm(embedded[r], own.norms[0], own.eps, side[r, :width])
            norm(feature[r, :width], head.feature_norm[0], own.eps, right)
            copy(right if head.normed_start else feature[r], x[r])
    if first_version:
        joined = _linear(head.fc, side, threads)
        for r in range(count):
            copy(joined[r], x[r])
    for layer in range(layers):
        flat = side
        if first_version:
            flat = space.flat
            for r in range(count):
                if layer == 0:
                    copy(x[r], flat[r])
                else:
                    norm(x[r], own.norms[2 * layer], own.eps, flat[r])
        run_layer(own, cache, rows, layer, flat, wanted if layer == layers - 1 else everyone, x, space, threads)
    for a in range(wanted.shape[0]):
        sound &= norm(x[a], own.norms[2 * layers], own.eps, space.flat[a])
        copy(space.flat[a] if head.normed_end else x[a], after[a])
        if first_version:
            copy(x[a], space.flat[a])
    multiply(own.head, 0, space.flat, wanted.shape[0], logits, threads)
    return sound


@entry
def draft(head, cache, rows, tokens, features, own, wanted, picks, drawn, after, logits, laws, threads):
    """Run packed rows, and draft K tokens behind those wanted, each step fed with the last.

    tokens [R]    that follow the features: taps side by side [R, T * W] or, of `own` rows, outputs of the head [R, d]
    wanted        int64 [A], increasing; where K > 0, the last row of each sequence: A = B
    picks         `Picks`: how
    drawn         [K, B] gains the draft ids, K = 0: one pass, nothing is drawn
    after         [A, d] gains the features that the wanted rows go on with, those of the last step
    logits, laws  [K or 1, A, padded V] and float64 [K, B, V]: see `decoder.draft`
    Returns whether all was finite.
    """
    steps, sound = drawn.shape[0], True
    each = np.arange(wanted.shape[0])
    feature = features if own or head.feature_norm.shape[0] == 0 else _fused(head, features, threads)
    for j in range(max(steps, 1)):
        if j > 0:
            tokens, rows, wanted, feature = head.ids[drawn[j - 1]], behind(rows, wanted), each, after
        sound &= _step(head, cache, rows, tokens, feature, wanted, after, logits[j], threads)
        if j < steps:
            pick(picks, j, logits[j], laws[j], drawn[j])
    return sound
