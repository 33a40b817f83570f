from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.train import app
from slipstream.errors import ParameterError
from slipstream.training import base
from slipstream.zoo.card import command_of


def test_options_reach_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[base.BaseConfig] = []
    monkeypatch.setattr(base, "train_base", seen.append)
    words = ["base", "--out", str(tmp_path), "--budget-tokens", "9000", "--step-tokens", "4096", "--edit-share", "0.5"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (seen[0].budget_tokens, seen[0].step_tokens, seen[0].micro_tokens) == (9000, 4096, 4096)
    assert (seen[0].mix.edit, seen[0].mix.raw) == (0.5, pytest.approx(0.42))
    assert seen[0].shape == base.TARGET


def test_a_budget_is_required(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["base", "--out", str(tmp_path)])
    assert isinstance(result.exception, ParameterError)


def test_card_repeats_the_command() -> None:
    config = {"role": "draft", "teacher": "x", "budget_tokens": 100, "seed": 3, "lr": 0.003, "mix": {"edit": 0.25}}
    assert command_of(config) == (
        "slipstream train base --out OUT --role draft --teacher TARGET_OUT --budget-tokens 100 --lr 0.003 --seed 3 "
        "--edit-share 0.25"
    )
    assert command_of({**config, "resume": True}).endswith("--edit-share 0.25 --resume")
