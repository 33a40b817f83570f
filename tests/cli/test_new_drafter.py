"""A drafter added as described in `drafters.registry`, by a file and a line, is available everywhere."""

import json
import re
import sys
from pathlib import Path

import pytest

import slipstream.drafters
from slipstream import LLM, SamplingParams
from slipstream.cli.measuring import LabModels
from slipstream.cli.options import ModelOptions
from slipstream.cli.tune import TuneModels
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs
from slipstream.measure.arms import is_recreated
from slipstream.measure.configs import DrafterChoice, vllm
from tests.tiny_checkpoints import Tiny

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
(MODULE,) = re.findall(r"```python\n# slipstream/drafters/bigram.py\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
"""The drafter of the guide."""


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file in the folder of drafters, the line in the table."""
    (tmp_path / "bigram.py").write_text(MODULE)
    monkeypatch.setattr(slipstream.drafters, "__path__", [*slipstream.drafters.__path__, str(tmp_path)])
    monkeypatch.setitem(DRAFTERS, "bigram", DrafterSpec("bigram", Needs.NOTHING, 7, tuned=True))
    yield
    sys.modules.pop("slipstream.drafters.bigram", None)


def test_it_is_listed_with_its_needs_length_and_options(cli) -> None:
    assert json.loads(cli("drafters", "--json").out)["bigram"] == {
        "is": "Bigram lookup: drafts what followed the newest token the last time it occurred", "needs": "nothing",
        "length": 7, "longest": 8,
    }  # fmt: skip
    assert "\n bigram " in cli("drafters").out
    assert json.loads(cli("drafters", "bigram", "--json").out) == {"reach": 256}


def test_it_is_a_choice_with_its_own_length_and_its_options_are_checked(refused) -> None:
    assert (ModelOptions(drafter="bigram").method, ModelOptions(drafter="bigram").fixed_length) == ("bigram", 7)
    assert "did you mean 'bigram'" in refused("generate", "x", "--drafter", "bigramt")
    assert "reach is 0" in refused("generate", "x", "--drafter", "bigram", "-o", "reach=0", "--executor", "torch")


def test_it_generates_the_targets_text_alone_and_in_a_stack(cli, pair: list[object], tiny: Tiny) -> None:
    plain = cli("generate", "for", *pair, "-n", "12", "-q", "--drafter", "none")
    for name in ("bigram", "suffix,bigram"):
        assert cli("generate", "for", *pair, "-n", "12", "-q", "--drafter", name).out == plain.out
    llm = LLM(tiny.target, "bigram", executor="torch", draft_options={"reach": 64}, draft_tokens=4)
    assert llm.generate("for", SamplingParams(max_tokens=60))[0].stats.proposed > 0


def test_the_lab_measures_it() -> None:
    contender = LabModels(drafter=["bigram:reach=2"]).contenders()[0]
    assert (contender.drafter, contender.draft_tokens, contender.options) == ("bigram", 7, {"reach": 2})
    assert is_recreated("bigram")
    assert "bigram" in TuneModels().specs()
    assert "has no drafter that corresponds to" in vllm(DrafterChoice("bigram", 4)).note
