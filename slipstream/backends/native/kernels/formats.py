"""The formats of `checkpoints.weight_formats`, with the sizes and tiles that they have on this processor."""

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.checkpoints import weight_formats
from slipstream.checkpoints.weight_formats import WeightFormat


class Format(WeightFormat):
    """A weight format, and how this processor stores weights and activations for it."""

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def wide(self) -> bool:
        """Return whether activations of a format with groups are stored in 16 bits, see `block_tiles`."""
        return self.group > 0 and self.offset and processor.adds_pairs()

    @property
    def offset(self) -> bool:
        """Return whether weights need 8 bits. They are then stored with `processor.byte_offset()` added."""
        return self.bits == 8 or len(self.table) > 0

    @property
    def upper(self) -> int:
        """Number of upper bits of a weight that are stored apart from its lower 4 bits."""
        return self.bits - 4 if self.bits < 8 else 0

    @property
    def added(self) -> int:
        """The offset that is added to integers so that they are stored without a sign. 0 for 8 bits on Arm, which are
        stored with a sign."""
        return processor.byte_offset() if self.offset else self.zero

    @property
    def heading(self) -> int:
        """Bytes of the scales and minima for PANEL outputs and one span of columns."""
        return (2 - self.powers) * PANEL * (1 + self.minima) if self.span else 0

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
        """Number of panels in a tile of `rows` rows. With several panels, each loaded activation is used several times.
        A single panel is read in the order of its addresses, which the processor prefetches best (measured 1.1 to 1.6
        times as fast). A single panel is better for formats with groups, where each sum also has a total, and for
        integers if sums fill several registers or rows are few.
        """
        one = self.group or (self.integer and (processor.lanes() < PANEL or rows <= 2))
        return min(1, self._fit(rows)) if one else self._fit(rows)

    @property
    def most_rows(self) -> int:
        """Most rows of a tile. In formats without groups, tiles of two panels are 1.1 to 1.5 times as fast as tiles of
        one panel, if there are enough registers."""
        least = 2 if self._fit(2) > 2 and not self.group else 1
        return max(1, *(rows for rows in range(1, 13) if self._fit(rows) >= least))


FORMATS = tuple(Format(**vars(each)) for each in weight_formats.FORMATS.values())
named = {each.name: each for each in FORMATS}.__getitem__
FLOAT32, FLOAT16, BFLOAT16, BFLOAT16_PAIRS = map(named, ("float32", "float16", "bfloat16", "bfloat16_pairs"))
INT8_PAIRS, INT8_QUADS_TWICE = map(named, ("int8_pairs", "int8_quads_twice"))
Q8_0 = Format(**vars(weight_formats.Q8_0))
KV_FORMATS = {each.name: each for each in (FLOAT32, FLOAT16, Q8_0)}
"""Formats of the KV cache by name, as in `weight_formats`."""
