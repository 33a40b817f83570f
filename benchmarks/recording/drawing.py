"""Draws two timed decodings of one text side by side, as an animated SVG.

The animation uses CSS keyframes, so the picture needs no script and works in an `<img>`. The loop begins with the
finished texts, so that a viewer that shows only the first frame, or reduces motion, shows the result. Colours follow
the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

MEAN = "mean acceptance length"
HOLD = 4.0
"""Seconds for which the finished picture is shown."""
COLUMN, LINE = 7.45, 19.0
"""Width of a character and height of a line of text, in pixels."""
FONT = "ui-monospace,SFMono-Regular,'SF Mono',Menlo,Consolas,'Liberation Mono','DejaVu Sans Mono',monospace"
SANS = "-apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif"
THEMES = {
    # class: (light, dark)
    "paper": ("#ffffff", "#0d1117"),
    "pane": ("#f6f8fa", "#151b23"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "draft": ("#0a5c27", "#7ee787"),
    "pill": ("#c8f3d3", "#143d22"),
    "track": ("#dfe4ea", "#2a313c"),
    "slow": ("#8c959f", "#6e7681"),
    "fast": ("#1f883d", "#2ea043"),
}
BORDER = ("#d1d9e0", "#3d444d")
WIDEST = 58
"""Characters of a line, after which the text is wrapped."""


@dataclass(frozen=True)
class Token:
    """An output token. text: its text; drafted: whether it is an accepted draft token; seconds: when it appeared."""

    text: str
    drafted: bool
    seconds: float


@dataclass(frozen=True)
class Take:
    """One timed decoding.

    name, note              title and second line of its pane.
    tokens                  output tokens in order, with the end-of-text token.
    seconds                 time from the request to the end, prefill included.
    mean_acceptance_length  tokens per step.
    """

    name: str
    note: str
    tokens: list[Token]
    seconds: float
    mean_acceptance_length: float

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


@dataclass(frozen=True)
class Recording:
    """Everything that is drawn. request: the request, in one line. takes: [plain, speculative]. slowdown: seconds in
    the picture per measured second. origin: command, date and machine."""

    request: str
    takes: list[Take]
    slowdown: int
    origin: str


@dataclass(frozen=True)
class Piece:
    """Visible characters of a token in one line, without the blanks around them."""

    text: str
    line: int
    column: int
    drafted: bool
    seconds: float


def wrapped(text: str) -> str:
    """Replace blanks by line breaks so that no line is longer than `WIDEST`. The length of the text does not change."""
    chars, start, blank = list(text), 0, -1
    for i, char in enumerate(text):
        if char == "\n":
            start = i + 1
        elif char == " ":
            blank = i
        elif i - start >= WIDEST and blank >= start:
            chars[blank], start = "\n", blank + 1
    return "".join(chars)


def pieces(take: Take) -> Iterator[Piece]:
    """Lay out the tokens of a text in lines and columns."""
    text, line, column, end = wrapped(take.text), 0, 0, 0
    for token in take.tokens:
        start, end = end, end + len(token.text)
        for i, part in enumerate(text[start:end].split("\n")):
            if i:
                line, column = line + 1, 0
            shown = part.strip(" ")
            if shown:
                yield Piece(shown, line, column + part.index(shown), token.drafted, token.seconds)
            column += len(part)


class Picture:
    """Collects shapes and the keyframes that they use. length: length of the animation's loop in seconds."""

    def __init__(self, length: float):
        self.length = length
        self.body: list[str] = []
        self.frames: dict[float, str] = {}

    def add(self, shape: str) -> None:
        self.body.append(shape)

    def text(self, x: float, y: float, kind: str, text: str, more: str = "") -> None:
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}"{more}>{escape(text)}</text>')

    def appears(self, at: float) -> str:
        """Return the CSS class of an element that is hidden from `HOLD` seconds until `at` seconds of the loop."""
        return self.frames.setdefault(round(at, 3), f"t{len(self.frames)}")

    def keyframes(self) -> str:
        hidden = 100 * HOLD / self.length
        return "\n".join(
            f"@keyframes {name}{{0%{{opacity:1}}{hidden:.2f}%{{opacity:0}}{100 * at / self.length:.2f}%{{opacity:1}}}}"
            f".{name}{{animation:{name} {self.length:.2f}s step-end infinite}}"
            for at, name in self.frames.items()
        )


