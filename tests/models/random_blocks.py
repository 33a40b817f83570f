"""Random blocks of GGUF files."""

import numpy as np

from slipstream.models.gguf_header import TYPES

SIZES = {name: (count, size) for name, count, size in TYPES.values()}
_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes at which a block has a float16; 0 in other kinds."""


def random_bytes(name: str, outs: int, blocks: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """uint8 [outs, blocks, bytes of a block]. scale: standard deviation of the float16 numbers in them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (outs, blocks, SIZES[name][1]), dtype=np.uint8)
    for at in _SCALES.get(name, (0,)):
        numbers = (scale * rng.standard_normal((outs, blocks, 1))).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8)
    return raw
