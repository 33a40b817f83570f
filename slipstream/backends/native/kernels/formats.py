"""How the weights of a matrix are stored and multiplied."""

from dataclasses import dataclass

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.processor import PANEL


@dataclass(frozen=True)
class Format:
    """One way.

    name     as in function names
    step     columns per step of the inner loop
    bits     per weight
    passes   number of parts that an activation is split into
    row      bytes of a packed row of activations: per column, and per group or row (see `tiles.matrix_tile`)
    group    columns of activations that share a scale, see `block_tiles`; 0: all
    span     columns of weights that share a float16 scale, see `block_tiles`; 0: one float32 scale per output. If it is
             larger than a group, each group has a factor of 8 bits besides
    minima   whether each group of weights has a minimum besides
    """

    name: str
    step: int
    bits: int
    passes: int = 1
    row: tuple[int, int] = (4, 0)
    group: int = 0
    span: int = 0
    minima: bool = False

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def integer(self) -> bool:
        return self.bits <= 8

    @property
    def factors(self) -> bool:
        """Whether the scale of a group is a factor times the scale of its span."""
        return self.span > self.group

    @property
    def wide(self) -> bool:
        """Whether the activations of a group are stored in 16 bits, see `block_tiles`."""
        return self.group > 0 and self.bits == 8 and processor.adds_pairs()

    @property
    def heading(self) -> int:
        """Bytes of the scales and minima of PANEL outputs and a span of columns."""
        return 2 * PANEL * (1 + self.minima) if self.span else 0

    @property
    def group_heading(self) -> int:
        """Bytes of the factors of PANEL outputs and a group of columns."""
        return PANEL * (1 + self.minima) if self.factors else 0

    @property
    def group_bytes(self) -> int:
        """Bytes of the weights of PANEL outputs and a group of columns, with their factors."""
        return self.group_heading + PANEL * self.group * self.bits // 8

    @property
    def groups(self) -> int:
        """Groups of a span."""
        return max(1, self.span // max(1, self.group))

    @property
    def span_bytes(self) -> int:
        """Bytes of the weights of PANEL outputs and a span of columns, with their scales."""
        return self.heading + self.groups * self.group_bytes

    def row_bytes(self, columns: int) -> int:
        """Bytes of a packed row of activations."""
        return self.row[0] * (1 + self.wide) * columns + self.row[1] * (columns // self.group if self.group else 1)

    def _fit(self, rows: int) -> int:
        """Number of panels whose sums stay in registers for `rows` rows; 0 if none fits."""
        room = processor.registers() * processor.lanes() // PANEL  # vectors of PANEL sums
        spare = room // 4 if self.group and processor.adds_pairs() else 1  # measured: a row less
        return next((p for p in (4, 2, 1) if (rows * self.passes + spare) * p < room), 0)

    def panels(self, rows: int) -> int:
        """Number of panels in a tile of `rows` rows. Several panels use each loaded activation several times. One panel
        is read in the order of its addresses, which the processor foresees best (measured 1.1 to 1.6 times as fast).
        That counts more with groups, where each sum has a total besides, and for integers where sums fill several
        registers or rows are few.
        """
        one = self.group or (self.integer and (processor.lanes() < PANEL or rows <= 2))
        return min(1, self._fit(rows)) if one else self._fit(rows)

    @property
    def most_rows(self) -> int:
        """Rows of the largest tile. Without groups, a tile of two panels is 1.1 to 1.5 times as fast as one panel, if
        there are enough registers."""
        least = 2 if self._fit(2) > 2 and not self.group else 1
        return max(1, *(rows for rows in range(1, 13) if self._fit(rows) >= least))


FLOAT32, FLOAT16, BFLOAT16 = Format("float32", 1, 32), Format("float16", 1, 16), Format("bfloat16", 1, 16)
BFLOAT16_PAIRS = Format("bfloat16_pairs", 2, 16, row=(2, 0))
INT8_PAIRS = Format("int8_pairs", 2, 8, row=(2, 4))
INT8_QUADS = Format("int8_quads", 4, 8, row=(1, 12), group=64)
INT8_QUADS_TWICE = Format("int8_quads_twice", 4, 8, passes=2, row=(2, 12))
BLOCKS = tuple(
    Format(name, 4, bits, row=(1, 12), group=group, span=span, minima=minima)
    for name, bits, group, span, minima in (
        ("blocks4", 4, 32, 32, True),  # Q4_0, Q4_1
        ("blocks4_factors", 4, 32, 256, True),  # Q4_K
        ("blocks8", 8, 32, 32, False),  # Q5_0, Q8_0
        ("blocks8_by_16", 8, 16, 256, False),  # Q6_K
        ("blocks8_factors", 8, 32, 256, True),  # Q5_K
        ("blocks8_minima", 8, 32, 32, True),  # Q5_1
        ("blocks8_any", 8, 16, 32, True),  # kinds beside each other that none of these holds
    )
)
"""From few bytes to many."""
FORMATS = (FLOAT32, FLOAT16, BFLOAT16, BFLOAT16_PAIRS, INT8_PAIRS, INT8_QUADS, INT8_QUADS_TWICE, *BLOCKS)


def named(name: str) -> Format:
    """The format of that name."""
    return next(each for each in FORMATS if each.name == name)
