"""docs/tutorial.md: its snippets print what it shows, its commands exist, its numbers come from the script."""

import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpt2_pair, tutorial
from benchmarks.tutorial import MEASURED, STILL, TUTORIAL
from benchmarks.tutorial_kit import WIDTH, Kit
from slipstream import LLM, SamplingParams
from slipstream.cli.main import canonical, main, parser
from slipstream.errors import CheckpointError
from slipstream.measure import arms as measured_arms
from slipstream.measure.arms import Arm

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


TIMED = {"tok/s", "speed-up (95%)", "predicted"}
"""Columns of tables whose cells are measured times or follow from them."""
SAME = (
    r"^slipstream .*$", r"^ ?(?:architecture|parameters|stored|context|vocabulary|target|draft|KV cache)  .*$",
    r"^The models .*$", r"^- `slipstream .*$",
    r"(draft model, K=\d+) .* (\d+%) +([\d.]+) +(\w+)",
    r"^(\w+) +(\d+%) +((?:\d+% )+\.\.\.) +([\d.]+) ",
)  # fmt: skip
"""Lines of what is printed, or parts of them, that hold no time: of the commands, `info` and `tune`."""
REPEATED = ("check-pair", "lookups", "bench", "tune", "lengths")
"""Blocks of which everything but times is measured again here: draft lengths, acceptance, texts, what is compared."""


@pytest.mark.parametrize("name", REPEATED)
def test_a_measured_block_shows_what_its_command_prints_except_for_times(name, monkeypatch, tmp_path, capsys):
    """Every setting decodes every prompt once, as in its first timed pass, and all passes report that: nothing that is
    compared depends on their number."""
    monkeypatch.setattr("slipstream.measure.tuning.RECORDED", 1)
    warm_up, decode, decoded = measured_arms.warm_up, measured_arms.decode, {}

    def decode_once(arm: Arm, drafter: Any, prompts: Seq[Seq[int]], seeds: Seq[int]) -> Any:
        assert arm.params.greedy
        key = (arm.name, arm.draft_tokens, str(prompts))
        if key not in decoded:
            decoded[key] = decode(arm, drafter, prompts, seeds)
        return decoded[key]

    monkeypatch.setattr(measured_arms, "decode", decode_once)
    monkeypatch.setattr(measured_arms, "warm_up", lambda run, seed, *more: warm_up(run, seed + 1, *more))

    def run(kit: Kit, command: str, fails: bool = False) -> str:
        words = shlex.split(command)[1:]
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([*words, *(["--rounds", "1"] if "--rounds" in words else [])])
        assert left.value.code == 0
        return capsys.readouterr().out

    monkeypatch.setattr(Kit, "run", run)
    monkeypatch.setattr(Kit, "draw", lambda kit, name, plot: plot.alt)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(tmp_path)
    rows = MEASURED[name](Kit(tmp_path, tmp_path))
    assert without_times(rows) == without_times(FIGURES[name]), f"run `make figures FIGURES='--only {name}'`"


def without_times(block: str) -> list[object]:
    """What a block says that is the same in every run: commands, methods with their draft lengths, cells of tables,
    compatibility of models, acceptance."""
    kept: list[object] = [part for pattern in SAME for part in re.findall(pattern, block, re.MULTILINE)]
    if "| method |" in block:  # also in the sentence above the table and in the texts of plots
        kept.append(set(re.findall(r"\w+, K=\w+", block)))
    heads: list[str] = []
    for line in block.splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        heads = [] if not cells else heads or cells
        drawn = {"accept"} if line.startswith("| lookahead") else set()  # its window is drawn anew in each pass
        kept += [[cell for head, cell in zip(heads, cells, strict=True) if head not in TIMED | drawn]] if cells else []
    return kept


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_block_shows_its_command(name: str) -> None:
    if name not in ("origin", "three-lengths"):  # of all of them; of the run above
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
