"""`slipstream simulate`: its inputs, its output, and what is refused."""

import json
import shlex

import click
import pytest

from slipstream.cli.main import canonical, parser
from slipstream.cli.simulate import ADVICE
from slipstream.drafters.registry import DRAFTERS
from slipstream.measure.known_pairs import PAIRS, predict_pair
from slipstream.measure.roofline import find_hardware
from slipstream.theory.cost_curve import CostCurve
from tests.tiny_checkpoints import make_model, make_tokenizer


def predicted(cli, *arguments):
    return json.loads(cli("simulate", *arguments, "--json", code=0).out)


def test_lengths_from_an_acceptance_rate_and_a_draft_cost_or_one_that_is_given(cli):
    seen = predicted(cli, "--alpha", "0.8", "--c", "0.05")
    assert seen["best"] == 8
    best = next(row for row in seen["lengths"] if row["draft_tokens"] == 8)
    assert best["speedup"] == pytest.approx(3.092, abs=5e-4)
    assert [row["draft_tokens"] for row in predicted(cli, "-k", "20")["lengths"]] == [20]


def test_measured_rates_and_a_row_cost(cli):
    seen = predicted(cli, "--rates", ".73,.52,.35", "--row-cost", ".02")
    assert seen["acceptance"] == {"alpha": None, "position_rates": [0.73, 0.52, 0.35], "source": "given"}
    assert max(row["draft_tokens"] for row in seen["lengths"]) == 3
    assert seen["lengths"][2]["tau"] == pytest.approx(2.6)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--alpha", "1", "--c", "0"], ["--alpha", "0"], ["--rates", ".73,.52,.35"], ["--pairs"],
        ["--hardware", "h100", "-m", "Llama-3.1-70B", "-md", "Llama-3.2-3B", "--users", "5000", "--latency-ms", "25"],
        ["--hardware", "h200", "-m", "Mixtral-8x7B", "-md", "Mistral-7B", "--batch", "1,512"],
        ["--bandwidth", "100", "--tflops", "2", "--memory", "64", "-m", "7B", "-md", "1B", "--bits", "4"],
    ],
)  # fmt: skip
def test_tables_fit_80_columns_and_nothing_is_cut(cli, arguments, monkeypatch):
    result = cli("simulate", *arguments, code=0)
    assert result.width <= 80
    assert "…" not in result.out


def test_a_plan_for_other_hardware(cli):
    seen = predicted(cli, "--hardware", "H100", "-m", "Llama-3.1-70B", "-md", "Llama-3.1-8B", "--batch", "1,64",
                     "--latency-ms", "30", "--users", "3000")  # fmt: skip
    assert seen["hardware"]["devices"] == 4
    assert [load["batch"] for load in seen["loads"]] == [1, 64]
    assert seen["loads"][0]["speedup"] > seen["loads"][1]["speedup"] > 1
    assert seen["groups"]["speculative"] == -(-3000 // seen["users_a_group"]["speculative"])
    assert seen["models"][0]["weight_bytes"] == 2 * 70_553_706_496


def test_the_bits_of_the_cache_can_be_given_and_assumptions_are_stated(cli):
    arguments = ["--hardware", "h100", "-m", "70B", "-md", "8B", "--batch", "64", "--context", "8192"]
    usual, half = (predicted(cli, *arguments, *more) for more in ([], ["--kv-bits", "8"]))
    assert half["models"][0]["kv_bytes"] == usual["models"][0]["kv_bytes"] / 2
    assert half["loads"][0]["plain_seconds"] < usual["loads"][0]["plain_seconds"]
    shown = cli("simulate", "--hardware", "a100", "-m", "Mixtral-8x7B", "-md", "Mistral-7B", "--bits", "4").shown
    for part in ("reads at 74% of the peak", "2 of 8 experts", "optimistic", "Prefill and queueing are not included",
                 "ms of overhead", "1024 tokens of context"):  # fmt: skip
        assert part in shown


def test_costs_measured_here(cli, tiny, monkeypatch):
    """The tiny pair; real times are replaced, so that nothing depends on the machine."""
    monkeypatch.setattr("slipstream.targets.target_costs.measure_costs", lambda _: CostCurve((1, 8), (0.01, 0.012)))
    monkeypatch.setattr(
        "slipstream.targets.target_costs.measure_draft_costs",
        lambda target, drafter, lengths: CostCurve((1, 8), (0.001, 0.008)),
    )
    seen = predicted(cli, "--measure", "-m", tiny.target, "-md", tiny.draft, "--alpha", ".7")
    assert seen["costs"]["c"] == pytest.approx(0.1)
    assert seen["costs"]["curve"] == {"rows": [1, 8], "seconds": [0.01, 0.012]}
    assert "measured here: one row takes 10.00 ms, 8 draft tokens 8.00 ms" in seen["assumptions"]


def test_costs_are_really_measured(cli, tiny):
    seen = predicted(cli, "--measure", "-m", tiny.target, "-md", tiny.draft)
    assert seen["costs"]["c"] > 0
    assert seen["costs"]["curve"]["rows"][0] == 1


LINES = ADVICE.read_text().splitlines()
COMMANDS = [line.strip() for line in LINES if line.startswith("    ")]


def test_pairs_for_people_and_advice_for_every_situation(cli):
    result = cli("simulate", "--pairs")
    assert all(name in result.out for name in {n for pair in PAIRS for n in (pair.target, pair.draft)})
    assert "no published figure" in result.shown
    result = cli("simulate", "--advice", code=0)
    assert all(line in result.out.splitlines() for line in LINES if line.strip() in COMMANDS or line == line.lstrip())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("slipstream ")])
