"""The lossless board: verdicts on texts, engines that die, and the page that is made of the records."""

import json

import numpy as np
import pytest

from benchmarks.board import __main__ as board, judge, page
from benchmarks.board.lineup import CHECKS, CONTROLS, ENGINES, Cell, cells
from benchmarks.protocol import ContenderError

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


class Dying(board.Side):
    """An engine that ends, hangs or answers otherwise than the contract says."""

    def __init__(self, engine, method):
        self.worker, self.versions = self, {"it": "1"}
        self.process, self.name = self, engine.name

    def poll(self):
        return 1

    def close(self):
        pass

    def texts(self, ids, tokens, sampling, seeds):
        raise ContenderError(self.said)


@pytest.mark.parametrize(
    ("said", "verdict"),
    [("it died during 'generate':\nSegmentation fault", "not tested"),
     ("it failed:\nTraceback\nNotImplementedError: GenerationConfig has no min_p", "refused")],
)  # fmt: skip
def test_an_engine_that_dies_or_refuses_has_a_row_that_says_so(said, verdict, monkeypatch):
    monkeypatch.setattr(Dying, "said", said, raising=False)
    monkeypatch.setattr(board, "Side", Dying)
    monkeypatch.setattr(board, "prompts", lambda: [[1, 2]])
    rows = list(board.run([Cell("transformers", "assisted", check) for check in ("greedy", "T 1")], 2))
    assert [row["verdict"] for _, row in rows] == [verdict] * 2
    assert said.splitlines()[-1] in rows[0][1]["why"]


def test_the_page_is_that_of_the_records():
    records = json.loads(board.RECORDS.read_text())
    assert (board.ROOT / "docs" / "lossless-board.md").read_text() == page.page(records)
    assert {cell.key for cell in cells()} >= records["cells"].keys()


def test_every_engine_is_tested_or_says_why_not():
    for engine in ENGINES.values():
        assert bool(engine.methods) != bool(engine.absent), engine.name
        assert not engine.methods or engine.promises
    assert len(CONTROLS.methods) == 8
    assert "greedy" in CHECKS
