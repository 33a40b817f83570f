"""How a call that drafts several tokens picks them: see `core.draws.Draws`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.kernels.arithmetic import first_above, first_maximum, softmax
from slipstream.kernels.compiled import kernel

MAXIMUM, UNIFORMS, NOISE = range(3)


class Picks(NamedTuple):
    """For K steps of B sequences, among the ids below `vocab`."""

    kind: int  # MAXIMUM, UNIFORMS or NOISE
    vocab: int
    heat: np.ndarray  # float64 [B], 1 / temperature
    uniforms: np.ndarray  # float64 [K, B]
    noise: np.ndarray  # float64 [K, B, V]


@kernel()
def pick(picks, j, logits, laws, drawn):
    """drawn[b] = the token of step j by logits [B, >= V]; laws [B, V] gains what it was drawn from, in float64, but
    where it is a maximum."""
    for b in range(drawn.shape[0]):
        if picks.kind == MAXIMUM:
            drawn[b] = np.argmax(logits[b, : picks.vocab])
            continue
        law = laws[b, : picks.vocab]
        softmax(logits[b], picks.heat[b], law)
        laws[b, picks.vocab :] = 0
        if picks.kind == UNIFORMS:
            drawn[b] = first_above(law, picks.uniforms[j, b])
        else:
            drawn[b] = first_maximum(logits[b], picks.heat[b], picks.noise[j, b, : picks.vocab])
