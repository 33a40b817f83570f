"""The picture at the top of README: it shows what was measured, and needs only a browser."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.recording.drawing import HOLD, WIDEST, Recording, Take, Token, draw, pieces, wrapped

ROOT = Path(__file__).parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["# a", " note", "\n", "def", " f", "(x", "):\n   ", " return", " x", " <", " 2", ""]


def take(name: str, step: int, seconds: float) -> Take:
    """The words, `step` of them at a time; all but the last of a step are accepted draft tokens."""
    count = -(-len(WORDS) // step)
    tokens = [Token(w, (i + 1) % step > 0, seconds * (i // step + 1) / count) for i, w in enumerate(WORDS)]
    return Take(name, "a note", tokens, seconds, len(WORDS) / count)


@pytest.fixture(params=[False, True], ids=["wide", "narrow"])
def drawn(request: pytest.FixtureRequest) -> str:
    takes = [take("Plain decoding", 1, 0.12), take("Speculative decoding", 4, 0.04)]
    return draw(Recording("Edit <it>.", takes, 50, "2026-01-01, a machine; command: python --rounds 3"), request.param)


def test_the_picture_shows_both_texts_and_their_figures(drawn: str) -> None:
    root = ElementTree.fromstring(drawn)
    shown = [element.text for element in root.iter(f"{SVG}text")]
    for text in ("Edit <it>.", "100 tokens/s", "300 tokens/s", "mean acceptance length 4.00"):
        assert shown.count(text) == 1
    assert shown.count("return") == 2
    assert "3.0x faster" in " ".join(map(str, shown))
    assert "slowed down 50x" in " ".join(map(str, shown))
    assert "a machine; command: python --rounds 3" in str(root.findtext(f"{SVG}desc"))


def test_tokens_appear_when_they_were_measured_and_drafted_ones_are_marked(drawn: str) -> None:
    length = HOLD + 50 * 0.12
    times = {
        name: float(percent) * length / 100 - HOLD
        for name, percent in re.findall(r"@keyframes (t\d+)\{0%\{opacity:1\}[\d.]+%\{opacity:0\}([\d.]+)%", drawn)
    }
    panes = [group for group in ElementTree.fromstring(drawn) if group.tag == f"{SVG}g"]
    assert len(panes) == 2
    for pane, step, seconds in zip(panes, (1, 4), (0.12, 0.04), strict=True):
        groups = [group for group in pane if group.tag == f"{SVG}g"][:-1]  # the last one holds the figures
        appeared = {round(times[str(group.get("class"))] / 50, 3) for group in groups}
        assert appeared <= {round(seconds * n * step / 12, 3) for n in range(1, 13)}
        pills = [each for group in groups for each in group if each.get("class") == "pill"]
        assert len(pills) == (0 if step == 1 else sum(piece.drafted for piece in pieces(take("", 4, 1.0))))


def test_the_picture_runs_without_scripts_and_shows_the_final_state_first(drawn: str) -> None:
    for word in ("<script", "javascript", "http://", "https://", "url("):
        assert word not in drawn.replace("http://www.w3.org/2000/svg", "")
    for frames in re.findall(r"@keyframes \w+\{0%\{([^}]*)\}", drawn):
        assert frames in ("opacity:1", "transform:scaleX(1)")
    assert "prefers-color-scheme:dark" in drawn
    assert "prefers-reduced-motion" in drawn


@pytest.mark.parametrize("name", ["recording.svg", "recording-narrow.svg"])
def test_the_pictures_of_the_readme_are_there_and_small(name: str) -> None:
    path = ROOT / "docs" / name
    assert f"docs/{name}" in (ROOT / "README.md").read_text()
    assert path.stat().st_size < 200_000
    root = ElementTree.fromstring(path.read_text())
    assert re.match(r"\d{4}-\d\d-\d\d, ", str(root.findtext(f"{SVG}desc")))


def test_long_lines_break_at_blanks_and_keep_every_token() -> None:
    text = "a word " * 30 + "\n" + "b" * 70
    broken = wrapped(text)
    assert broken.replace("\n", " ") == text.replace("\n", " ")
    assert all(len(line) <= WIDEST for line in broken.split("\n")[:-1])
    assert broken.split("\n")[-1] == "b" * 70
