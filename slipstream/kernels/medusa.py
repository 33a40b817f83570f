"""Medusa heads (see `heads.medusa`): all guesses behind a state of the target in one call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.kernels.arithmetic import add_silu
from slipstream.kernels.compiled import entry
from slipstream.kernels.layer import copy
from slipstream.kernels.linear import Matrix, multiply


class Heads(NamedTuple):
    """K heads of N residual blocks over states of width d that guess among V ids."""

    first: Matrix  # [1, K * d, d], the first block of every head: all read the same state
    later: Matrix  # [(N - 1) * K, d, d]
    out: Matrix  # [K, V, d], or [1, V, d], which all share


@entry
def guess(heads, hidden, states, logits, threads):
    """hidden [B, d] -> logits [K, B, padded V]; states [K, B, d] is room."""
    count, rows, width = states.shape
    wide = np.empty((rows, heads.first.values.shape[1]), np.float32)
    multiply(heads.first, 0, hidden, rows, wide, threads)
    for k in range(count):
        for r in range(rows):
            copy(hidden[r], states[k, r])
            add_silu(wide[r, k * width : (k + 1) * width], states[k, r])
    slim = np.empty((rows, heads.later.values.shape[1]), np.float32)
    for n in range(heads.later.values.shape[0]):
        state = states[n % count]
        multiply(heads.later, n, state, rows, slim, threads)
        for r in range(rows):
            add_silu(slim[r, :width], state[r])
    parts = heads.out.values.shape[0]  # where all share a matrix, its weights are read once
    together = count // parts * rows
    given, made = states.reshape(parts, together, width), logits.reshape(parts, together, logits.shape[2])
    for part in range(parts):
        multiply(heads.out, part, given[part], together, made[part], threads)
