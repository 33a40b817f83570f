"""The examples of README and docs/commands.md run (with the embedded models for `path/to/...`), and every command in a
console block of README or docs/ prints what is shown, except for measured times."""

import io
import re
import shlex
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream import LLM
from slipstream.cli.main import main
from slipstream.cli.options import SamplingOptions
from slipstream.cli.verify import VerifyPrompts
from slipstream.core.stats import SpecStats
from slipstream.verify import verification
from slipstream.verify.panel_requests import PanelRequest
from slipstream.verify.positions import Positions
from slipstream.verify.verification import Checks, VerifyConfig
from slipstream.zoo import draft_dir

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SHOWN = README.read_text() + (ROOT / "docs" / "commands.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", SHOWN, re.DOTALL)
SHORTER = {
    "verify": ["-m", str(draft_dir()), "--prompts", "1", "--seed", "1", "--texts", "2", "--reach", "0", "-n", "12"],
}
"""Options that make a command faster without changing the form of its output, with the smaller of the embedded models
as its target. Of its numbers, draft lengths are compared here, others below."""
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SESSIONS = [shown for page in PAGES for shown in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)]
COMMANDS = [command for session in SESSIONS for command in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]]
NUMBER = r"\d[\d,]*(?:\.\d+)?"


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_snippets_of_the_readme_run(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.sub(r'"path/to/[\w-]+"', '"embedded"', snippet), {})
    assert capsys.readouterr().out.strip()


def test_the_readme_has_snippets_and_commands() -> None:
    assert len(SNIPPETS) >= 2
    assert {command.split()[1] for command in COMMANDS} >= {"generate", "chat", "verify"}


@pytest.mark.parametrize("command", COMMANDS, ids=[command.split()[1] for command in COMMANDS])
def test_the_commands_of_console_blocks_print_what_is_shown(command, monkeypatch, capsys):
    words, rest = taken(command)
    typed = [line[4:] for line in rest if line.startswith((">>>", "..."))]
    shown = [line for line in rest if line and not line.startswith((">>>", "..."))]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as left:
        main([*words[1:], *SHORTER.get(words[1], ())])
    assert left.value.code == 0
    printed = "".join(capsys.readouterr())
    masked = without_numbers if words[1] in SHORTER else without_times
    for line in shown:
        assert masked(line) in masked(printed), line


def test_the_transcript_of_verify_has_the_numbers_of_todays_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes. So here its texts are counted and not decoded, except for those of the control, of which its
    requests are made. How many tokens are sampled differs from run to run, because texts end early by chance."""
    (shown,) = re.findall(r"(\d+) of \1 texts identical, ([\d,]+) sampled tokens", README.read_text())
    llm = LLM("embedded", draft="suffix")
    prompts = VerifyPrompts().load(llm, SamplingOptions().params().max_tokens)
    checks = Checks(llm, prompts, VerifyConfig(params=SamplingOptions().params()))
    checks.control()
    most = 0

    def full(requests: Seq[PanelRequest]) -> list[SimpleNamespace]:
        return [SimpleNamespace(output=[5] * each.params.max_tokens, stats=SpecStats()) for each in requests]

    def counted(self: Positions, requests: Seq[PanelRequest], *_: object) -> list[list[int]]:
        nonlocal most
        most += sum(each.params.max_tokens for each in requests)
        return [seq.output for seq in full(requests)]

    monkeypatch.setattr(verification, "wrong_token", lambda *_: None)
    monkeypatch.setattr(checks, "_decode", lambda drafter, requests, how=None: full(requests))
    monkeypatch.setattr(checks, "_row", lambda *_: {})
    monkeypatch.setattr(Positions, "decode", counted)
    monkeypatch.setattr(Positions, "decode_at_ends", lambda *_: None)
    checks.greedy()
    checks.coupled()
    checks._look(0, 1)
    assert int(shown[0]) == len(checks.data.greedy) + len(checks.data.coupled)
    assert 0.75 * most < int(shown[1].replace(",", "")) < most


def taken(command: str) -> tuple[list[str], list[str]]:
    """The words of a command, which may span several lines, and the lines after it."""
    lines = command.splitlines()
    for count in range(1, len(lines) + 1):
        try:
            return shlex.split("\n".join(lines[:count])), lines[count:]
        except ValueError:  # a quotation that is not closed yet
            continue
    raise AssertionError(f"the quotation marks do not match: {command}")


def without_numbers(text: str) -> str:
    """Draft lengths, as in K=16, stay."""
    return re.sub(rf"(?<!K=)(?<![\d,.]){NUMBER}", "N", text)


def without_times(text: str) -> str:
    """Without what differs from run to run: speeds, times and speed-ups with their intervals."""
    return re.sub(rf"{NUMBER}(?:x \([^)]*\)|x| ?m?s\b| tok(?:ens)?/s)", "N", text)


def test_only_times_are_masked() -> None:
    assert without_times("42 tokens, 491 tokens/s, 1.20x (1.1-1.3), 0.5 s, K=10") == "42 tokens, N, N, N, K=10"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_a_page_links_to_exists(page: Path) -> None:
    """Files, and headings of pages."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        file, _, anchor = link.partition("#")
        there = page.parent / file if file else page
        if "://" not in link:
            assert there.exists(), link
            assert not anchor or anchor in anchors(there.read_text()), link


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    """The log may name removed files, and NAME is a placeholder."""
    named = re.findall(r"`((?:slipstream|recipes|benchmarks|tests|docs)/[\w./-]+)`", page.read_text())
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]
