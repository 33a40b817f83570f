"""`slipstream train` may be stopped in any phase: an exit code, whole files and a hint how to go on."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.training import acceptance, resume_state, run as run_module
from slipstream.training.loop import Loop
from slipstream.training.medusa_objective import MedusaObjective
from tests.training.tiny_runs import train_target, write_data

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_target(tmp_path_factory.mktemp("target"), steps=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "texts.bin")


@pytest.fixture
def train(cli: Any, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("sys.argv", ["slipstream", "train", "medusa", "--out", "here"])
    words = [
        "--target", target, "--data", data, "--out", tmp_path / "out", "--budget-tokens", 4 * 128, "--length", 32,
        "--rows", 4, "--texts", 2, "--text-tokens", 6, "--threads", 1, "--executor", "torch", "--eval-steps", 1,
        "--heads", 2,
    ]  # fmt: skip
    return lambda *more: cli("train", "medusa", *words, *more)


def raising(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, calls: tuple[int, ...] = (1,)) -> None:
    """The signal comes at the end of these calls of a function."""
    original, count = getattr(owner, name), 0

    def function(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        made = original(*args, **more)
        if count in calls:
            signal.raise_signal(number)
        return made

    monkeypatch.setattr(owner, name, function)


def logged(out: Path) -> list[Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (run_module, "prepare_data"),
        (run_module, "write_texts"),
        (acceptance.np, "savez"),
        (run_module, "held_out"),
        (run_module, "estimate"),
        (Loop, "evaluate"),
    ],
)
def test_before_the_first_step_nothing_is_saved_and_the_same_command_begins_again(owner, name, number, train, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, owner, name, number)
        stopped = train()
    assert stopped.code == SIGNALS[signal.Signals(number)]
    assert "no step was saved" in stopped.said
    assert "The same command begins again" in stopped.said
    assert not (tmp_path / "out" / "final").exists()
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    assert train().code == 0
    assert logged(tmp_path / "out")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("name", "call", "step"), [("step", 1, 1), ("step", 3, 3), ("evaluate", 3, 2), ("save", 1, 4)])
def test_a_step_that_was_begun_is_saved_and_exported_and_the_resuming_command_is_shown(
    name: str, call: int, step: int, number: int, train: Any, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, Loop, name, number, (call,))
        stopped = train()
    assert stopped.code == SIGNALS[signal.Signals(number)]
    assert "stopping after this step" in stopped.said
    assert f"step {step} is saved. Continue with: slipstream train medusa --out here --resume" in stopped.said
    assert f"in {step} steps" in (tmp_path / "out" / "final" / "README.md").read_text()
    assert train("--resume").code == 0
    assert "in 4 steps" in (tmp_path / "out" / "final" / "README.md").read_text()
    logged(tmp_path / "out")


def test_a_second_signal_stops_at_once_with_the_last_checkpoint(train: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, Loop, "step", signal.SIGINT, (2,))
        raising(patch, Loop, "evaluate", signal.SIGINT, (3,))  # after that step
        stopped = train("--save-minutes", "1e-9")
    assert stopped.code == 130
    assert "step 1 is saved" in stopped.said
    assert not (tmp_path / "out" / "final").exists()
    assert train("--resume").code == 0


@pytest.mark.parametrize(("owner", "name"), [(resume_state, "save_file"), (MedusaObjective, "export")])
def test_a_file_that_is_being_written_is_left_whole_or_not_at_all(owner, name, train, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, owner, name, signal.SIGINT)
        stopped = train()
    assert stopped.code == 130
    assert "step 4 is saved" in stopped.said
    assert not list(tmp_path.rglob("*.tmp"))
    assert train("--resume").code == 0
    assert (tmp_path / "out" / "final" / "config.json").is_file()


def test_a_resumed_run_that_is_stopped_before_a_step_keeps_its_checkpoint_and_exports_nothing(train, tmp_path):
    assert train("--max-steps", 1).code == 0
    before = (tmp_path / "out" / "checkpoint.safetensors").read_bytes()
    card = (tmp_path / "out" / "final" / "README.md").read_text()
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, run_module, "estimate", signal.SIGINT)
        stopped = train("--resume")
    assert stopped.code == 130
    assert "step 1 is saved" in stopped.said
    assert (tmp_path / "out" / "checkpoint.safetensors").read_bytes() == before
    assert (tmp_path / "out" / "final" / "README.md").read_text() == card
