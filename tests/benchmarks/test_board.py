"""The lossless board: verdicts on texts, engines that die, and the page that is made of the records."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.board import __main__ as board, judge, llamacpp_engine, page
from benchmarks.board.__main__ import prompts
from benchmarks.board.lineup import (
    CHECKS,
    CONTROL_CHECKS,
    CONTROLS,
    ENGINES,
    HARMLESS,
    PLAIN,
    SCHEMA,
    Cell,
    Engine,
    cells,
    rows,
)
from benchmarks.board.models import HYBRID, VOCAB, models_of
from slipstream.tokens.text import load_tokenizer
from slipstream.zoo import target_dir

P = np.array([0.5, 0.2, 0.15, 0.1, 0.05])


def looks(shift: float, texts: int = 300):
    """Samples of tokens that are independent; the second side takes the first one more often."""
    rng, other = np.random.default_rng(0), P + shift * np.array([1, -0.25, -0.25, -0.25, -0.25])

    def look(number):
        return [tuple(rng.choice(5, (texts, 16), p=p).tolist() for p in (P, other)) for _ in range(3)]

    return look


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "same"), (0.05, "differs")])
def test_samples_are_judged_at_the_level_of_a_cell(shift, verdict):
    """A run of this size finds a shift of 0.04 with probability 0.9; 0.05 with more than 0.99."""
    row = judge.sampled(looks(shift))
    assert row["verdict"] == verdict
    assert row["smallest_shift"] < 0.045


def test_the_shift_that_is_stated_counts_only_tokens_that_are_compared():
    """Texts of one token that never varies show nothing."""
    assert judge.sampled(lambda number: [([[1]] * 50, [[1]] * 50)] * 3)["smallest_shift"] is None


@pytest.fixture
def engine(monkeypatch):
    """An engine whose worker is tests/benchmarks/fake_engine.py; its method says how it behaves."""
    made = Engine(
        "fake", "tests.benchmarks.fake_engine", methods=("good", "other", "dying", "hanging", "short", "babbling"),
        promises="nothing", known={"other": "reported"},
    )  # fmt: skip
    monkeypatch.setitem(ENGINES, "fake", made)
    monkeypatch.setattr(board, "prompts", lambda method: [[1, 2]] * 3)
    return made


def run(*cells: Cell, samples: int = 20) -> list[dict[str, Any]]:
    return [record for _, record in board.run(list(cells), samples)]


def test_an_engine_that_dies_or_answers_otherwise_has_cells_that_say_so_and_the_others_run(engine):
    methods = ("dying", "short", "babbling", "good")
    records = dict(zip(methods, run(*(Cell("fake", method, "T 1") for method in methods)), strict=True))
    assert {method: record["verdict"] for method, record in records.items()} == {
        method: "same" if method == "good" else "fails" for method in methods
    }
    assert "Segmentation" in records["dying"]["why"]
    assert "a text of 7 tokens, 8 were asked for" in records["short"]["why"]
    assert "no JSON" in records["babbling"]["why"]


def test_an_engine_that_hangs_has_a_cell_that_says_so(engine, monkeypatch):
    right = board.Side.texts

    def texts(self, *arguments):
        monkeypatch.setattr(board, "LIMIT", 0.1 if self.worker.name == "fake, hanging" else 600)
        return right(self, *arguments)

    monkeypatch.setattr(board.Side, "texts", texts)
    (record,) = run(Cell("fake", "hanging", "T 1"))
    assert (record["verdict"], record["why"]) == (
        "fails", "fake, hanging gave no answer to 'generate' within 0.1 seconds"
    )  # fmt: skip


def test_an_engine_that_refuses_has_a_cell_that_says_so(engine):
    refused, tested = run(Cell("fake", "good", "JSON schema"), Cell("fake", "good", "T 0.7"))
    assert (refused["verdict"], tested["verdict"]) == ("refused", "same")
    assert refused["why"] == "NotImplementedError: no schemas here"


def test_an_engine_whose_environment_no_longer_installs_has_a_cell_that_says_so(engine, monkeypatch, tmp_path):
    missing = Engine("fake", engine.worker, tmp_path / "python", "make fake", ("good",), needs=tmp_path / "python")
    monkeypatch.setitem(ENGINES, "fake", missing)
    (record,) = run(Cell("fake", "good", "T 1"))
    assert record["why"] == "its environment is not made: make fake"
    assert not board.is_recorded(record, samples=20)
    broken = Engine("fake", "tests.benchmarks.no_such_engine", methods=("good",))
    monkeypatch.setitem(ENGINES, "fake", broken)
    (record,) = run(Cell("fake", "good", "T 1"))
    assert "No module named" in record["why"]


def test_an_engine_that_drafts_nothing_or_too_little_is_not_tested(engine):
    (record,) = run(Cell("fake", "idle", "T 1"))
    assert (record["verdict"], record["why"]) == ("not tested", "only 0 tokens were drafted")


def test_texts_without_speculation_are_made_once_for_all_methods(engine, monkeypatch):
    asked = []
    right = board.Side.texts

    def texts(self, *arguments):
        asked.append(self.worker.name)
        return right(self, *arguments)

    monkeypatch.setattr(board.Side, "texts", texts)
    run(Cell("fake", "good", "T 1"), Cell("fake", "other", "T 1"), samples=2)
    assert asked.count("fake, plain") == 3


def test_an_engine_is_loaded_once_for_each_method_and_setup(engine, monkeypatch):
    started = []
    right = board.Side.__init__

    def init(self, engine, method, check):
        started.append((method, check.streams))
        right(self, engine, method, check)

    monkeypatch.setattr(board.Side, "__init__", init)
    checks = ("greedy", "T 1", "T 0.7", "8 streams, prefix cache")
    run(*(Cell("fake", "good", check) for check in checks), samples=2)
    assert started == [("good", 1), (PLAIN, 1), ("good", 8), (PLAIN, 8)]


def test_both_sides_of_a_hybrid_row_load_the_hybrid_and_no_others_do(engine, monkeypatch):
    loaded, right = [], board.Side._call

    def call(self, op, **given):
        if op == "load":
            loaded.append((self.worker.name, given["method"], given["target"]))
        return right(self, op, **given)

    monkeypatch.setattr(board.Side, "_call", call)
    hybrid, usual = (str(models_of(method, "qwen3_next")[0]) for method in ("good" + HYBRID, "good"))
    monkeypatch.setitem(ENGINES, "fake", replace(engine, hybrid=("qwen3_next", "bfloat16")))
    run(Cell("fake", "good" + HYBRID, "T 1"), Cell("fake", "good", "T 1"), samples=2)
    assert loaded == [
        ("fake, good, hybrid", "good", hybrid), ("fake, plain, hybrid", "plain", hybrid),
        ("fake, good", "good", usual), ("fake, plain", "plain", usual),
    ]  # fmt: skip
    assert all(token < VOCAB for ids in prompts("good" + HYBRID) for token in ids)


def test_methods_that_copy_get_longer_prompts_where_they_would_draft_too_little():
    tokenizer = load_tokenizer(target_dir())
    for method in ("ngram-simple", "prompt lookup", "ngram" + HYBRID):
        assert board.asked_of(Cell("any", method, "penalty")) == prompts(method)
    for ids in board.asked_of(Cell("any", "ngram", "JSON schema")):
        *_, one, other, rest = tokenizer.decode(ids).split("\n")
        assert (one, rest) == (other, "")
        assert SCHEMA["properties"].keys() == json.loads(one).keys()
    for method, check in (("draft model", "penalty"), ("draft model", "JSON schema"), ("ngram", "T 1")):
        whole = prompts(method)
        assert board.asked_of(Cell("any", method, check)) == [ids[-CHECKS[check].context :] for ids in whole]


def test_llama_cpp_empties_a_table_that_would_draft_no_more_before_each_text_unless_prefixes_are_kept(monkeypatch):
    asked = []

    def ask(path, body):
        asked.append(len(body["prompt"]))
        return {"tokens": [3], "timings": {}}

    monkeypatch.setattr(llamacpp_engine, "ask", ask)
    for method, cache in (("ngram-map-k", False), ("ngram-map-k", True), ("ngram-mod", False)):
        monkeypatch.setattr(llamacpp_engine, "made", {"method": method, "cache": cache, "streams": 1})
        assert llamacpp_engine.generate([1, 2, 3], 1, {}, None, [4, 5]) == {"texts": [[3], [3]], "drafted": 0}
    assert asked == [1, 3, 1, 3] + 4 * [3]


def test_a_difference_is_shown_only_with_what_fairness_asks_for(engine):
    (record,) = run(Cell("fake", "other", "T 1"), samples=60)
    assert record["verdict"] == "differs"
    records = {"fake | other | T 1": record, "fake | good | T 1": record}
    assert page.shown(engine, "other", "T 1", records)["known"] == "reported"
    assert page.shown(engine, "good", "T 1", records)["verdict"] == page.OPEN
    halfway = replace(engine, pending={"good": "no issue was found"})
    assert page.shown(halfway, "good", "T 1", records)["verdict"] == page.OPEN
    assert page.shown(halfway, "good", "T 1", records)["known"] == "no issue was found"
    lines = page.page({"cells": records}).splitlines()
    notes = [next(line for line in lines if f" | {name} | " in line).split("|")[-2] for name in ("good", "other")]
    assert [note.strip() for note in notes] == ["1", "2"]
    assert {"1. no issue or reproduction yet", "2. reported"} <= set(lines)
    assert any(line.endswith("differ again on new samples (p at most 0.0002).") for line in lines)


def test_a_row_of_the_page_says_which_checks_have_which_verdict_and_where_its_notes_are(engine):
    same, refused = {"verdict": "same"}, {"verdict": "refused", "why": "ValueError: no such thing"}
    records = {f"fake | good | {check}": same for check in ("greedy", "T 1", "T 0.7", "top-k")}
    records |= {"fake | good | top-p": refused, "fake | good | JSON schema": refused, "fake | other | greedy": refused}
    lines = page.page({"cells": records}).splitlines()
    good, other = (next(line for line in lines if f"| fake | {method} |" in line) for method in ("good", "other"))
    assert [cell.strip() for cell in good.split("|")[4:9]] == [
        "same", "same", "same (top-k); refused (top-p)", "refused", "–"
    ]  # fmt: skip
    assert (good.split("|")[-2].strip(), other.split("|")[-2].strip()) == ("1", "2")
    assert "1. top-p, JSON schema: no such thing" in lines
    assert "2. no such thing" in lines


def test_checks_are_chosen_by_their_whole_names(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(board, "RECORDS", tmp_path / "board.json")
    monkeypatch.setattr(board, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    wanted = ["8 streams, prefix cache", "T 1"]
    options = [word for check in wanted for word in ("--check", check)]
    monkeypatch.setattr("sys.argv", ["board", "--engine", "fake", "--method", "good", "--samples", "2", *options])
    board.main()
    records = board.records()["cells"]
    assert records.keys() == {f"fake | good | {check}" for check in wanted}
    assert all(board.is_recorded(record, samples=2) for record in records.values())
    assert not any(board.is_recorded(record, samples=3) for record in records.values())


def test_reproductions_are_short_and_need_no_slipstream():
    folder = board.ROOT / "benchmarks" / "board" / "reproductions"
    texts = [text for engine in ENGINES.values() for of in (engine.known, engine.pending) for text in of.values()]
    named = {word.rstrip(";") for text in texts for word in text.split()}
    assert {word.split("/")[-1] for word in named if "reproductions/" in word} == {
        file.name for file in folder.iterdir()
    }
    for file in folder.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 15
        assert "import slipstream" not in file.read_text()
        assert "from slipstream" not in file.read_text()


def test_the_page_is_that_of_the_records():
    records = json.loads(board.RECORDS.read_text())
    assert (board.ROOT / "docs" / "lossless-board.md").read_text() == page.page(records)
    assert {cell.key for cell in cells()} >= records["cells"].keys()


def test_every_engine_is_tested_or_says_why_not():
    for engine in ENGINES.values():
        assert bool(engine.methods) != bool(engine.absent), engine.name
        assert not engine.methods or engine.promises
        assert {place.partition(" | ")[0] for place in engine.known} <= set(engine.methods)
    assert len(CONTROLS.methods) == 8 + len(HARMLESS)
    assert set(CONTROL_CHECKS) <= set(CONTROLS.methods)
    assert len(rows()) == sum(len(engine.methods) for engine in ENGINES.values())
    assert {cell.check for cell in cells() if cell.method == PLAIN} <= set(CHECKS)


def test_the_records_find_every_planted_bug_and_raise_no_false_alarm():
    records = json.loads(board.RECORDS.read_text())["cells"]
    found = {cell.method: records[cell.key]["verdict"] for cell in cells() if cell.engine == CONTROLS.name}
    assert found == {method: "same" if method in HARMLESS else "differs" for method in CONTROLS.methods}
    alone = [record for key, record in records.items() if f"| {PLAIN} |" in key]
    assert "differs" not in [record["verdict"] for record in alone]
