"""`Blocks`: weights in the layout of GGUF files, which is integers with a scale, and in some formats a minimum, for
each output and group of columns. Weights are not rounded: integer * scale + minimum is exactly the file's weight in
float32.

Formats of the blocks: ggml-common.h and ggml-quants.c of github.com/ggml-org/ggml; `gguf.quants` gives equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from slipstream.checkpoints.weight_formats import FORMATS, WeightFormat
from slipstream.errors import CheckpointError


@dataclass(frozen=True)
class Scales:
    """A number for each output and group of columns: values[o, c // span] * factors[o, c // group].

    values   float16 [outs, columns / span], or uint8, where e stands for 2^(e - 128).
    factors  int8 [outs, columns / group]; None: all factors are 1, and spans are as long as groups.
    """

    values: np.ndarray
    factors: np.ndarray | None = None

    def __getitem__(self, rows: slice) -> Scales:
        return Scales(self.values[rows], None if self.factors is None else self.factors[rows])

    @property
    def powers(self) -> bool:
        return self.values.dtype == np.uint8

    def in_half(self) -> Scales:
        """Return powers of 2 in float16; 0 for a power that float16 cannot represent."""
        with np.errstate(over="ignore"):
            values = self._numbers.astype(np.float16)
        return Scales(np.where(np.isfinite(values), values, np.float16(0)))

    @property
    def _numbers(self) -> np.ndarray:
        if self.powers:
            return np.ldexp(np.float32(1), self.values.astype(np.int32) - 128)
        return self.values.astype(np.float32)

    def floats(self, group: int, columns: int) -> np.ndarray:
        """Return the scales in float32 [outs, columns / group], exactly."""
        spread = np.repeat(self._numbers, columns // group // self.values.shape[1], axis=1)
        return spread if self.factors is None else spread * self.factors

    def divide(self, group: int, span: int, factors: bool, columns: int) -> Scales:
        """Return the same scales for smaller groups and spans. factors: whether the result has factors."""
        values = np.repeat(self.values, columns // span // self.values.shape[1], axis=1)
        if not factors:
            return Scales(values)
        given = np.ones(values.shape, np.int8) if self.factors is None else self.factors
        return Scales(values, np.repeat(given, columns // group // given.shape[1], axis=1))


@dataclass(frozen=True)
class Blocks:
    """weight[o, c] = integers[o, c] * scales[o, c // group] + minima[o, c // group].

    integers  int8 [outs, columns], or uint8, from which `zero` is subtracted; they use `bits` bits.
    minima    None if all minima are 0.
    table     see `WeightFormat.table`: weights are table[integers] * scales.
    """

    bits: int
    group: int
    integers: np.ndarray
    scales: Scales
    minima: Scales | None
    table: tuple[int, ...] = ()
    zero: int = 0

    @property
    def numbers(self) -> np.ndarray:
        """The numbers that are multiplied by scales: int8 [outs, columns], or uint8."""
        return np.array(self.table, np.int8)[self.integers] if self.table else self.integers

    @property
    def shape(self) -> tuple[int, int]:
        outs, columns = self.integers.shape
        return int(outs), int(columns)

    @property
    def span(self) -> int:
        """Number of columns that share the float16 numbers of `Scales`."""
        return self.shape[1] // int(self.scales.values.shape[1])

    def __len__(self) -> int:
        return len(self.integers)

    def __getitem__(self, rows: slice) -> Blocks:
        return replace(
            self, integers=self.integers[rows], scales=self.scales[rows], minima=self.minima and self.minima[rows]
        )

    def floats(self) -> np.ndarray:
        """Return the weights in float32."""
        scales = self.scales.floats(self.group, self.shape[1])
        values = self.numbers.astype(np.float32) * np.repeat(scales, self.group, axis=1)
        if self.minima is not None:
            values += np.repeat(self.minima.floats(self.group, self.shape[1]), self.group, axis=1)
        return values

    def divide(self, kind: WeightFormat) -> Blocks:
        """Return the same weights in the blocks of a format that can represent them. Raises CheckpointError for a scale
        that float16 cannot represent."""
        scales = self.scales
        if scales.powers and not kind.powers:
            scales = scales.in_half()
            lost = scales.floats(self.span, self.shape[1]) != self.scales.floats(self.span, self.shape[1])
            if (lost & self.numbers.reshape(*lost.shape, -1).any(axis=-1)).any():
                why = "scales of MXFP4 are powers of 2; in a matrix that is joined with another type they are float16"
                raise CheckpointError("a scale is not among the numbers of float16", why=why, fix="convert it again")
        columns, least, (group, span, factors) = self.shape[1], self.minima, (kind.group, kind.span, kind.factors)
        if kind.minima and least is None:
            least = Scales(np.zeros_like(self.scales.values), self.scales.factors)
        return Blocks(
            kind.bits,
            group,
            (self.integers if kind.table else self.numbers).astype(np.int8, copy=False),
            scales.divide(group, span, factors, columns),
            least and least.divide(group, span, factors, columns),
            kind.table,
            kind.zero,
        )


def stack(parts: Seq[Blocks]) -> Blocks:
    """Stack the outputs of several matrices with the same input, in blocks of one format."""

    def join(scales: Seq[Scales]) -> Scales:
        numbers = [each.factors for each in scales if each.factors is not None]
        return Scales(np.concatenate([each.values for each in scales]), np.concatenate(numbers) if numbers else None)

    integers, scales = np.concatenate([part.integers for part in parts]), join([part.scales for part in parts])
    minima = [part.minima for part in parts if part.minima is not None]
    return replace(parts[0], integers=integers, scales=scales, minima=join(minima) if minima else None)


def format_holding(parts: Seq[Blocks]) -> WeightFormat | None:
    """Return the narrowest format that represents all these weights exactly; None if no format does."""

    def holds(kind: WeightFormat, part: Blocks) -> bool:
        divides = part.group % kind.group == part.span % kind.span == part.shape[1] % kind.span == 0
        minima, factors = part.minima is not None, part.scales.factors is not None
        fits = kind.powers <= part.scales.powers and kind.minima >= minima and kind.factors >= factors
        if kind.table != part.table:  # numbers of the table are stored instead of indices
            return divides and fits and kind.bits == 8 and not kind.table
        return divides and fits and kind.zero >= part.zero and 2**kind.bits - kind.zero >= 2**part.bits - part.zero

    return next((kind for kind in FORMATS.values() if kind.span and all(holds(kind, part) for part in parts)), None)


# --- the blocks of GGUF files: bytes [outs, blocks, bytes of a block] -> Blocks --------------------------------------


Parts = tuple[np.ndarray, Scales, "Scales | None"]
"""Integers, scales and minima of `Blocks`."""


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at byte `at` of each block, [outs, blocks]."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)[..., 0]


def _join_numbers(parts: Seq[np.ndarray], kind: type = np.uint8) -> np.ndarray:
    """Join the numbers of each block, in order, to [outs, columns]."""
    whole: np.ndarray = np.concatenate(parts, axis=-1).astype(kind)
    return whole.reshape(len(whole), -1)


def _nibbles(raw: np.ndarray) -> list[np.ndarray]:
    return [raw & 15, raw >> 4]


def _high_bits(raw: np.ndarray, at: int) -> list[np.ndarray]:
    """Return bit 4 of 32 numbers as two arrays of 16. The 32 bits are stored from byte `at` on."""
    bits = np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little") << 4
    return [bits[..., :16], bits[..., 16:]]


def _q4_0(raw: np.ndarray) -> Parts:
    return _join_numbers(_nibbles(raw[..., 2:]), np.int8) - np.int8(8), Scales(_half(raw, 0)), None


def _q4_1(raw: np.ndarray) -> Parts:
    return _join_numbers(_nibbles(raw[..., 4:])), Scales(_half(raw, 0)), Scales(_half(raw, 2))


def _q5_0(raw: np.ndarray) -> Parts:
    parts = [low | high for low, high in zip(_nibbles(raw[..., 6:]), _high_bits(raw, 2), strict=True)]
    return _join_numbers([part.astype(np.int8) - 16 for part in parts], np.int8), Scales(_half(raw, 0)), None


def _q5_1(raw: np.ndarray) -> Parts:
    parts = [low | high for low, high in zip(_nibbles(raw[..., 8:]), _high_bits(raw, 4), strict=True)]
    return _join_numbers(parts, np.int8), Scales(_half(raw, 0)), Scales(_half(raw, 2))


def _q8_0(raw: np.ndarray) -> Parts:
    return _join_numbers([raw[..., 2:].view(np.int8)], np.int8), Scales(_half(raw, 0)), None


def _k_scales(raw: np.ndarray) -> tuple[Scales, Scales]:
    """Return scales and minima of the 8 groups of a block of Q4_K or Q5_K. They are numbers of 6 bits, packed in 12
    bytes, multiplied by d and by -dmin."""
    packed = raw[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = _join_numbers([low & 63, (high & 15) | (low >> 6 << 4)], np.int8)
    least = _join_numbers([middle & 63, (high >> 4) | (middle >> 6 << 4)], np.int8)
    return Scales(_half(raw, 0), scale), Scales(-_half(raw, 2), least)


def _q4_k(raw: np.ndarray) -> Parts:
    scales, minima = _k_scales(raw)
    chunks = raw[..., 16:].reshape(*raw.shape[:2], 4, 32)  # 64 columns each: lower halves of bytes, then upper
    return _join_numbers([part for c in range(4) for part in _nibbles(chunks[..., c, :])]), scales, minima


def _q5_k(raw: np.ndarray) -> Parts:
    scales, minima = _k_scales(raw)
    high, chunks = raw[..., 16:48], raw[..., 48:].reshape(*raw.shape[:2], 4, 32)
    parts = [
        part | (high >> np.uint8(2 * c + k) & 1) << 4
        for c in range(4)
        for k, part in enumerate(_nibbles(chunks[..., c, :]))
    ]
    return _join_numbers(parts, np.int8), scales, minima


def _q6_k(raw: np.ndarray) -> Parts:
    parts = []
    for half in range(2):  # two halves of 128 columns
        low, high = raw[..., 64 * half : 64 * half + 64], raw[..., 128 + 32 * half : 160 + 32 * half]
        for k, part in enumerate((low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4)):
            parts.append((part | (high >> np.uint8(2 * k) & 3) << 4).astype(np.int8) - 32)
    scales = Scales(_half(raw, 208), _join_numbers([raw[..., 192:208].view(np.int8)], np.int8))
    return _join_numbers(parts, np.int8), scales, None


def _pairs(raw: np.ndarray) -> list[np.ndarray]:
    """Return the 2-bit numbers in 32 bytes in order: the lowest two bits of all bytes, then their next two bits, ..."""
    return [raw >> np.uint8(shift) & 3 for shift in range(0, 8, 2)]


def _q2_k(raw: np.ndarray) -> Parts:
    packed, halves = raw[..., :16], (raw[..., 16:48], raw[..., 48:80])
    scales = Scales(_half(raw, 80), _join_numbers([packed & 15], np.int8))
    minima = Scales(-_half(raw, 82), _join_numbers([packed >> 4], np.int8))
    return _join_numbers([part for half in halves for part in _pairs(half)]), scales, minima


def _q3_k(raw: np.ndarray) -> Parts:
    """Read numbers from -4 to 3. Bit 2 of number 32 * i + j is bit i of byte j."""
    low = [part for half in (raw[..., 32:64], raw[..., 64:96]) for part in _pairs(half)]
    parts = [part | (raw[..., :32] >> np.uint8(i) & 1) << 2 for i, part in enumerate(low)]
    packed, high = raw[..., 96:104], raw[..., 104:108]
    upper = [high >> np.uint8(shift) & 3 for shift in range(0, 8, 2)]
    lower = [packed[..., :4] & 15, packed[..., 4:] & 15, packed[..., :4] >> 4, packed[..., 4:] >> 4]
    factors = _join_numbers([(x | y << 4).astype(np.int8) - 32 for x, y in zip(lower, upper, strict=True)], np.int8)
    return _join_numbers(parts, np.int8) - np.int8(4), Scales(_half(raw, 108), factors), None


def _iq4_nl(raw: np.ndarray) -> Parts:
    return _join_numbers(_nibbles(raw[..., 2:])), Scales(_half(raw, 0)), None


def _iq4_xs(raw: np.ndarray) -> Parts:
    low, high = raw[..., 4:8], np.ascontiguousarray(raw[..., 2:4]).view(np.uint16)
    upper = (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    lower = np.stack(_nibbles(low), axis=-1).reshape(*low.shape[:-1], 8)
    factors = _join_numbers([(lower | upper << 4).astype(np.int8) - 32], np.int8)
    parts = [part for g in range(8) for part in _nibbles(raw[..., 8 + 16 * g : 24 + 16 * g])]
    return _join_numbers(parts), Scales(_half(raw, 0), factors), None


def _mxfp4(raw: np.ndarray) -> Parts:
    return _join_numbers(_nibbles(raw[..., 1:])), Scales(raw[..., 0]), None


@dataclass(frozen=True)
class GgufType:
    """A tensor type of GGUF files, which stores `count` weights in `nbytes` bytes. format: format in memory
    (`weight_formats.FORMATS`); "": our own decoder does not read the type. read: function from bytes
    [outs, blocks, nbytes] to `Parts`; None: the type is floating-point numbers."""

    name: str
    count: int
    nbytes: int
    format: str = ""
    read: Callable[[np.ndarray], Parts] | None = None

    def blocks(self, raw: np.ndarray) -> Blocks:
        kind = FORMATS[self.format]
        return Blocks(kind.bits, kind.group, *self.read(raw), table=kind.table, zero=kind.zero)  # type: ignore[misc]


TYPES = {
    number: GgufType(*each)  # type: ignore[arg-type]
    for number, each in {
        0: ("F32", 1, 4, "float32"), 1: ("F16", 1, 2, "float16"), 30: ("BF16", 1, 2, "bfloat16"),
        2: ("Q4_0", 32, 18, "blocks4_signed", _q4_0),
        3: ("Q4_1", 32, 20, "blocks4", _q4_1),
        6: ("Q5_0", 32, 22, "blocks5", _q5_0),
        7: ("Q5_1", 32, 24, "blocks5_minima", _q5_1),
        8: ("Q8_0", 32, 34, "blocks8", _q8_0),
        12: ("Q4_K", 256, 144, "blocks4_factors", _q4_k),
        13: ("Q5_K", 256, 176, "blocks5_factors", _q5_k),
        14: ("Q6_K", 256, 210, "blocks6_by_16", _q6_k),
        10: ("Q2_K", 256, 84, "blocks4_by_16", _q2_k),
        11: ("Q3_K", 256, 110, "blocks4_by_16_signed", _q3_k),
        20: ("IQ4_NL", 32, 18, "blocks4_iq4", _iq4_nl),
        23: ("IQ4_XS", 256, 136, "blocks4_iq4_factors", _iq4_xs),
        39: ("MXFP4", 32, 17, "blocks4_fp4", _mxfp4),
        9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip
"""Types of tensors by their numbers in GGUF files."""

READERS = {each.name: each.blocks for each in TYPES.values() if each.read}
FLOATS = {each.name: each.format for each in TYPES.values() if each.format and not each.read}
