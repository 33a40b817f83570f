"""`slipstream verify`."""

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


def test_json_for_programs_and_samples_of_its_own_for_each_run_without_a_seed(cli, pair, texts):
    results = [cli("verify", texts, *pair, "-n", "4", "-k", "3", "--check", "greedy", "--json") for _ in range(2)]
    assert [result.code for result in results] == [0, 0], results[0].err
    one, other = (json.loads(result.out) for result in results)
    assert one["data"]["verdict"] == "ok"
    assert {row["verdict"] for row in one["data"]["greedy"]} == {"identical"}
    assert one["data"]["distribution"] == one["data"]["coupled"] == []
    assert one["settings"]["drafter"] == "model"
    assert one["settings"]["seed"] != other["settings"]["seed"]


def test_too_few_draft_tokens_are_no_proof_and_end_with_code_1(cli, pair, texts):
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy", "--drafter", "ngram", "-o", "min_ngram=7",
                 "-o", "max_ngram=9")  # fmt: skip
    assert result.code == 1
    assert "Not tested: ngram, K=3, rule rejection drafted too little in greedy." in " ".join(result.out.split())


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
