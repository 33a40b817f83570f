"""The driver with workers that decode nothing: protocol, skipping, draft lengths, interleaving."""

import json
from math import inf
from pathlib import Path

import pytest

from benchmarks import session as under_test
from benchmarks.contenders import Contender, WorkerKind
from benchmarks.prompts import Prompt
from benchmarks.protocol import ContenderError, Worker, fingerprint
from benchmarks.session import Session

MODULE = "tests.benchmarks.fake_peer"
KINDS = {"fake": WorkerKind(MODULE), "away": WorkerKind(MODULE, Path("/nowhere/python"), "peer-away")}
PROMPTS = {"code": [Prompt([1], 4), Prompt([7], 3)]}


@pytest.fixture
def run(monkeypatch):
    """Measures the given models of the fake worker in one round or more; closes what it opened."""
    opened = []

    def inner(*models: str, rounds: int = 1, deadline: float = inf, **options) -> Session:
        who = {m: Contender(m, "away" if m == "absent" else "fake", m, **options) for m in models}
        wanted = {(c.worker, c.model): {"target": "t"} for c in who.values()}
        monkeypatch.setattr(under_test, "loads", lambda target, draft: wanted)
        session = Session("t", "d", contenders=who, kinds=KINDS)
        opened.append(session)
        session.start(who)
        session.measure(list(who), PROMPTS, PROMPTS, rounds, deadline)
        return session

    yield inner
    for session in opened:
        session.close()


def test_a_worker_survives_an_error_answers_in_order_and_ends_when_its_input_does():
    worker = Worker("fake", MODULE)
    try:
        with pytest.raises(ContenderError, match="no memory"):
            worker.call("load", name="broken")
        with pytest.raises(ContenderError, match="KeyError"):
            worker.call("no such operation")
        assert worker.call("load", name="plain") == {}
        assert worker.call("generate", name="plain", ids=[4], tokens=2)["tokens"] == [5, 6]
        assert "python" in worker.call("info")["versions"]
    finally:
        worker.close()
    assert worker.process.returncode == 0


def test_every_contender_is_timed_on_every_prompt_in_every_round(run):
    session = run("plain", "noted", rounds=3)
    assert session.cells == {name: [[1.0] * 3] * 2 for name in ("plain", "noted")}
    assert session.outputs["plain"] == [[2, 3, 4, 5], [8, 9, 10]]
    assert session.notes == {"noted": "1 arguments"}
    assert not session.skipped


def test_the_first_round_is_completed_after_the_time_limit_and_no_other_begins(run):
    assert run("plain", rounds=5, deadline=0).cells == {"plain": [[1.0], [1.0]]}


def test_a_missing_contender_is_skipped_with_how_to_install_it(run):
    session = run("plain", "absent")
    assert session.skipped == {"absent": "away is not installed: run `make peer-away`"}
    assert list(session.cells) == ["plain"]


@pytest.mark.parametrize(
    ("model", "reason"), [("broken", "no memory"), ("dying", "died"), ("short", "3 tokens instead of 4")]
)
def test_a_failing_contender_is_skipped_and_the_others_continue(run, model, reason):
    session = run("plain", model)
    assert reason in session.skipped[model]
    assert model not in session.cells
    if model != "dying":  # it also ends the contenders of the same process
        assert list(session.cells) == ["plain"]


def test_a_run_is_kept_if_the_margins_of_a_divergence_cannot_be_measured(run):
    session = run("plain")
    session.workers["transformers"] = session.workers["fake"]  # which has no margins
    divergences = [{"prompt": 0, "token": 1}]
    session.margins([[2, 3]], PROMPTS["code"], divergences)
    assert divergences == [{"prompt": 0, "token": 1}]
    assert "margin" in session.skipped["margins"]


def test_a_fingerprint_depends_on_the_weights_only(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert fingerprint(tmp_path) != before
