"""The counters of each server, from texts as it writes them, are those of our definitions.

`metrics/slipstream.txt` was recorded, and so was `vllm.txt` but for its histograms. These, `sglang.txt` and
`llamacpp.txt` are written as their sources do.
"""

import re
from pathlib import Path

import pytest

from slipstream.measure.counters import NAMES, SERVERS, Counters, add_counters, name_of, read_counters
from slipstream.server.server_metrics import ServerMetrics

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("metrics/*.txt")}


def known(server: str) -> dict:
    counters = read_counters(TEXTS[server])
    assert counters.server == server
    return {name: value for name, value in counters.as_dict().items() if value is not None}


def test_every_server_of_the_table_has_a_text() -> None:
    assert TEXTS.keys() == SERVERS.keys()


def test_sglang_engines_are_added_priorities_are_not_and_accepted_tokens_follow_from_calls_and_requests() -> None:
    assert known("sglang") == {
        "server": "sglang", "drafts": 200, "accepted_tokens": 510 - 200 - 10, "output_tokens": 510, "requests": 10,
        "preemptions": 1, "prefix_queries": 1000, "prefix_hits": 400, "running": 7, "waiting": 1, "kv_usage": 0.35,
        "mean_acceptance_length": 2.5, "tokens_per_step": pytest.approx(510 / 210),
        "accept_length": 2.5, "engines": 2, "models": ["m"],
    }  # fmt: skip


def test_llama_server_counts_cached_prompt_tokens_apart_and_tells_no_kv_usage_and_no_preemptions() -> None:
    assert known("llamacpp") == {
        "server": "llamacpp", "drafts": 100, "draft_tokens": 400, "accepted_tokens": 150, "output_tokens": 260,
        "accepted_at": [0.7, 0.5, 0.25, 0.05], "prefix_queries": 4000, "prefix_hits": 954, "running": 2, "waiting": 1,
        "acceptance_rate": 0.375, "mean_acceptance_length": 2.5, "tokens_per_step": pytest.approx(260 / 110),
        "engines": 1, "models": [],
    }  # fmt: skip


@pytest.mark.parametrize("server", ["vllm", "slipstream"])
def test_vllm_and_slipstream_report_everything_and_the_figures_agree(server: str) -> None:
    counters = known(server)
    assert counters.keys() >= {name for name in NAMES if name_of(name, server)}
    assert 0 < counters["accepted_tokens"] < counters["draft_tokens"]
    assert counters["requests"] > 0
    assert counters["accepted_at"] == sorted(counters["accepted_at"], reverse=True)
    assert sum(counters["accepted_at"]) == pytest.approx(counters["accepted_tokens"] / counters["drafts"])
    assert counters["mean_acceptance_length"] == pytest.approx(1 + sum(counters["accepted_at"]))


def test_every_name_of_slipstream_in_the_table_is_a_metric_of_the_server_with_any_prefix() -> None:
    collected = list(ServerMetrics("m").registry.collect())
    exported = {each.name + ("_total" if each.type == "counter" else "") for each in collected}
    exported |= {f"{each.name}_sum" for each in collected if each.type == "histogram"} | {"slipstream:"}
    assert {f"slipstream:{name_of(quantity, 'slipstream')}" for quantity in NAMES} <= exported
    counters = read_counters(ServerMetrics("m", "vllm").render().decode())
    assert counters.server == "slipstream"
    assert counters.values.keys() >= {"running", "output_tokens", "drafts", "kv_usage"}


def test_growth_leaves_out_what_was_before_and_what_holds_now_stays() -> None:
    before = Counters("vllm", {"drafts": 10, "running": 3, "accepted_at 1": 5})
    after = Counters("vllm", {"drafts": 30, "running": 1, "accepted_at 1": 17, "accepted_at 2": 4})
    grown = Counters("vllm", {"drafts": 20, "running": 1, "accepted_at 1": 12, "accepted_at 2": 4})
    assert after.since(before) == grown
    assert grown.since(after).values["drafts"] == 20, "a counter that fell is of a restarted server"
    assert add_counters([after.since(before), grown]) == grown + grown
    assert (grown + grown).values["accepted_at 1"] == 24
    assert add_counters([grown, None]) is add_counters([]) is None


@pytest.mark.parametrize("more", [{"drafts": 9}, {"began": 2.0}, {"drafts": 9, "began": 2.0}])
def test_one_counter_that_fell_or_another_start_of_the_process_is_a_restart_of_all(more: dict) -> None:
    """Else some counters would be counted from the restart, and others from before it."""
    before = Counters("vllm", {"drafts": 10, "output_tokens": 100, "began": 1.0})
    after = Counters("vllm", {"drafts": 30, "output_tokens": 120, "began": 1.0} | more)
    assert after.has_restarted(before)
    assert after.since(before) == after


def test_positions_that_no_draft_reached_have_a_rate_of_zero() -> None:
    counters = Counters("slipstream", {"drafts": 10, "draft_tokens": 38, "accepted_tokens": 7, "accepted_at 1": 7})
    assert counters.as_dict()["accepted_at"] == [0.7, 0.0, 0.0, 0.0]
    none = Counters("slipstream", {"drafts": 10, "draft_tokens": 20, "accepted_tokens": 0})
    assert none.as_dict()["accepted_at"] == [0.0, 0.0]


@pytest.mark.parametrize("text", ["", "<html><body>hello</body></html>", "# TYPE process_cpu counter\nprocess_cpu 1\n"])
def test_a_page_without_known_counters_reports_nothing(text: str) -> None:
    assert read_counters(text) is None


def test_a_server_without_speculation_reports_no_drafts() -> None:
    text = "".join(line for line in TEXTS["vllm"].splitlines(keepends=True) if "spec_decode" not in line)
    counters = read_counters(text)
    shown = counters.as_dict()
    assert shown["output_tokens"] > 0
    names = ("drafts", "accepted_at", "acceptance_rate", "mean_acceptance_length")
    assert [shown[name] for name in names] == [None] * 4


def test_the_documentation_has_the_same_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    rows = page.split("<!-- counters -->")[1].split("<!-- end of counters -->")[0].strip().splitlines()[2:]
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in shown] == [name.replace("_", " ") for name in NAMES]
    for row, names in zip(shown, NAMES.values(), strict=True):
        assert [re.sub("`", "", cell) for cell in row[1:]] == [name or "not reported" for name in names]
