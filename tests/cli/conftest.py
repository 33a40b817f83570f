"""Fixtures: `cli`, which runs a command in this process and returns its output, and models and prompts for commands."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.llm import LLM
from tests.server.hosting import Host, hosted
from tests.tiny_checkpoints import Tiny


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Standard error on one line, because line breaks depend on the width of the terminal."""
        return " ".join(self.err.split())

    @property
    def shown(self) -> str:
        """Standard output on one line."""
        return " ".join(self.out.split())

    @property
    def width(self) -> int:
        """Length of the longest line of standard output."""
        return max(map(len, self.out.splitlines()))


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, stdin: str | bytes | None = "", code: int | None = None) -> Result:
        """Run a command. stdin: text, bytes in any encoding, or None for closed standard input. code: the exit code
        that the command must have."""
        given = io.TextIOWrapper(io.BytesIO(stdin), "utf-8") if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", io.StringIO(given) if isinstance(given, str) else given)
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        assert code in (None, left.value.code), err
        return Result(left.value.code, out, err)

    return run


@pytest.fixture
def refused(cli: Callable[..., Result]) -> Callable[..., str]:
    """Function that runs a command which must be refused: with exit code 2 and one message, and without other output.
    Returns the message."""

    def run(*arguments: object, **how: str | bytes | None) -> str:
        result = cli(*arguments, **how, code=2)
        assert (result.out, result.said.count("error: ")) == ("", 1), result.err
        return result.said

    return run


@pytest.fixture
def report(cli: Callable[..., Result], tmp_path: Path) -> Callable[[Path], str]:
    """Function that returns the HTML page of a result file."""

    def made(file: Path) -> str:
        cli("report", file, "--out", tmp_path / "page.html", code=0)
        return (tmp_path / "page.html").read_text()

    return made


@pytest.fixture
def pair(tiny: Tiny) -> list[object]:
    """Options for the tiny pair, in float64 so that outputs are always the same."""
    return ["-m", tiny.target, "-md", tiny.draft, "--executor", "torch", "--dtype", "float64", "--device", "cpu"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file of two prompts of different categories."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"for name in names{i}:\n", "category": kind} for i, kind in enumerate("ab")]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def embedded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Replace the embedded models by the tiny pair."""
    monkeypatch.setattr("slipstream.zoo.target_dir", lambda: tiny.target)
    monkeypatch.setattr("slipstream.zoo.draft_dir", lambda: tiny.draft)
    return tiny


@pytest.fixture(scope="session")
def hosted_pair(tiny: Tiny) -> Iterator[Host]:
    llm = LLM(str(tiny.target), draft=str(tiny.draft), draft_tokens=3, max_batch=4, executor="torch", device="cpu")
    with hosted(llm, keys=("a-key",)) as server:
        yield server


@pytest.fixture
def host(hosted_pair: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A server of the tiny pair, whose API key is in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    return hosted_pair


@pytest.fixture
def wrong_token(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Function that plants a fault: if the drafter with this name drafts, the output token at index `place` is
    wrong."""
    generate = LLM.generate

    def plant(drafter: str, place: int) -> None:
        def wrong(self: LLM, *given: Any) -> Any:
            done = generate(self, *given)
            done[0].token_ids[place] ^= self.drafter.name == drafter
            return done

        monkeypatch.setattr(LLM, "generate", wrong)

    return plant
