"""examples/python: each program runs with the embedded models, and answers."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "examples" / "python"


def run(name: str, *words: str, monkeypatch: pytest.MonkeyPatch, written: str = "") -> int:
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO(written))
    try:
        runpy.run_path(str(PROGRAMS / name), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_chat_answers_each_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("chat.py", "embedded", "embedded", monkeypatch=monkeypatch, written="hello\nmore\n\n")
    assert capsys.readouterr().out.count(" tokens a step]") == 2


def test_a_file_is_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "area.py").write_text("def area(width, height):\n    return width * height\n")
    words = (str(tmp_path / "area.py"), "Rename it.", "--target", "embedded", "--max-tokens", "24")
    run("edit_file.py", *words, monkeypatch=monkeypatch)
    out, err = capsys.readouterr()
    assert out.strip()
    assert " tokens in " in err


def test_each_line_becomes_an_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("extract.py", "--target", "embedded", monkeypatch=monkeypatch, written="Ada was born in 1815.\n\nAlan.\n")
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(objects) == 2
    assert all(set(each) in ({"name", "city", "year"}, {"cut"}) for each in objects)


def test_texts_are_the_same_with_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("import os\ndef add(a, b):\n")
    words = (str(tmp_path / "prompts.txt"), "embedded", "embedded", "--max-tokens", "16")
    assert run("same_text.py", *words, monkeypatch=monkeypatch) == 0
    assert "the same texts: True; median speed-up:" in capsys.readouterr().out
