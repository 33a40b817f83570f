"""How a call that decodes several tokens samples them: see `core.decode_steps.StepSampling`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.backends.native.kernels.arithmetic import argmax, first_above, first_maximum, softmax
from slipstream.backends.native.kernels.compiled import kernel

MAXIMUM, UNIFORMS, NOISE = range(3)


class Picks(NamedTuple):
    """For K steps of B sequences, among the ids below `vocab`."""

    kind: int  # MAXIMUM, UNIFORMS or NOISE
    vocab: int
    inv_temperature: np.ndarray  # float64 [B]
    uniforms: np.ndarray  # float64 [K, B]
    noise: np.ndarray  # float64 [K, B, V]


@kernel()
def pick(picks, j, logits, probs, drawn):
    """drawn[b] = the token of step j, from logits [B, >= V]; unless it is a maximum, probs [B, V] receives its
    distribution in float64."""
    for b in range(drawn.shape[0]):
        if picks.kind == MAXIMUM:
            drawn[b] = argmax(logits[b], picks.vocab)
            continue
        row = probs[b, : picks.vocab]
        softmax(logits[b], picks.inv_temperature[b], row)
        probs[b, picks.vocab :] = 0
        if picks.kind == UNIFORMS:
            drawn[b] = first_above(row, picks.uniforms[j, b])
        else:
            drawn[b] = first_maximum(logits[b], picks.inv_temperature[b], picks.noise[j, b, : picks.vocab])
