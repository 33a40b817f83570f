"""Runs of paired cells go on where they were cut, and fail where the worst cell is too slow."""

import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from benchmarks import forced, never_slower, paired_cells
from benchmarks.forced_schemas import TOOLS
from benchmarks.paired_cells import Cells, compare, decode
from slipstream import LLM, SamplingParams, Structured
from slipstream.engine.draft_lengths import LengthsFromPrices
from slipstream.engine.timed_step import Step
from slipstream.grammar.compiler import check_structured
from slipstream.grammar.forced_text import ForcedSpelling
from tests.core.letter_tokenizer import letter_tokenizer
from tests.targets.toy import ToyTarget


def test_a_run_that_is_cut_goes_on_with_the_cells_that_it_lacks(tmp_path: Path) -> None:
    file, measured = tmp_path / "cells.json", list[str]()

    def cell(name: str) -> dict[str, Any]:
        measured.append(name)
        return {"value": len(measured)}

    first = Cells(file, monotonic() + 60, {"passes": 3})
    first.add("a", lambda: cell("a"))
    late = Cells(file, monotonic() - 1, {"passes": 3})
    assert late.add("a", lambda: cell("a")) == {"value": 1}
    assert late.add("b", lambda: cell("b")) is None
    assert late.left_out == ["b"]
    assert Cells(file, monotonic() + 60, {"passes": 3}).add("b", lambda: cell("b")) == {"value": 2}
    assert json.loads(file.read_text())["cells"].keys() == {"a", "b"}
    assert Cells(file, monotonic() + 60, {"passes": 4}).add("a", lambda: cell("a")) == {"value": 3}, "other settings"
    assert measured == ["a", "b", "a"]


def test_both_ways_decode_the_same_requests_in_turns() -> None:
    one, other = LLM(ToyTarget(5), draft_tokens=0), LLM(ToyTarget(5), "suffix")
    batches = [[([1, 2, n], SamplingParams(max_tokens=4))] for n in range(3)]
    cell = compare(one, other, batches, passes=3)
    assert [len(each) for each in cell["base"]] == [len(each) for each in cell["other"]] == [3, 3, 3]
    assert cell["differing"] == 0
    assert cell["gain"]["low"] < cell["gain"]["value"] < cell["gain"]["high"]
    alone = compare(one, other, batches[:1], passes=3)
    assert alone["gain"]["low"] is not None, "of one batch: for further passes"


def gain(value: float, low: float, high: float) -> dict[str, Any]:
    return {"gain": {"value": value, "low": low, "high": high}, "predicted": value, "decoding": value, "differing": 0,
            "forced": 10, "drafted": 9}  # fmt: skip


def test_the_worst_upper_bound_decides_whether_it_is_slower() -> None:
    cells = {"smollm2, 4 bits, idle, 1 streams, plain": gain(0.96, 0.95, 0.97),
             "smollm2, 4 bits, idle, 1 streams, code": gain(1.3, 1.2, 1.4),
             "smollm2, 4 bits, busy, 1 streams, chat": gain(0.97, 0.95, 0.985),
             "rows of smollm2, 4 bits, idle": {"rows": {"100": {"1": 0.01, "2": 0.011}}}}  # fmt: skip
    results = {"cells": cells, "left_out": []}
    rows = {name: value for name, _, value in never_slower.figures(results)}
    assert rows["worst upper bound (smollm2, 4 bits, busy, 1 streams, chat)"] == 0.985
    assert rows["mean, 4 bits, idle"] == 1.3
    assert rows["share of cells whose decoding is predicted within 10 %"] == 1.0
    shown = never_slower.markdown(results)
    assert "Plain decoding against itself: 0.960 to 0.960." in shown, "is no cell of drafts"
    assert shown.index("busy, 1 streams, chat | 0.970") < shown.index("idle, 1 streams, code | 1.300"), (
        "the worst first"
    )
    assert "| rows of smollm2, 4 bits, idle | 100 | 0.0100 | 0.0110 |" in shown


