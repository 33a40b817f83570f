"""`slipstream verify`."""

from __future__ import annotations

import json
import re

QUICK = ["-n", "8", "--texts", "3", "--reach", "0", "--seed", "1", "-k", "3"]


def test_the_report_for_people(cli, pair, texts, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    result = cli("verify", texts, *pair, *QUICK, "--out", out)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("Control, no drafter", "Greedy texts", "Sampled texts of one seed", "the target's distribution",
                 "No bug found in model, K=3, rule rejection: ", "bias",
                 "What this run cannot see"):  # fmt: skip
        assert part in said
    assert re.search(r"rejection: (\d+) of \1 texts identical", said)
    assert max(map(len, result.out.splitlines())) <= 80
    assert json.loads(out.read_text())["kind"] == "verify"
    assert cli("report", out, "-o", page).code == 0
    assert "Does speculation change the target&#39;s output?" in page.read_text()


def test_json_for_programs(cli, pair, texts):
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy", "--json")
    assert result.code == 0, result.err
    output = json.loads(result.out)
    assert output["data"]["verdict"] == "ok"
    assert {row["verdict"] for row in output["data"]["greedy"]} == {"identical"}
    assert output["data"]["distribution"] == output["data"]["coupled"] == []
    assert output["settings"]["drafter"] == "model"


def test_too_few_draft_tokens_are_no_proof_and_end_with_code_1(cli, pair, texts):
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy", "--drafter", "ngram", "-o", "min_ngram=7",
                 "-o", "max_ngram=9")  # fmt: skip
    assert result.code == 1
    assert "Not tested: ngram, K=3, rule rejection drafted too little in greedy." in " ".join(result.out.split())


def test_runs_without_a_seed_take_samples_of_their_own(cli, pair, texts):
    seeds = {
        json.loads(cli("verify", texts, *pair, "-n", "4", "--check", "greedy", "--json").out)["settings"]["seed"]
        for _ in range(2)
    }
    assert len(seeds) == 2


def test_a_bug_ends_with_code_1(cli, pair, texts, monkeypatch):
    from slipstream.core import step
    from slipstream.core.rules import follow

    def wrong(draft, picks):
        return follow(draft, [pick ^ 1 for pick in picks] if len(draft) else picks)

    monkeypatch.setattr(step, "follow", wrong)
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy")
    assert result.code == 1
    assert "BUG: model, K=3, rule rejection changes the target's output" in result.out


def test_the_rule_greedy_is_checked_on_greedy_texts_alone(cli, pair, texts):
    result = cli("verify", texts, *pair, *QUICK, "--rule", "greedy", "--json")
    assert result.code == 0, result.err
    output = json.loads(result.out)["data"]
    assert {row["verdict"] for row in output["greedy"]} == {"identical"}
    assert output["coupled"] == output["distribution"] == []
