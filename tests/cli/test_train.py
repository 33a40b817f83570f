"""`slipstream train medusa|eagle3|draft|layerskip` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import main
from tests.training.tiny_runs import train_target, write_data


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_target(tmp_path_factory.mktemp("target"), steps=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "texts.bin")


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["train", *map(str, words)])
    return int(left.value.code or 0)


@pytest.fixture
def common(target: Path, data: Path, tmp_path: Path) -> list[object]:
    return [
        "--target", target, "--data", data, "--out", tmp_path / "out", "--budget-tokens", 4 * 128, "--length", 32,
        "--rows", 4, "--texts", 2, "--text-tokens", 6, "--threads", 1, "--executor", "torch", "--eval-steps", 0,
    ]  # fmt: skip


def test_a_head_is_trained_resumed_and_exported(
    common: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["slipstream", "train", "medusa", "--resume"])
    assert run("medusa", *common, "--heads", 2, "--max-steps", 2) == 0
    assert run("medusa", *common, "--heads", 2, "--resume") == 0
    made = json.loads((tmp_path / "out" / "final" / "config.json").read_text())
    assert made["medusa_num_heads"] == 2
    assert len(made["medusa_head_accuracies"]) == 2
    card = (tmp_path / "out" / "final" / "README.md").read_text()
    assert card.count("    slipstream train medusa --resume") == 2, "one line a part"


def test_a_dry_run_prints_the_estimate_only(
    common: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eagle3", *common, "--steps", 2, "--dry-run") == 0
    shown = capsys.readouterr().out
    for word in ("data", "training", "memory", "time", "tokens/s", "disk"):
        assert word in shown
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()
    assert run("eagle3", *common, "--steps", 2, "--cache-hidden", "--dry-run") == 0
    assert "of disk" in capsys.readouterr().out


def test_empty_data_is_refused_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.targets.decoder import Decoder

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Decoder, "load", refuse)
    (tmp_path / "empty.txt").write_text("")
    words = ["--data", tmp_path / "empty.txt", "--out", tmp_path / "out", "--budget-tokens", 9]
    assert run("medusa", *words) == 2
    assert "is empty" in " ".join(capsys.readouterr().err.split())


def test_a_refused_run_leaves_no_folder(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("train", "medusa", "--data", "nowhere", "--budget-tokens", "9").code == 2
    assert not list(tmp_path.iterdir())


def test_python_m_slipstream_is_the_command():
    found = subprocess.run(
        [sys.executable, "-m", "slipstream", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("slipstream ")
