"""`Blocks`: weights as integers with a scale, and a minimum, for each output and group of columns, as GGUF files store
them. Nothing is rounded: integer * scale + minimum is exactly the weight of the file, in float32.

Formats of the blocks: ggml-common.h and ggml-quants.c of github.com/ggml-org/ggml; `gguf.quants` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """weight[o, c] = integers[o, c] * scales[o, c // group] + minima[o, c // group].

    integers  [outs, columns]; uint8 below 16 if `bits` is 4, else int8.
    scales    [outs, groups], float16, or float32 where float16 does not hold them.
    minima    the same; None if all are 0.
    """

    bits: int
    group: int
    integers: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        outs, columns = self.integers.shape
        return int(outs), int(columns)

    def floats(self) -> np.ndarray:
        """The weights in float32."""
        scales = np.repeat(self.scales.astype(np.float32), self.group, axis=1)
        values = self.integers.astype(np.float32) * scales
        if self.minima is not None:
            values += np.repeat(self.minima.astype(np.float32), self.group, axis=1)
        return values


def stacked(parts: Seq[Blocks]) -> Blocks:
    """Outputs of several matrices with the same input, in the narrowest form that holds all of them exactly."""
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    minima = any(part.minima is not None for part in parts)

    def spread(values: np.ndarray, part: Blocks) -> np.ndarray:
        return np.repeat(values, part.group // group, axis=1)

    def minima_of(part: Blocks) -> np.ndarray:
        return np.zeros_like(part.scales) if part.minima is None else part.minima

    kind = np.int8 if bits == 8 else np.uint8
    return Blocks(
        bits,
        group,
        np.concatenate([part.integers.astype(kind) for part in parts]),
        np.concatenate([spread(part.scales, part) for part in parts]),  # float32 if one of them is
        np.concatenate([spread(minima_of(part), part) for part in parts]) if minima else None,
    )


# --- the blocks of GGUF files: bytes [outs, blocks, bytes of a block] -> Blocks --------------------------------------


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block [outs, blocks]."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)[..., 0]


def _joined(parts: Seq[np.ndarray], kind: type = np.uint8) -> np.ndarray:
    """Numbers of each block, in order [outs, columns]."""
    whole: np.ndarray = np.concatenate(parts, axis=-1).astype(kind)
    return whole.reshape(len(whole), -1)


def _nibbles(raw: np.ndarray) -> list[np.ndarray]:
    return [raw & 15, raw >> 4]


def _high_bits(raw: np.ndarray, at: int) -> list[np.ndarray]:
    """Bit 4 of each of 32 numbers, from the 32 bits at a byte, as two halves."""
    bits = np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little") << 4
    return [bits[..., :16], bits[..., 16:]]


def _q4_0(raw: np.ndarray) -> Blocks:
    scale = _half(raw, 0)
    return Blocks(4, 32, _joined(_nibbles(raw[..., 2:])), scale, scale * np.float16(-8))


def _q4_1(raw: np.ndarray) -> Blocks:
    return Blocks(4, 32, _joined(_nibbles(raw[..., 4:])), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: np.ndarray) -> Blocks:
    parts = [low | high for low, high in zip(_nibbles(raw[..., 6:]), _high_bits(raw, 2), strict=True)]
    return Blocks(8, 32, _joined([part.astype(np.int8) - 16 for part in parts], np.int8), _half(raw, 0), None)


def _q5_1(raw: np.ndarray) -> Blocks:
    parts = [low | high for low, high in zip(_nibbles(raw[..., 8:]), _high_bits(raw, 4), strict=True)]
    return Blocks(8, 32, _joined(parts, np.int8), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: np.ndarray) -> Blocks:
    return Blocks(8, 32, _joined([raw[..., 2:].view(np.int8)], np.int8), _half(raw, 0), None)


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the 8 groups of Q4_K and Q5_K [outs, 8 * blocks]: 6 bits each in 12 bytes, times d, dmin."""
    packed = raw[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    least = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    d, dmin = (_half(raw, at).astype(np.float32)[..., None] for at in (0, 2))
    return (d * scale).reshape(len(raw), -1), -(dmin * least).reshape(len(raw), -1)


def _q4_k(raw: np.ndarray) -> Blocks:
    scales, minima = _k_scales(raw)
    chunks = raw[..., 16:].reshape(*raw.shape[:2], 4, 32)  # of 64 columns: lower halves, then upper ones
    return Blocks(4, 32, _joined([part for c in range(4) for part in _nibbles(chunks[..., c, :])]), scales, minima)


def _q5_k(raw: np.ndarray) -> Blocks:
    scales, minima = _k_scales(raw)
    high, chunks = raw[..., 16:48], raw[..., 48:].reshape(*raw.shape[:2], 4, 32)
    parts = [
        part | (high >> np.uint8(2 * c + k) & 1) << 4
        for c in range(4)
        for k, part in enumerate(_nibbles(chunks[..., c, :]))
    ]
    return Blocks(8, 32, _joined(parts, np.int8), scales, minima)


def _q6_k(raw: np.ndarray) -> Blocks:
    parts = []
    for half in range(2):  # of 128 columns
        low, high = raw[..., 64 * half : 64 * half + 64], raw[..., 128 + 32 * half : 160 + 32 * half]
        for k, part in enumerate((low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4)):
            parts.append((part | (high >> np.uint8(2 * k) & 3) << 4).astype(np.int8) - 32)
    scales = _half(raw, 208).astype(np.float32)[..., None] * raw[..., 192:208].view(np.int8)
    return Blocks(8, 16, _joined(parts, np.int8), scales.reshape(len(raw), -1), None)


READERS: Mapping[str, Callable[[np.ndarray], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Kind of block -> how its bytes [outs, blocks, bytes] are read."""