def draw(recording: Recording, narrow: bool = False) -> str:
    """Return the SVG document. narrow: panes below each other, for phones."""
    plain = recording.takes[0]
    lines = wrapped(plain.text).rstrip("\n").split("\n")
    columns = max(map(len, lines))
    picture = Picture(HOLD + recording.slowdown * plain.seconds)
    margin, gap, pad = (8.0, 10.0, 14.0) if narrow else (16.0, 16.0, 16.0)
    pane_width = round(columns * COLUMN + 2 * pad)
    head, foot = 58.0, 66.0
    pane_height = head + len(lines) * LINE + foot
    count = len(recording.takes)
    top = 66.0 if narrow else 48.0
    if narrow:
        width, height = pane_width + 2 * margin, top + count * (pane_height + gap) + 48
    else:
        width, height = count * pane_width + gap + 2 * margin, top + pane_height + 40
    picture.add(f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10" class="paper edge"/>')
    picture.text(margin + 2, 29, "soft small", "Request, with the text:" if narrow else "Request:")
    x, y = (margin + 2, 51) if narrow else (margin + 62, 29)
    picture.text(x, y, "ink code", recording.request, fitted(recording.request, 0.86 * COLUMN if narrow else COLUMN))
    if not narrow:
        picture.text(width - margin - 2, 29, "soft small", "followed by the text", ' text-anchor="end"')
    for i, take in enumerate(recording.takes):
        left = margin if narrow else margin + i * (pane_width + gap)
        above = top + i * (pane_height + gap) if narrow else top
        picture.add(f'<g transform="translate({left:g} {above:g})">')
        pane(picture, recording, take, pane_width, pane_height, pad, head)
        picture.add("</g>")
    captions(picture, recording, narrow, margin, width, height)
    return document(picture, recording, width, height)


def fitted(text: str, column: float = COLUMN) -> str:
    """Return SVG attributes that give a text the same width in every monospaced font."""
    return f' textLength="{len(text) * column:.1f}" lengthAdjust="spacingAndGlyphs"'


def pane(
    picture: Picture, recording: Recording, take: Take, width: float, height: float, pad: float, head: float
) -> None:
    """Draw the pane of one decoding: title, text, and below them a bar whose length is the time."""
    plain = recording.takes[0]
    fast = take is not plain
    picture.add(f'<rect width="{width:g}" height="{height:g}" rx="8" class="pane edge"/>')
    picture.text(pad, 25, "ink title", take.name)
    picture.text(pad, 43, "soft small", take.note)
    for at, group in grouped(take).items():
        picture.add(f'<g class="{picture.appears(HOLD + recording.slowdown * at)}">')
        for piece in group:
            x, y = pad + piece.column * COLUMN, head + (piece.line + 0.72) * LINE
            if piece.drafted:
                wide = len(piece.text) * COLUMN - 0.8
                place = f'x="{x + 0.4:.1f}" y="{y - 13:.1f}" width="{wide:.1f}" height="17"'
                picture.add(f'<rect {place} rx="3" class="pill"/>')
            kind = "draft" if piece.drafted else "ink"
            picture.text(round(x, 1), round(y, 1), f"{kind} code", piece.text, fitted(piece.text))
        picture.add("</g>")
    y, full = height - 56, width - 2 * pad
    picture.add(f'<rect x="{pad:g}" y="{y:g}" width="{full:g}" height="6" rx="3" class="track"/>')
    share = take.seconds / plain.seconds
    kind = "fast" if fast else "slow"
    picture.add(f'<rect x="{pad:g}" y="{y:g}" width="{full * share:.1f}" height="6" rx="3" class="{kind} {kind}-bar"/>')
    done = picture.appears(HOLD + recording.slowdown * take.seconds)
    picture.add(f'<g class="{done}">')
    picture.text(pad, height - 21, f"{'draft' if fast else 'ink'} figure", f"{take.tokens_per_second:,.0f} tokens/s")
    details = (
        f"{len(take.tokens)} tokens in {take.seconds * 1e3:,.0f} ms",
        f"{MEAN} {take.mean_acceptance_length:.2f}",
    )
    for i, text in enumerate(details):
        picture.text(width - pad, height - 29 + 16 * i, "soft small", text, ' text-anchor="end"')
    picture.add("</g>")


def grouped(take: Take) -> dict[float, list[Piece]]:
    """Group pieces by the time at which they appear."""
    groups: dict[float, list[Piece]] = {}
    for piece in pieces(take):
        groups.setdefault(piece.seconds, []).append(piece)
    return groups


def captions(picture: Picture, recording: Recording, narrow: bool, margin: float, width: float, height: float) -> None:
    """Draw the legend: the meaning of the colour and of the times."""
    plain, fast = recording.takes
    y = height - (36 if narrow else 15)
    picture.add(f'<rect x="{margin + 2:g}" y="{y - 10:g}" width="22" height="13" rx="3" class="pill"/>')
    picture.text(margin + 31, y, "soft small", "draft token that the target accepted")
    ratio = f"same text, {plain.seconds / fast.seconds:.1f}x faster"
    slow = f"slowed down {recording.slowdown}x" if recording.slowdown > 1 else "at its real speed"
    if narrow:
        picture.text(margin + 2, height - 15, "soft small", f"{ratio} · {slow}")
    else:
        picture.text(width - margin - 2, y, "soft small", f"{ratio} · {slow}", ' text-anchor="end"')


def document(picture: Picture, recording: Recording, width: float, height: float) -> str:
    plain, fast = recording.takes
    title = (
        f"Plain decoding makes {plain.tokens_per_second:,.0f} tokens per second, speculative decoding of the same text "
        f"{fast.tokens_per_second:,.0f}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
            f"<desc>{escape(recording.origin)}</desc>",
            f"<style>\n{style(picture, recording)}\n</style>",
            *picture.body,
            "</svg>\n",
        ]
    )


