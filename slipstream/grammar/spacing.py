"""`Spacing`: predicts white space that the grammar leaves free, from earlier white space in the text."""

from __future__ import annotations

from dataclasses import dataclass, field

SPACES = b" \t\r\n"
OPEN, CLOSE, MARKS = b"{[(", b"}])", b"{[(}]):,"
USUAL = {ord(":"): b" ", ord(","): b" "}
"""White space after a mark of JSON until the output has such a mark: the white space of `json.dumps`."""


@dataclass(slots=True)
class Spacing:
    """Reads JSON and remembers the white space after each mark (`:`, `,` and brackets), which is usually the same in
    the complete text. A copy can read more text without changing what is remembered.

    seen   for (mark, byte after the white space, or None for any byte): the white space, and the nesting depth.
    last   the last byte that is not white space. gap: the white space after this byte.
    """

    seen: dict[tuple[int, int | None], tuple[bytes, int]] = field(default_factory=dict)
    last: int = 0
    gap: bytes = b""
    depth: int = 0
    is_quoted: bool = False
    is_escaped: bool = False

    def copy(self) -> Spacing:
        return Spacing(self.seen, self.last, self.gap, self.depth, self.is_quoted, self.is_escaped)

    def read(self, data: bytes, learns: bool = False) -> None:
        """Read these bytes. learns: whether their white space is remembered."""
        at = 0
        while at < len(data):
            if self.is_quoted and not self.is_escaped:  # only a quote or a backslash matters in a string
                quote = data.find(b'"', at)
                backslash = data.find(b"\\", at, len(data) if quote < 0 else quote)
                if max(quote, backslash) < 0:
                    self.last = data[-1]
                    return
                at = quote if backslash < 0 else backslash
            byte = data[at]
            at += 1
            if self.is_quoted:
                self.is_quoted = self.is_escaped or byte != ord('"')
                self.is_escaped = byte == ord("\\") and not self.is_escaped
                self.last = byte
            elif byte in SPACES:
                self.gap += bytes([byte])
            else:
                self.depth -= byte in CLOSE
                if learns:
                    self.seen[self._mark, byte] = self.seen[self._mark, None] = self.gap, self.depth
                self.depth += byte in OPEN
                self.last, self.gap, self.is_quoted = byte, b"", byte == ord('"')

    @property
    def _mark(self) -> int:
        """The last byte if it is a mark; 0 stands for every other byte."""
        return self.last if self.last in MARKS else 0

    def expect(self, following: int | None) -> bytes:
        """Return the white space that is still missing before the byte `following` (None: unknown)."""
        if self.is_quoted:
            return b""
        closes = following is not None and following in CLOSE
        depth = self.depth - closes
        keys: list[tuple[int, int | None]] = [(self._mark, following)]
        keys += [(mark, None) for mark in OPEN] if closes else [(self._mark, None)]
        if self.last == ord(","):  # one line per entry: after a comma the same space as after the opening bracket
            keys += [(mark, None) for mark in OPEN if b"\n" in self.seen.get((mark, None), (b"", 0))[0]]
        seen = next((self.seen[key] for key in keys if key in self.seen), None)
        if seen is None and b"\n" in self.gap:
            return b" " if self._indent % 2 else b""  # the last space of a line is written by the next token
        gap, stood = seen or (USUAL.get(self.last, b""), 0)
        if b"\n" in gap and stood > 0:
            line, indent = gap[: gap.rindex(b"\n") + 1], gap[gap.rindex(b"\n") + 1 :]
            gap = line + indent[: len(indent) // stood] * depth
        return gap[len(self.gap) :] if gap.startswith(self.gap) else b""

    @property
    def _indent(self) -> int:
        return len(self.gap) - 1 - self.gap.rindex(b"\n")
