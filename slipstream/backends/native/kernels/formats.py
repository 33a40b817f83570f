"""How the weights of a matrix are stored and multiplied."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.processor import PANEL


@dataclass(frozen=True)
class Format:
    """One way.

    name     as in function names
    step     columns per step of the inner loop
    bytes    per weight
    passes   number of parts that an activation is split into
    grouped  whether activations have a scale per group of columns instead of one per row
    row      bytes of a packed row of activations: per column, and per group or row (see `tiles._matrix_tile`)
    """

    name: str
    step: int
    bytes: int
    passes: int = 1
    grouped: bool = False
    row: tuple[int, int] = (4, 0)

    @property
    def integer(self) -> bool:
        return self.bytes == 1

    def row_bytes(self, columns: int, unit: int) -> int:
        """Bytes of a packed row of activations. unit: columns of a group."""
        return self.row[0] * columns + self.row[1] * (columns // unit if self.grouped else 1)

    def panels(self, rows: int) -> int:
        """Number of panels in a tile of `rows` rows such that its sums stay in registers; 0 if none fits."""
        each = PANEL // processor.lanes()  # registers that PANEL sums fill
        room = processor.registers() // each
        return next((p for p in (4, 2, 1) if (rows * self.passes + 1) * p < room), 0)

    @property
    def most_rows(self) -> int:
        """Rows of the largest tile. A tile of two panels uses each loaded activation twice: measured 1.1 to 1.5 times
        as fast as one panel, if there are enough registers."""
        least = 2 if self.panels(2) > 2 else 1
        return max(1, *(rows for rows in range(1, 13) if self.panels(rows) >= least))


FLOAT32, FLOAT16, BFLOAT16 = Format("float32", 1, 4), Format("float16", 1, 2), Format("bfloat16", 1, 2)
BFLOAT16_PAIRS = Format("bfloat16_pairs", 2, 2, row=(2, 0))
INT8_PAIRS = Format("int8_pairs", 2, 1, row=(2, 4))
INT8_QUADS = Format("int8_quads", 4, 1, grouped=True, row=(1, 8))
INT8_QUADS_TWICE = Format("int8_quads_twice", 4, 1, passes=2, row=(2, 12))
FORMATS = (FLOAT32, FLOAT16, BFLOAT16, BFLOAT16_PAIRS, INT8_PAIRS, INT8_QUADS, INT8_QUADS_TWICE)


def named(name: str) -> Format:
    """The format of that name."""
    return next(each for each in FORMATS if each.name == name)