def test_the_figures_of_forced_drafts_have_means_and_worst_cells() -> None:
    cells = {"4 bits, 1 streams, get_weather": gain(1.5, 1.4, 1.6), "4 bits, 4 streams, edit_file": gain(0.9, 0.8, 1.0)}
    results = {"cells": cells, "left_out": ["x"], "microseconds": 30.0}
    rows = {name: value for name, _, value, _ in forced.figures(results)}
    assert (rows["4 bits, mean"], rows["4 bits, worst"]) == (pytest.approx(1.2), 0.9)
    assert rows["share of forced bytes that are drafted"] == 0.9
    assert "Not measured: x." in forced.markdown(results)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_the_schemas_of_tools_compile_and_their_examples_meet_them(tool: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check_structured(Structured(json_schema=tool.schema))
    jsonschema.validate(tool.example, tool.schema)
    assert len(set(tool.requests)) == 8, "no request twice"


def test_each_pass_begins_without_spellings_of_earlier_passes() -> None:
    llm = forced.WithForced(ToyTarget(5), draft_tokens=0, tokenizer=letter_tokenizer(5))
    params = SamplingParams(structured=Structured(regex="abcd(a|b)"))
    _, _, form = llm._grammars._compiled(params.structured)
    form.spellings[None, (1,)] = ForcedSpelling((1,), (2,), 3)
    assert decode(llm, [([1], params)])[0][0].text.startswith("abcd")
    assert not form.spellings


def test_requests_of_never_slower_end_at_different_times() -> None:
    llm = LLM("embedded", draft_tokens=0)
    (requests,) = never_slower.batches(llm, "chat", 4, 64)
    assert [params.max_tokens for _, params in requests[:6]] == [64, 32, 80, 48, 96, 64]
    assert len(requests) == 12


def test_predictions_are_of_the_steps_after_the_prompts() -> None:
    """What is predicted of steps that draft, with plain ones between them."""
    lengths = never_slower.Predictions(4)
    lengths.policy = LengthsFromPrices()
    for _ in range(60):
        lengths.learn(Step([0], [0], rest=1.0))
        lengths.learn(Step([0], [2], [2], [1], 0.1, 1.3))
    lengths.predict()
    assert lengths.predict() is None
    lengths.learn(Step([0], [0], rest=2.0, repeats=2))
    lengths.learn(Step([0], [0], rest=9.0, prompt_rows=100))
    lengths.learn(Step([0], [2], [2], [1], 0.1, 1.3))
    assert lengths.predict() == pytest.approx((2 + 2) / (2 + 1.4), rel=0.02)
    assert lengths.predict() is None


def test_a_cell_is_measured_with_its_prompts_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafts = LLM(ToyTarget(5), draft_tokens=0), LLM(ToyTarget(5), "suffix")
    drafts.lengths = never_slower.Predictions(drafts.most_draft_tokens)
    asked = [[([1, 2, n], SamplingParams(max_tokens=30)) for n in range(3)]]
    monkeypatch.setattr(never_slower, "batches", lambda *_: asked)
    for kind in ("plain", "chat"):
        cell = never_slower.measure_cell(plain, drafts, kind, 1, 30, 3)
        assert (cell["predicted"] is None) == (kind == "plain")
        for whole, token in zip(cell["other"], cell["other_decoding"], strict=True):
            assert all(a > 29 * b for a, b in zip(whole, token, strict=True))
        assert cell["gain"]["low"] < cell["gain"]["value"] < cell["gain"]["high"]
        assert cell["decoding"] > 0
        assert plain.max_batch == drafts.max_batch == 1


def test_decoding_alone_leaves_out_the_steps_that_read_a_prompt() -> None:
    """One request at a time: of 3 x 8 tokens, 3 x 7 are gained in steps without a prompt."""
    llm, clock = LLM(ToyTarget(5), draft_tokens=0, max_batch=1), iter(range(1000))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paired_cells, "perf_counter", lambda: float(next(clock)))
        done, whole, token = decode(llm, [([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))] * 3)
    assert [len(each.token_ids) for each in done] == [8] * 3
    assert (whole, token) == (3 * 8, 1)
