"""A drafter added as described in `drafters.registry`, by a file and a line, is available everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream.drafters
from slipstream import LLM, SamplingParams
from slipstream.bench.configs import Choice, others
from slipstream.bench.measure import recreated_per_pass
from slipstream.cli.contenders import LabModels
from slipstream.cli.options import ModelOptions, SamplingOptions
from slipstream.cli.session import Session
from slipstream.cli.tune import TuneModels
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs, make_drafter
from tests.checkpoints import Tiny
from tests.drafters.conformance import Case, Conformance
from tests.targets.toy import ToyTarget

ROOT = Path(__file__).parents[2]
MODULE = '''"""Copycat: the last token once more.

It is seldom right.
"""

from dataclasses import dataclass

from slipstream.core.draft import Draft
from slipstream.core.drafter import DrafterTraits
from slipstream.core.params import Strict, check_integer


@dataclass(frozen=True)
class CopycatConfig(Strict):
    """most  maximum draft tokens per step."""

    most: int = 3

    def __post_init__(self):
        check_integer("most", self.most, 1)


class CopycatDrafter:
    name = "copycat"
    traits = DrafterTraits()

    def __init__(self, config, device):
        self.config, self.device = config, device

    def propose(self, seqs, budget):
        rows = [[seq.tokens[-1]] * min(self.config.most, k) for seq, k in zip(seqs, budget)]
        return Draft.chains(rows, device=self.device)

    def observe(self, seqs, draft, out, verdict):
        pass

    def release(self, seq_id):
        pass


def make(target, **options):
    return CopycatDrafter(CopycatConfig(**options), target.device)
'''
LINE = 'DrafterSpec("copycat", Needs.NOTHING, 7, tuned=True)'
ADDED = f"""import slipstream.drafters
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs

slipstream.drafters.__path__.append(__file__.rpartition("/")[0])
DRAFTERS["copycat"] = {LINE}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "copycat.py").write_text(MODULE)
    (tmp_path / "added.py").write_text(ADDED)
    return tmp_path


@pytest.fixture
def added(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process: the file in the folder of drafters, the line in the table."""
    monkeypatch.setattr(slipstream.drafters, "__path__", [*slipstream.drafters.__path__, str(folder)])
    monkeypatch.setitem(DRAFTERS, "copycat", DrafterSpec("copycat", Needs.NOTHING, 7, tuned=True))
    assert repr(eval(LINE)) == repr(DRAFTERS["copycat"])
    yield
    sys.modules.pop("slipstream.drafters.copycat", None)


def elsewhere(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process where the drafter was added before anything read the table."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    own = os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, env=own)


def test_it_is_listed_with_its_needs_length_and_options(added: None, cli) -> None:
    assert json.loads(cli("drafters", "--json").out)["copycat"] == {
        "is": "Copycat: the last token once more", "needs": "nothing", "length": 7, "longest": 8
    }  # fmt: skip
    assert "\n copycat " in cli("drafters").out
    assert json.loads(cli("drafters", "copycat", "--json").out) == {"most": 3}


def test_it_is_a_choice_with_its_own_length_and_its_options_are_checked(added: None, cli) -> None:
    assert (ModelOptions(drafter="copycat").method, ModelOptions(drafter="copycat").fixed_length) == ("copycat", 7)
    assert "did you mean 'copycat'" in cli("generate", "x", "--drafter", "copycatt").said
    result = cli("generate", "x", "--drafter", "copycat", "-o", "most=0", "--executor", "torch")
    assert (result.code, "most is 0" in result.said) == (2, True)


def test_it_generates_the_targets_text_alone_and_in_a_stack(added: None, cli, pair: list[object], tiny: Tiny) -> None:
    plain = cli("generate", "for", *pair, "-n", "12", "-q", "--drafter", "none")
    for name in ("copycat", "suffix,copycat"):
        assert cli("generate", "for", *pair, "-n", "12", "-q", "--drafter", name).out == plain.out
    llm = LLM(tiny.target, "copycat", executor="torch", draft_options={"most": 2}, draft_tokens=4)
    assert llm.generate("for", SamplingParams(max_tokens=12))[0].stats.proposed > 0


def test_the_lab_measures_it(added: None) -> None:
    contender = LabModels(drafter=["copycat:most=2"]).contenders()[0]
    assert (contender.drafter, contender.draft_tokens, contender.options) == ("copycat", 7, {"most": 2})
    assert recreated_per_pass("copycat")
    assert "copycat" in TuneModels().specs()
    assert all("no counterpart" in each.note for each in others(Choice("copycat", 4)).values())


def test_a_chat_can_switch_to_it(added: None, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    options = ModelOptions(target=str(tiny.target), drafter="none", executor="torch")
    session = Session(
        LLM(tiny.target, executor="torch", draft_tokens=4), options, SamplingOptions(max_tokens=4).params()
    )
    session.handle("/drafter copycat most=2")
    assert (session.llm.drafter.name, session.llm.draft_tokens) == ("copycat", 4)
    session.handle("/help")
    assert "copycat" in capsys.readouterr().err


def test_help_names_it(folder: Path) -> None:
    script = "import added\nfrom slipstream.cli.main import main\nmain(['generate', '--help'])"
    assert "copycat" in elsewhere(folder, "-c", script).stdout


def test_the_conformance_suite_picks_it_up(folder: Path) -> None:
    suites = ["tests/drafters/test_conformance.py", "tests/drafters/test_foreign.py", "tests/drafters/test_registry.py"]
    found = elsewhere(folder, "-m", "pytest", "-p", "added", "--collect-only", "-k", "copycat", *suites).stdout
    for promise in vars(Conformance):
        assert not promise.startswith("test_") or f"TestRegistered::{promise}[copycat]" in found
    assert "test_foreign.py" in found
    assert "TestEachSpec" in found


def test_it_passes_the_conformance_suite(added: None) -> None:
    case = Case(lambda: ToyTarget(5, order=3, seed=21), lambda target: make_drafter("copycat", target))
    suite = Conformance()
    suite.test_is_a_drafter(case)
    suite.test_drafts_are_well_formed_and_within_every_budget(case)
    suite.test_greedy_text_is_the_targets(case)
