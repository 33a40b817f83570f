"""`cli` runs a command in this process and returns its output; models and prompts to run it on."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.cli.main import main
from tests.checkpoints import Tiny


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Standard error on one line, as line breaks depend on the width of the terminal."""
        return " ".join(self.err.split())


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, stdin: str | bytes | None = "") -> Result:
        """stdin: text, bytes in any encoding, or None: closed."""
        given = io.TextIOWrapper(io.BytesIO(stdin), "utf-8") if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", io.StringIO(given) if isinstance(given, str) else given)
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Result(left.value.code, out, err)

    return run


@pytest.fixture
def pair(tiny: Tiny) -> list[object]:
    """Options for the tiny pair, exact to the last bit."""
    return ["-m", tiny.target, "-md", tiny.draft, "--executor", "torch", "--dtype", "float64", "--device", "cpu"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file of two prompts, each of a category."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"for name in names{i}:\n", "category": kind} for i, kind in enumerate("ab")]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def embedded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The tiny pair in place of the embedded models."""
    monkeypatch.setattr("slipstream.zoo.target_dir", lambda: tiny.target)
    monkeypatch.setattr("slipstream.zoo.draft_dir", lambda: tiny.draft)
    return tiny
