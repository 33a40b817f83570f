"""The content of a bench result. No test depends on measured speed."""

import json

import pytest

from slipstream.cli.report import make_section
from slipstream.core.drafter import DrafterTraits, NoDrafter
from slipstream.errors import ParameterError
from slipstream.measure.benchmark import BenchConfig, Contender, bench, count_steps
from slipstream.measure.plots import draw_svg
from slipstream.measure.results import read
from tests.drafters.scripted_drafters import Silent


def test_every_condition_has_plain_decoding_of_its_own(bench_result):
    arms = [(arm.label, arm.temperature, arm.against) for arm in bench_result.data.arms]
    assert arms == [
        ("plain", 0.0, None), ("model", 0.0, 0), ("ngram", 0.0, 0),
        ("plain", 1.0, None), ("model", 1.0, 3), ("ngram", 1.0, 3),
    ]  # fmt: skip


def test_figures_and_invariants(bench_result):
    for arm in bench_result.data.arms:
        f, stats = arm.overall, arm.overall.stats
        assert set(arm.categories) == {"a", "b"}
        assert sum(stats["histogram"]) == stats["steps"]
        assert sum(i * n for i, n in enumerate(stats["histogram"])) == stats["accepted"]
        assert f.mean_acceptance_length == pytest.approx(stats["tokens"] / stats["steps"])
        assert sum(c.stats["tokens"] for c in arm.categories.values()) == stats["tokens"]
        assert sum(f.shares.values()) == pytest.approx(1)
        e = f.speedup
        assert (e.note, stats["accepted"]) == ("no draft accepted", 0) or e.low <= e.value <= e.high
        assert f.tokens_per_second.value > 0
        assert f.first_token_seconds > 0
        assert [len(row) for row in arm.cells["seconds"]] == [3, 3, 3]
    plain, model, ngram = bench_result.data.arms[:3]
    assert plain.overall.speedup.value == 1
    assert plain.overall.stats["proposed"] == 0
    assert 0 < model.overall.acceptance_rate < 1
    assert [arm.texts for arm in (plain, model, ngram)] == ["plain", "identical", "identical"]
    assert bench_result.data.arms[4].texts == "sampled"
    assert bench_result.complete


def test_provenance_says_where_the_numbers_come_from(bench_result):
    provenance = bench_result.provenance
    assert provenance["dtype"] == "float64"
    assert provenance["executor"] == "torch"
    assert provenance["seed"] == 0
    assert len(provenance["target"]["sha256"]) == 16
    assert {"slipstream", "torch", "python"} <= set(provenance["versions"])
    assert provenance["template"]
    assert [len(draft["sha256"]) for draft in provenance["drafts"].values()] == [16]
    json.dumps(bench_result.as_dict(), allow_nan=False)


class Faulty(NoDrafter):
    name, traits = "faulty", DrafterTraits()

    def propose(self, seqs, budgets):
        raise RuntimeError("no")


def test_drafters_that_fail_or_draft_nothing_get_a_warning(tiny_llm, prompt_set):
    contenders = [Contender("faulty", Faulty(), 3), Contender("silent", Silent(), 3)]
    result = bench(tiny_llm, contenders, prompt_set, BenchConfig(tokens=4, rounds=1))
    said = "\n".join(result.warnings)
    assert "faulty (temperature 0, batch 1): the drafter failed" in said
    assert "silent (temperature 0, batch 1): nothing was drafted" in said
    assert "is plain decoding" in make_section(result).lead
    assert make_section(result).tables[0].texts()[1][1].endswith("(no drafts)")


def test_without_intervals_a_result_is_shown(tiny_llm, contenders, prompt_set):
    config = BenchConfig(tokens=4, rounds=2)
    shown = make_section(bench(tiny_llm, contenders, prompt_set, config))
    assert "Not enough passes for an interval: raise --rounds to 3 or more." in shown.lead
    assert shown.tables[0].texts()[1][1].endswith("(few passes)")
    for plot in shown.plots:
        draw_svg(plot)


def test_impossible_settings_are_refused():
    for wrong in ({"tokens": 0}, {"batches": ()}, {"batches": (0,)}, {"temperatures": (-1.0,)}, {"rounds": 0}):
        with pytest.raises(ParameterError):
            BenchConfig(**wrong)


def test_an_arm_without_its_baseline_is_not_reported(tiny_llm, contenders, prompt_set, tmp_path):
    """The second round runs in another order: an interruption in the first may leave one arm ahead of the other."""
    for stop in range(9, 19):
        moved = []

        def advance(moved=moved, stop=stop):
            moved.append(1)
            if len(moved) == stop:
                raise KeyboardInterrupt

        config = BenchConfig(tokens=2, rounds=2, batches=(1, 3))
        with pytest.raises(KeyboardInterrupt):
            bench(tiny_llm, contenders[1:], prompt_set, config, tmp_path / "a.json", advance)
        arms = read(tmp_path / "a.json").data["arms"]
        assert all(arm["plain"] or arms[arm["against"]]["plain"] for arm in arms)


def test_every_context_has_plain_decoding_of_its_own(tiny_llm, contenders, prompt_set):
    config = BenchConfig(tokens=4, rounds=1, contexts=(None, 12), batches=(1, 2))
    moved: list[int] = []
    result = bench(tiny_llm, contenders[1:], prompt_set, config, advance=lambda: moved.append(1))
    arms = result.data.arms
    assert len(moved) == count_steps(contenders[1:], prompt_set, config)
    assert [(arm.label, arm.context, arm.batch, arm.against) for arm in arms] == [
        ("plain", None, 1, None), ("ngram", None, 1, 0), ("plain", None, 2, None), ("ngram", None, 2, 2),
        ("plain", 12, 1, None), ("ngram", 12, 1, 4), ("plain", 12, 2, None), ("ngram", 12, 2, 6),
    ]  # fmt: skip
    assert [row[1] for row in make_section(result).tables[0].rows][-1] == "greedy\nbatch 2\ncontext 12"


def test_looping_texts_are_counted_apart(tiny_llm, contenders, prompt_set, monkeypatch):
    """Of three texts one loops."""
    ids = {0: [1, 2] * 20, 1: list(range(40)), 2: list(range(30))}

    def fake(run, seed, advance):
        run.texts = ids
        for _ in run.groups:
            advance()

    monkeypatch.setattr("slipstream.measure.arms.warm_up", fake)
    result = bench(tiny_llm, contenders[1:], prompt_set, BenchConfig(tokens=4, rounds=2))
    arm = result.data.arms[1]
    assert arm.loops == {"share": 40 / 110, "prompts": [0]}
    said = "36% of the output tokens are in repetitive loops (1 of 3 texts)"
    assert any(warning.startswith(said) for warning in result.warnings)
