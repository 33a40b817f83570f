"""`slipstream simulate --pairs`, `--advice` and `--suggest`."""

from __future__ import annotations

import json
import shlex

import click
import pytest
import typer

from slipstream.cli.main import app, canonical
from slipstream.drafters.registry import DRAFTERS
from slipstream.plan.advice import ADVICE
from slipstream.plan.known_pairs import MODELS, PAIRS
from slipstream.plan.suggest import ALTERNATIVES
from tests.checkpoints import OTHER_TEXTS, make_model, make_tokenizer

COMMANDS = [command for advice in ADVICE for command in advice.commands] + [
    alternative.command.format(target="TARGET") for alternative in ALTERNATIVES
]


def test_pairs_for_programs(cli):
    seen = json.loads(cli("simulate", "--pairs", "--json").out)["pairs"]
    assert len(seen) == len(PAIRS)
    one = next(pair for pair in seen if pair["draft"] == "Llama-3.2-3B")
    assert one["acceptance"] == [0.75, 0.8]
    assert one["target_model"]["parameters"] == 70_553_706_496
    assert one["predicted"]["hardware"]["name"] == "H100"


def test_pairs_for_people(cli):
    result = cli("simulate", "--pairs")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "…" not in result.out
    assert all(name in result.out for name in {n for pair in PAIRS for n in (pair.target, pair.draft)})
    assert "no published figure" in " ".join(result.out.split())


def test_pairs_elsewhere_at_another_acceptance(cli):
    seen = json.loads(cli("simulate", "--pairs", "--hardware", "rtx4090", "--alpha", ".9", "--json").out)["pairs"]
    assert {pair["predicted"]["acceptance"] for pair in seen} == {0.9}
    assert {pair["predicted"]["hardware"]["name"] for pair in seen} == {"RTX 4090"}


def test_advice_names_every_situation_and_its_commands(cli):
    result = cli("simulate", "--advice")
    assert result.code == 0
    for advice in ADVICE:
        assert advice.situation[1:] in result.out
        assert all(command in result.out for command in advice.commands)
    seen = json.loads(cli("simulate", "--advice", "--json").out)["advice"]
    assert [one["situation"] for one in seen] == [advice.situation for advice in ADVICE]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("slipstream ")])
def test_advised_commands_are_understood(command):
    """Parsed by the command line itself, to detect renamed options."""
    name, *arguments = canonical(shlex.split(command)[1:])
    group = typer.main.get_command(app)
    wanted = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
    assert wanted is not None, name
    wanted.make_context(name, list(arguments))
    if "--drafter" in arguments:
        assert arguments[arguments.index("--drafter") + 1] in DRAFTERS


def test_suggestions_for_a_known_target(cli, tmp_path):
    result = cli("simulate", "--suggest", "-m", "Llama-3.1-70B", "--models", tmp_path)
    said = " ".join(result.out.split())
    assert result.code == 0
    assert "Llama-3.2-3B 2.12x 5 0.128 1.00 at 78% not local" in said
    assert "- Llama-3.2-3B: predicted for 4 x H100." in said
    assert "Assumptions: the acceptance rate shown, at every position; batch 1; costs by a roofline of H100" in said
    assert "info meta-llama/Llama-3.1-70B-Instruct meta-llama/Llama-3.2-1B-Instruct --measure" in said
    assert "another vocabulary: Qwen 2.5's, not Llama 3's" in said
    assert "--draft-tokenizer intersection or string takes another vocabulary" in said
    seen = json.loads(cli("simulate", "--suggest", "-m", "Llama-3.1-70B", "--models", tmp_path, "--json").out)
    assert {one["name"] for one in (*seen["fitting"], *seen["rejected"])} == {*MODELS} - {"Llama-3.1-70B"}


def test_without_a_compatible_draft_the_alternatives_are_named(cli, tiny, tmp_path):
    make_model(tmp_path / "other")
    make_tokenizer(tmp_path / "other", texts=OTHER_TEXTS)
    result = cli("simulate", "--suggest", "-m", tiny.target, "--models", tmp_path)
    assert result.code == 1
    said = " ".join(result.out.split())
    assert "no draft fits." in said
    assert "common ids differ" in said
    for alternative in ALTERNATIVES:
        assert alternative.name in said


def test_the_embedded_draft_is_suggested_for_the_embedded_target(cli, tmp_path):
    result = cli("simulate", "--suggest", "-m", "embedded", "--models", tmp_path)
    assert result.code == 0
    assert "slipstream info embedded embedded --measure" in result.out
