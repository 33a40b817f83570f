"""`slipstream simulate --pairs` and `--advice`."""

from __future__ import annotations

import json
import shlex

import click
import pytest
import typer

from slipstream.cli.main import app, canonical
from slipstream.drafters.registry import DRAFTERS
from slipstream.plan.advice import ADVICE
from slipstream.plan.known_pairs import PAIRS

COMMANDS = [command for advice in ADVICE for command in advice.commands]


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