def test_advised_commands_are_understood(command):
    """Parsed by the command line itself, to detect renamed options."""
    name, *arguments = canonical(shlex.split(command)[1:])
    group = parser()
    wanted = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
    assert wanted is not None, name
    wanted.make_context(name, list(arguments))
    if "--drafter" in arguments:
        assert arguments[arguments.index("--drafter") + 1] in DRAFTERS


TARGET, DRAFT = "Llama-3.1-70B", "Llama-3.2-3B"
FIGURES = (
    "acceptance", "position_rates", "c", "draft_tokens", "tau", "step_cost", "speedup", "break_even", "assumptions",
)  # fmt: skip


@pytest.mark.parametrize("hardware", ["h100", "rtx4090"])
@pytest.mark.parametrize("alpha", [None, 0.6, 0.9])
def test_lists_and_predictions_agree_for_the_same_pair_and_assumptions(cli, hardware, alpha):
    pair = next(pair for pair in PAIRS if (pair.target, pair.draft) == (TARGET, DRAFT))
    listed = json.loads(json.dumps(predict_pair(pair, find_hardware(hardware), alpha)[1].as_dict()))
    rate = [] if alpha is None else ["--alpha", alpha]
    (load,) = predicted(cli, "--hardware", hardware, "-m", TARGET, "-md", DRAFT, "--batch", "1", *rate)["loads"]
    assert {name: load[name] for name in FIGURES} == {name: listed[name] for name in FIGURES}
    assert listed["acceptance"] == (alpha or 0.775)


def test_costs_by_weights_read_agree_with_costs_that_are_given(cli, tmp_path, monkeypatch):
    for name, layers in (("target", 8), ("draft", 1)):
        make_model(tmp_path / name, num_hidden_layers=layers)
        make_tokenizer(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    target, draft = "target", "draft"  # names of folders
    ratio = json.loads(cli("info", target, draft, "--json").out)["cost_ratio"]
    by_models, given = (predicted(cli, "--alpha", "0.8", *c) for c in (("-m", target, "-md", draft), ("--c", ratio)))
    assert (by_models["costs"], by_models["best"]) == (given["costs"], given["best"])
    assert [row["speedup"] for row in by_models["lengths"]] == [row["speedup"] for row in given["lengths"]]


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--pairs"], ["simulate"], ["simulate", "--hardware", "h100", "-m", TARGET, "-md", DRAFT],
        ["simulate", "-m", "TINY", "-md", "TINY"],
    ],
)  # fmt: skip
def test_every_prediction_states_its_assumptions(cli, tiny, command):
    arguments = [{"TINY": tiny.target}.get(word, word) for word in command]
    said = cli(*arguments).shown.lower()
    assert "assumptions" in said
    assert "decode steps" in said
    assert any(basis in said for basis in ("roofline", "memory-bound", "costs as given"))
