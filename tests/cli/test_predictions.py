"""`simulate`, its lists, and `info TARGET DRAFT` predict with one function: equal assumptions, equal numbers."""

from __future__ import annotations

import json

import pytest

from tests.checkpoints import make_model, make_tokenizer

TARGET, DRAFT = "Llama-3.1-70B", "Llama-3.2-3B"
FIGURES = (
    "acceptance", "position_rates", "c", "draft_tokens", "tau", "step_cost", "speedup", "break_even", "assumptions",
)  # fmt: skip


def of_pairs(cli, *more):
    found = json.loads(cli("simulate", "--pairs", *more, "--json").out)["pairs"]
    return next(one["predicted"] for one in found if (one["target"], one["draft"]) == (TARGET, DRAFT))


def of_simulate(cli, *more):
    given = ("--hardware", "h100", "-m", TARGET, "-md", DRAFT, "--batch", "1", "--json")
    return json.loads(cli("simulate", *given, *more).out)["loads"][0]


def figures(found):
    return {name: found[name] for name in FIGURES}


@pytest.mark.parametrize("hardware", ["h100", "rtx4090"])
@pytest.mark.parametrize("alpha", [None, "0.6", "0.9"])
def test_lists_and_predictions_agree_for_the_same_pair_and_assumptions(cli, hardware, alpha):
    rate = [] if alpha is None else ["--alpha", alpha]
    place = ["--hardware", hardware]
    seen = figures(of_pairs(cli, *place, *rate))
    assert figures(of_simulate(cli, *place, *rate)) == seen
    assert seen["acceptance"] == (0.775 if alpha is None else float(alpha))


def test_their_defaults_agree_too(cli):
    seen = figures(of_pairs(cli))
    assert figures(of_simulate(cli)) == seen


def test_costs_by_weights_read_agree_with_costs_that_are_given(cli, tmp_path):
    for name, layers in (("target", 8), ("draft", 1)):
        make_model(tmp_path / name, num_hidden_layers=layers)
        make_tokenizer(tmp_path / name)
    target, draft = tmp_path / "target", tmp_path / "draft"
    checked = json.loads(cli("info", target, draft, "--json").out)["expected"]["0.8"]
    given = ("--alpha", "0.8", "--c", checked["c"])
    simulated = json.loads(cli("simulate", *given, "--json").out)
    row = next(row for row in simulated["lengths"] if row["draft_tokens"] == simulated["best"])
    for name in ("draft_tokens", "tau", "step_cost", "speedup"):
        assert checked[name] == row[name]


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--pairs"],
        ["simulate"],
        ["simulate", "--hardware", "h100", "-m", TARGET, "-md", DRAFT],
        ["info", "TINY", "TINY"],
    ],
)
def test_every_prediction_states_its_assumptions(cli, tiny, command):
    arguments = [{"TINY": tiny.target}.get(word, word) for word in command]
    said = " ".join(cli(*arguments).out.split()).lower()
    assert "assumptions" in said
    assert "decode steps" in said
    assert any(basis in said for basis in ("roofline", "memory-bound", "costs as given"))
