"""`slipstream train medusa|eagle3|dflash|draft|layerskip` from the command line."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.targets.decoder import Decoder
from slipstream.training import acceptance, resume_state, run as run_module, run_report
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
def common(target: Path, data: Path, tmp_path: Path) -> list[object]:
    return [
        "--target", target, "--data", data, "--out", tmp_path / "out", "--budget-tokens", 4 * 128, "--length", 32,
        "--rows", 4, "--texts", 2, "--text-tokens", 6, "--threads", 1, "--executor", "torch", "--eval-steps", 0,
    ]  # fmt: skip


@pytest.fixture
def train(cli: Any, common: list[object], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("sys.argv", ["slipstream", "train", "medusa", "--out", "here"])
    return lambda *more: cli("train", "medusa", *common, "--eval-steps", 1, "--heads", 2, *more)


def test_a_head_is_trained_resumed_and_exported(train: Any, tmp_path: Path) -> None:
    assert train("--max-steps", 2).code == 0
    assert train("--resume").code == 0
    head_config = json.loads((tmp_path / "out" / "final" / "config.json").read_text())
    assert head_config["medusa_num_heads"] == 2
    assert len(head_config["medusa_head_accuracies"]) == 2
    card = (tmp_path / "out" / "final" / "README.md").read_text()
    assert card.count("    slipstream train medusa --out here") == 2, "one line a part"


def test_a_dry_run_prints_the_estimate_only(cli: Any, common: list[object], tmp_path: Path) -> None:
    shown = cli("train", "eagle3", *common, "--steps", 2, "--dry-run").out
    for word in ("data", "training", "memory", "time", "tokens/s", "disk"):
        assert word in shown
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()
    assert "of disk" in cli("train", "eagle3", *common, "--steps", 2, "--cache-hidden", "--dry-run").out


def test_targets_and_data_that_cannot_be_used_are_refused_with_one_message(cli, target, tiny, tmp_path, monkeypatch):
    """Before weights are read; no output folder is left."""
    monkeypatch.setattr(Decoder, "load", None)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    (tmp_path / "gptj").mkdir()
    (tmp_path / "gptj" / "config.json").write_text('{"model_type": "gptj"}')

    def refused(target: Path, data: str, *more: object) -> str:
        out = ["--out", tmp_path / "out", "--budget-tokens", 9, "--length", 32]
        completed = cli("train", "medusa", "-m", target, "--data", tmp_path / data, *out, *more)
        assert completed.code == 2
        assert not (tmp_path / "out").exists()
        return completed.said

    assert "does not exist" in refused(target, "nowhere")
    assert "the training data is too short" in refused(tiny.target, "short.txt")
    assert "is text, but the target has no tokenizer" in refused(target, "short.txt")
    assert "has version 0 of GGUF" in refused(tmp_path / "model.gguf", "short.txt")
    assert "nothing can be trained for it" in refused(tmp_path / "gptj", "short.txt")
    assert "is not a folder" in refused(tmp_path / "nowhere" / "at" / "all", "short.txt")
    assert "there is no checkpoint" in refused(tiny.target, "short.txt", "--resume")


def test_a_run_is_not_resumed_for_another_target(cli, train, tmp_path):
    assert train("--max-steps", 1).code == 0
    other = train_target(tmp_path / "other", steps=1)
    completed = train("--resume", "-m", other)
    assert (completed.code, "is of another run: target was" in completed.said) == (2, True)


def raising(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, calls: tuple[int, ...] = (1,)) -> None:
    """The signal comes at the end of these calls of a function."""
    original, count = getattr(owner, name), 0

    def function(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        outcome = original(*args, **more)
        if count in calls:
            signal.raise_signal(number)
        return outcome

    monkeypatch.setattr(owner, name, function)


def logged(out: Path) -> list[Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (run_module, "prepare_data", signal.SIGINT),
        (run_module, "held_out_text", signal.SIGTERM),
        (acceptance, "write_masked", signal.SIGINT),
        (run_module, "held_out", signal.SIGTERM),
        (run_report, "estimate", signal.SIGTERM),
        (Loop, "evaluate", signal.SIGINT),
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


@pytest.mark.parametrize(
    ("name", "call", "step", "number"),
    [
        ("step", 1, 1, signal.SIGINT),
        ("step", 3, 3, signal.SIGTERM),
        ("evaluate", 3, 2, signal.SIGINT),
        ("save", 1, 4, signal.SIGTERM),
    ],
)
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
    assert (stopped.code, "step 4 is saved" in stopped.said) == (130, True)
    assert not list(tmp_path.rglob("*.tmp"))
    assert train("--resume").code == 0
    assert (tmp_path / "out" / "final" / "config.json").is_file()


def test_a_resumed_run_that_is_stopped_before_a_step_keeps_its_checkpoint_and_exports_nothing(train, tmp_path):
    assert train("--max-steps", 1).code == 0
    before = (tmp_path / "out" / "checkpoint.safetensors").read_bytes()
    card = (tmp_path / "out" / "final" / "README.md").read_text()
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, run_report, "estimate", signal.SIGINT)
        stopped = train("--resume")
    assert stopped.code == 130
    assert "step 1 is saved" in stopped.said
    assert (tmp_path / "out" / "checkpoint.safetensors").read_bytes() == before
    assert (tmp_path / "out" / "final" / "README.md").read_text() == card
