"""A drafter added as described in `drafters.registry`, by a file and a line, is available everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream.drafters
from slipstream import LLM, SamplingParams
from slipstream.bench.configs import Choice, equivalents
from slipstream.bench.measure import recreated_per_pass
from slipstream.cli.measuring import LabModels
from slipstream.cli.options import ModelOptions
from slipstream.cli.tune import TuneModels
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs
from tests.checkpoints import Tiny
from tests.drafters.conformance import Conformance

ROOT = Path(__file__).parents[2]
(MODULE,) = re.findall(
    r"```python\n# slipstream/drafters/bigram.py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL
)
"""The drafter of the guide."""
LINE = 'DrafterSpec("bigram", Needs.NOTHING, 7, tuned=True)'
ADDED = f"""import slipstream.drafters
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs

slipstream.drafters.__path__.append(__file__.rpartition("/")[0])
DRAFTERS["bigram"] = {LINE}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bigram.py").write_text(MODULE)
    (tmp_path / "added.py").write_text(ADDED)
    return tmp_path


@pytest.fixture
def added(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process: the file in the folder of drafters, the line in the table."""
    monkeypatch.setattr(slipstream.drafters, "__path__", [*slipstream.drafters.__path__, str(folder)])
    monkeypatch.setitem(DRAFTERS, "bigram", DrafterSpec("bigram", Needs.NOTHING, 7, tuned=True))
    assert repr(eval(LINE)) == repr(DRAFTERS["bigram"])
    yield
    sys.modules.pop("slipstream.drafters.bigram", None)


def elsewhere(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process where the drafter was added before anything read the table."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


def test_it_is_listed_with_its_needs_length_and_options(added: None, cli) -> None:
    assert json.loads(cli("drafters", "--json").out)["bigram"] == {
        "is": "Bigram lookup: drafts what followed the newest token the last time it occurred",
        "needs": "nothing",
        "length": 7,
        "longest": 8,
    }
    assert "\n bigram " in cli("drafters").out
    assert json.loads(cli("drafters", "bigram", "--json").out) == {"reach": 256}


def test_it_is_a_choice_with_its_own_length_and_its_options_are_checked(added: None, cli) -> None:
    assert (ModelOptions(drafter="bigram").method, ModelOptions(drafter="bigram").fixed_length) == ("bigram", 7)
    assert "did you mean 'bigram'" in cli("generate", "x", "--drafter", "bigramt").said
    result = cli("generate", "x", "--drafter", "bigram", "-o", "reach=0", "--executor", "torch")
    assert (result.code, "reach is 0" in result.said) == (2, True)


def test_it_generates_the_targets_text_alone_and_in_a_stack(added: None, cli, pair: list[object], tiny: Tiny) -> None:
    plain = cli("generate", "for", *pair, "-n", "12", "-q", "--drafter", "none")
    for name in ("bigram", "suffix,bigram"):
        assert cli("generate", "for", *pair, "-n", "12", "-q", "--drafter", name).out == plain.out
    llm = LLM(tiny.target, "bigram", executor="torch", draft_options={"reach": 64}, draft_tokens=4)
    assert llm.generate("for", SamplingParams(max_tokens=60))[0].stats.proposed > 0


def test_the_lab_measures_it(added: None) -> None:
    contender = LabModels(drafter=["bigram:reach=2"]).contenders()[0]
    assert (contender.drafter, contender.draft_tokens, contender.options) == ("bigram", 7, {"reach": 2})
    assert recreated_per_pass("bigram")
    assert "bigram" in TuneModels().specs()
    assert all("no counterpart" in each.note for each in equivalents(Choice("bigram", 4)).values())


def test_help_names_it(folder: Path) -> None:
    script = "import added\nfrom slipstream.cli.main import main\nmain(['generate', '--help'])"
    assert "bigram" in elsewhere(folder, "-c", script).stdout


def test_the_conformance_suite_picks_it_up(folder: Path) -> None:
    suites = ["tests/drafters/test_conformance.py", "tests/drafters/test_foreign.py", "tests/drafters/test_registry.py"]
    collected = elsewhere(folder, "-m", "pytest", "-p", "added", "--collect-only", "-k", "bigram", *suites).stdout
    for promise in vars(Conformance):
        assert not promise.startswith("test_") or f"TestRegistered::{promise}[bigram]" in collected
    assert "test_foreign.py" in collected
    assert "TestEachSpec" in collected