def style(picture: Picture, recording: Recording) -> str:
    plain, fast = recording.takes
    length, start = picture.length, 100 * HOLD / picture.length
    bars = "\n".join(
        f"@keyframes {name}{{0%{{transform:scaleX(1)}}{start - 0.01:.2f}%{{transform:scaleX(1)}}"
        f"{start:.2f}%{{transform:scaleX(0)}}{start + 100 * recording.slowdown * take.seconds / length:.2f}%"
        f"{{transform:scaleX(1)}}}}"
        f".{name}-bar{{transform-box:fill-box;transform-origin:left;animation:{name} {length:.2f}s linear infinite}}"
        for name, take in (("slow", plain), ("fast", fast))
    )
    light, dark = (
        "".join(f".{name}{{fill:{pair[i]}}}" for name, pair in THEMES.items()) + f".edge{{stroke:{BORDER[i]}}}"
        for i in (0, 1)
    )
    return "\n".join(
        [
            f"text{{font-family:{SANS}}}.code{{font:12.4px {FONT};white-space:pre;font-variant-ligatures:none}}",
            ".title{font-size:15px;font-weight:600}.small{font-size:12.5px}.figure{font-size:19px;font-weight:600}",
            light,
            f"@media (prefers-color-scheme:dark){{{dark}}}",
            picture.keyframes(),
            bars,
            "@media (prefers-reduced-motion:reduce){*{animation:none!important}}",
        ]
    )
