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
from tests.training.tiny_runs import logged, train_target, write_data

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
    return lambda *more, code=0: cli("train", "medusa", *common, "--eval-steps", 1, "--heads", 2, *more, code=code)


@pytest.fixture
def stopped(train: Callable[..., Any]) -> Callable[..., str]:
    """What is said by a run that ends with this signal, which comes at the end of some calls of functions."""

    def run(number: int, *calls: tuple[Any, str, int], options: tuple[str, ...] = ()) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, call in calls:
                raising(patch, owner, name, number, call)
            return str(train(*options, code=SIGNALS[signal.Signals(number)]).said)

    return run


def test_a_head_is_trained_resumed_and_exported(train: Any, tmp_path: Path) -> None:
    train("--max-steps", 2)
    train("--resume")
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
    for trained, data, more, said in (
        (target, "nowhere", (), "does not exist"),
        (tiny.target, "short.txt", (), "the training data has only"),
        (target, "short.txt", (), "is text, but the target has no tokenizer"),
        (tmp_path / "model.gguf", "short.txt", (), "has version 0 of GGUF"),
        (tmp_path / "gptj", "short.txt", (), "nothing can be trained for it"),
        (tmp_path / "nowhere" / "at" / "all", "short.txt", (), "is not a folder"),
        (tiny.target, "short.txt", ("--resume",), "there is no checkpoint"),
    ):
        out = ["--out", tmp_path / "out", "--budget-tokens", 9, "--length", 32]
        assert said in cli("train", "medusa", "-m", trained, "--data", tmp_path / data, *out, *more, code=2).said
        assert not (tmp_path / "out").exists()


def test_a_run_is_not_resumed_for_another_target(train, tmp_path):
    train("--max-steps", 1)
    other = train_target(tmp_path / "other", steps=1)
    assert "was written with other settings: target was" in train("--resume", "-m", other, code=2).said


def raising(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, call: int) -> None:
    """The signal comes at the end of this call of a function, counted from 1."""
    original, count = getattr(owner, name), 0

    def function(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        outcome = original(*args, **more)
        if count == call:
            signal.raise_signal(number)
        return outcome

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (run_module, "prepare_data", signal.SIGINT), (run_module, "write_held_out_text", signal.SIGTERM),
        (acceptance, "write_masked", signal.SIGINT), (run_module, "read_held_out", signal.SIGTERM),
        (run_report, "estimate", signal.SIGTERM), (Loop, "evaluate", signal.SIGINT),
    ],
)  # fmt: skip
def test_before_the_first_step_nothing_is_saved_and_the_same_command_begins_again(
    owner, name, number, stopped, train, tmp_path
):
    said = stopped(number, (owner, name, 1))
    assert "no step was saved" in said
    assert "Begin again by the same command" in said
    assert not (tmp_path / "out" / "final").exists()
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    train()
    assert logged(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "call", "step", "number"),
    [
        ("step", 1, 1, signal.SIGINT), ("step", 3, 3, signal.SIGTERM), ("evaluate", 3, 2, signal.SIGINT),
        ("save", 1, 4, signal.SIGTERM),
    ],
)  # fmt: skip
def test_a_step_that_was_begun_is_saved_and_exported_and_the_resuming_command_is_shown(
    name: str, call: int, step: int, number: int, stopped: Any, train: Any, tmp_path: Path
) -> None:
    said = stopped(number, (Loop, name, call))
    assert "stopping after this step" in said
    assert f"step {step} is saved. Continue with: slipstream train medusa --out here --resume" in said
    assert f"in {step} steps" in (tmp_path / "out" / "final" / "README.md").read_text()
    train("--resume")
    assert "in 4 steps" in (tmp_path / "out" / "final" / "README.md").read_text()
    logged(tmp_path / "out")


def test_a_second_signal_stops_at_once_with_the_last_checkpoint(stopped: Any, train: Any, tmp_path: Path) -> None:
    calls = (Loop, "step", 2), (Loop, "evaluate", 3)  # after that step
    assert "step 1 is saved" in stopped(signal.SIGINT, *calls, options=("--save-minutes", "1e-9"))
    assert not (tmp_path / "out" / "final").exists()
    train("--resume")


@pytest.mark.parametrize(("owner", "name"), [(resume_state, "save_file"), (MedusaObjective, "export")])
def test_a_file_that_is_being_written_is_left_whole_or_not_at_all(owner, name, stopped, train, tmp_path):
    assert "step 4 is saved" in stopped(signal.SIGINT, (owner, name, 1))
    assert not list(tmp_path.rglob("*.tmp"))
    train("--resume")
    assert (tmp_path / "out" / "final" / "config.json").is_file()


def test_a_resumed_run_that_is_stopped_before_a_step_keeps_its_checkpoint_and_exports_nothing(stopped, train, tmp_path):
    train("--max-steps", 1)
    before = (tmp_path / "out" / "checkpoint.safetensors").read_bytes()
    card = (tmp_path / "out" / "final" / "README.md").read_text()
    assert "step 1 is saved" in stopped(signal.SIGINT, (run_report, "estimate", 1), options=("--resume",))
    assert (tmp_path / "out" / "checkpoint.safetensors").read_bytes() == before
    assert (tmp_path / "out" / "final" / "README.md").read_text() == card
