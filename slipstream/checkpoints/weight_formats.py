"""The table of weight formats: how a matrix is stored in memory and multiplied, and how many bytes it needs.

Settings, help, packing, the memory plan, `info`, the kernels and the reader of GGUF files use this table. A new format
needs an entry in `FORMATS`, and a kernel in `backends.native` if no existing loop can compute it.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a matrix and to multiply by it.

    name     name of the format, also in names of kernels. bits: bits per weight.
    step     columns per step of the inner loop. passes: number of parts into which an activation is split.
    row      bytes of a packed row of activations: (per column, per group or row), see `tiles.matrix_tile`.
    group    number of columns of activations that share a scale, see `block_tiles`; 0: all columns of a row.
    span     number of columns of weights that share a float16 scale, see `block_tiles`; 0: one float32 scale per
             output. If a span is larger than a group, each group also has a factor of 8 bits.
    minima   whether each group of weights also has a minimum.
    signed   whether integers of fewer than 8 bits have a sign; integers of 8 bits always have one.
    table    the 16 numbers for which integers of 4 bits stand; (): the integers are the numbers.
    powers   whether scales of spans are powers of 2, stored in 8 bits.
    quantize  value of the setting `quantize` that selects the format; "": no value does.
    head     format of the output head of a model in this format; "": this format.
    without  format used instead on processors without byte dot products; "": this format.
    """

    name: str
    step: int
    bits: int
    passes: int = 1
    row: tuple[int, int] = (4, 0)
    group: int = 0
    span: int = 0
    minima: bool = False
    signed: bool = False
    table: tuple[int, ...] = ()
    powers: bool = False
    quantize: str = ""
    without: str = ""
    head: str = ""

    @property
    def integer(self) -> bool:
        return self.bits <= 8

    @property
    def zero(self) -> int:
        """Minus the smallest integer of the format."""
        return 1 << self.bits - 1 if self.signed or self.bits == 8 else 0

    @property
    def activations(self) -> int:
        """Number of bits of activations in products with weights of this format."""
        return 8 * self.row[0]

    @property
    def factors(self) -> bool:
        """Return whether the scale of a group is a factor times the scale of its span."""
        return self.span > self.group

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight in memory, with scales and minima. If there is one scale per output, rows are assumed to
        have 400 columns."""
        whole = self.bits / 8
        if self.span:
            return whole + (1 + self.minima) * ((2 - self.powers) / self.span + self.factors / self.group)
        return whole + 0.01 * self.integer

    def head_bytes(self, size: int) -> int:
        """Return the bytes of the key of one head, of `size` numbers. Its last span may be shorter than the others."""
        return size * self.bits // 8 + (2 * -(-size // self.span) if self.span else 0)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""IQ4: table of IQ4_NL and IQ4_XS. FP4: table of MXFP4, with doubled numbers, so that all are integers."""

FORMATS = {
    each.name: each
    for each in (
        WeightFormat("float32", 1, 32),
        WeightFormat("float16", 1, 16),
        WeightFormat("bfloat16", 1, 16),
        WeightFormat("bfloat16_pairs", 2, 16, row=(2, 0)),
        WeightFormat("int8_pairs", 2, 8, row=(2, 4)),
        WeightFormat("int8_quads_twice", 4, 8, 2, (2, 12), quantize="w8a16", without="int8_pairs"),
        WeightFormat("int8_quads", 4, 8, 1, (1, 12), 64, quantize="w8a8", without="int8_pairs"),
        # In blocks, from few bytes to many:
        WeightFormat("blocks4_fp4", 4, 4, 1, (1, 12), 32, 32, table=FP4, powers=True),
        WeightFormat("blocks4_iq4_factors", 4, 4, 1, (1, 12), 32, 256, table=IQ4),
        WeightFormat("blocks4_iq4", 4, 4, 1, (1, 12), 32, 32, table=IQ4),
        WeightFormat("blocks4_signed", 4, 4, 1, (1, 12), 32, 32, signed=True),
        WeightFormat("blocks4_by_16_signed", 4, 4, 1, (1, 12), 16, 256, signed=True),
        WeightFormat("blocks4_factors", 4, 4, 1, (1, 12), 32, 256, True),
        WeightFormat("blocks4", 4, 4, 1, (1, 12), 32, 32, True, quantize="w4a8", head="blocks8"),
        WeightFormat("blocks4_by_16", 4, 4, 1, (1, 12), 16, 256, True),
        WeightFormat("blocks5", 4, 5, 1, (1, 12), 32, 32, signed=True),
        WeightFormat("blocks5_factors", 4, 5, 1, (1, 12), 32, 256, True),
        WeightFormat("blocks5_minima", 4, 5, 1, (1, 12), 32, 32, True),
        WeightFormat("blocks6_by_16", 4, 6, 1, (1, 12), 16, 256, signed=True),
        WeightFormat("blocks6_any", 4, 6, 1, (1, 12), 16, 256, True, signed=True),  # for joined matrices that differ
        WeightFormat("blocks8", 4, 8, 1, (1, 12), 32, 32),
        WeightFormat("blocks8_any", 4, 8, 1, (1, 12), 16, 32, True),  # for joined matrices that fit no other format
    )
}
"""Every format by name. `weight_blocks.TYPES` has the format of each type of GGUF files."""

Q8_0 = WeightFormat("q8_0", 1, 8, span=32)
KV_FORMATS = {each.name: each for each in (FORMATS["float32"], FORMATS["float16"], Q8_0)}
"""Formats of the KV cache, by the value of `kv_dtype`."""

QUANTISED = {each.quantize: each for each in FORMATS.values() if each.quantize}
"""Formats that a model can be quantised to, by the value of `quantize`."""

BY_ROLE = {"int8": {"target": "w8a16", "draft": "w8a8"}, "int4": {"target": "w4a8", "draft": "w4a8"}}
"""Values of `quantize` whose format depends on the model's role. A target's distribution should change as little as
possible. A draft model gets the fastest format, because its format affects only the acceptance rate."""

QUANTISATIONS = (*BY_ROLE, *QUANTISED)
DRAFT_QUANTISATIONS = (*QUANTISATIONS, "none")


def few_bits(stored: str) -> bool:
    """Return whether weights in this format ("w4a8", or a file's "Q4_K_M") have 5 bits or fewer."""
    return re.match("I?[QW][2-5]|MXFP4", stored, re.IGNORECASE) is not None
