"""`slipstream simulate`: its inputs, its output, and what is refused."""

import json

import pytest

from slipstream.theory.cost_curve import CostCurve


def found(cli, *arguments):
    result = cli("simulate", *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_lengths_from_an_acceptance_rate_and_a_draft_cost(cli):
    seen = found(cli, "--alpha", "0.8", "--c", "0.05")
    assert seen["best"] == 8
    best = next(row for row in seen["lengths"] if row["draft_tokens"] == 8)
    assert best["speedup"] == pytest.approx(3.092, abs=5e-4)


def test_measured_rates_and_a_row_cost(cli):
    seen = found(cli, "--rates", ".73,.52,.35", "--row-cost", ".02")
    assert seen["acceptance"] == {"alpha": None, "position_rates": [0.73, 0.52, 0.35], "source": "given"}
    assert max(row["draft_tokens"] for row in seen["lengths"]) == 3
    assert seen["lengths"][2]["tau"] == pytest.approx(2.6)


def test_one_length(cli):
    assert [row["draft_tokens"] for row in found(cli, "-k", "20")["lengths"]] == [20]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--alpha", "1", "--c", "0"],
        ["--alpha", "0"],
        ["--rates", ".73,.52,.35"],
        ["--hardware", "h100", "-m", "Llama-3.1-70B", "-md", "Llama-3.2-3B", "--users", "5000", "--latency-ms", "25"],
        ["--hardware", "h200", "-m", "Mixtral-8x7B", "-md", "Mistral-7B", "--batch", "1,512"],
        ["--bandwidth", "100", "--tflops", "2", "--memory", "64", "-m", "7B", "-md", "1B", "--bits", "4"],
    ],
)  # fmt: skip
def test_tables_fit_80_columns_and_nothing_is_cut(cli, arguments, monkeypatch):
    result = cli("simulate", *arguments)
    assert result.code == 0, result.err
    assert max(map(len, result.out.splitlines())) <= 80
    assert "…" not in result.out


def test_a_plan_for_other_hardware(cli):
    seen = found(cli, "--hardware", "H100", "-m", "Llama-3.1-70B", "-md", "Llama-3.1-8B", "--batch", "1,64",
                 "--latency-ms", "30", "--users", "3000")  # fmt: skip
    assert seen["hardware"]["devices"] == 4
    assert [load["batch"] for load in seen["loads"]] == [1, 64]
    assert seen["loads"][0]["speedup"] > seen["loads"][1]["speedup"] > 1
    assert seen["groups"]["speculative"] == -(-3000 // seen["users_a_group"]["speculative"])
    assert seen["models"][0]["weight_bytes"] == 2 * 70_553_706_496


def test_the_bits_of_the_cache_can_be_given(cli):
    arguments = ["--hardware", "h100", "-m", "70B", "-md", "8B", "--batch", "64", "--context", "8192"]
    usual, half = (found(cli, *arguments, *more) for more in ([], ["--kv-bits", "8"]))
    assert half["models"][0]["kv_bytes"] == usual["models"][0]["kv_bytes"] / 2
    assert half["loads"][0]["plain_seconds"] < usual["loads"][0]["plain_seconds"]


def test_assumptions_are_stated(cli):
    said = " ".join(
        cli("simulate", "--hardware", "a100", "-m", "Mixtral-8x7B", "-md", "Mistral-7B", "--bits", "4").out.split()
    )
    for part in ("reads at 74% of the peak", "2 of 8 experts", "optimistic", "Prefill and queueing are not included",
                 "ms of overhead", "1024 tokens of context"):  # fmt: skip
        assert part in said


def test_costs_measured_here(cli, tiny, monkeypatch):
    """The tiny pair; real times are replaced, so that nothing depends on the machine."""
    monkeypatch.setattr(
        "slipstream.targets.target_costs.measure_costs", lambda target: CostCurve((1, 8), (0.01, 0.012))
    )
    monkeypatch.setattr(
        "slipstream.drafters.draft_costs.measure_draft_costs",
        lambda target, drafter, lengths: CostCurve((1, 8), (0.001, 0.008)),
    )
    seen = found(cli, "--measure", "-m", tiny.target, "-md", tiny.draft, "--alpha", ".7")
    assert seen["costs"]["c"] == pytest.approx(0.1)
    assert seen["costs"]["curve"] == {"rows": [1, 8], "seconds": [0.01, 0.012]}
    assert "measured here: one row takes 10.00 ms, 8 draft tokens 8.00 ms" in seen["assumptions"]


def test_costs_are_really_measured(cli, tiny):
    seen = found(cli, "--measure", "-m", tiny.target, "-md", tiny.draft)
    assert seen["costs"]["c"] > 0
    assert seen["costs"]["curve"]["rows"][0] == 1
