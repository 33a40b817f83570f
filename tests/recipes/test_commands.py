import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.embedded import export, train
from recipes.embedded.card import command_of
from recipes.embedded.trainer import TARGET

ROOT = Path(__file__).parent.parent.parent


def test_options_reach_the_configuration(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--budget-tokens", "9000", "--step-tokens", "4096", "--edit-share", "0.5"]
    config = train.config_of([*words, "--no-compile"])
    assert (config.budget_tokens, config.step_tokens, config.micro_tokens) == (9000, 4096, 4096)
    assert (config.mix.edit, config.mix.raw) == (0.5, pytest.approx(0.42))
    assert config.shape == TARGET
    assert not config.compile


def test_a_run_without_a_budget_is_one_message_and_exit_code_2(tmp_path, capsys):
    assert train.main(["--out", str(tmp_path)]) == 2
    assert "give budget_minutes or budget_tokens" in capsys.readouterr().err


def test_the_card_shows_a_command_that_the_parser_accepts() -> None:
    config = {"role": "draft", "teacher": "x", "budget_tokens": 100, "seed": 3, "lr": 0.003, "mix": {"edit": 0.25}}
    command = command_of(config)
    assert command == (
        "python -m recipes.embedded.train --out OUT --role draft --teacher TARGET_OUT --budget-tokens 100 --lr 0.003 "
        "--seed 3 --edit-share 0.25"
    )
    shown = command_of({**config, "teacher": None, "pre_tokenizer": "gpt2"})
    assert train.parser().parse_args(shlex.split(shown)[3:]).pre_tokenizer == "gpt2"
    assert command_of({**config, "resume": True}).endswith("--edit-share 0.25 --resume")
    assert train.parser().parse_args(shlex.split(command)[3:]).teacher == Path("TARGET_OUT")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_commands_of_the_embedded_cards_are_accepted(role: str) -> None:
    card = (ROOT / "slipstream" / "zoo" / "models" / role / "README.md").read_text()
    commands = [line.strip() for line in card.splitlines() if "-m recipes.embedded.train" in line]
    assert len(commands) >= 3
    for command in commands:
        assert train.parser().parse_args(shlex.split(command)[3:]).role == role


def test_the_modules_run_from_a_clone() -> None:
    """As with `python -m`, both in one process, because PyTorch takes two seconds to import."""
    code = """
import contextlib, runpy, sys
sys.argv[1:] = ["--help"]
for name in sys.orig_argv[-2:]:
    with contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__")
"""
    words = [sys.executable, "-c", code, train.__name__, export.__name__]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage") == 2
