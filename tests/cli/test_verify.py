"""`slipstream verify`."""

import json
import re
from xml.etree import ElementTree

from slipstream.core import step
from slipstream.core.rules import follow

QUICK = ["-n", "4", "--texts", "4", "--reach", "0", "--seed", "1", "-k", "3"]


def test_the_report_for_people(cli, report, pair, texts, tmp_path):
    out = tmp_path / "r.json"
    result = cli("verify", texts, *pair, *QUICK, "--out", out, code=0)
    assert re.search(r"this takes about \d+(\.\d)? (s|min|h), by the speed of its first text", result.err)
    for part in ("Control, no drafter", "Greedy texts", "Sampled texts of one seed", "the target's distribution",
                 "No bug found in model, K=3, rule rejection: ", "bias",
                 "What this run cannot see"):  # fmt: skip
        assert part in result.shown
    assert re.search(r"rejection: (\d+) of \1 texts identical", result.shown)
    assert result.width <= 80
    assert json.loads(out.read_text())["kind"] == "verify"
    assert "Does speculation change the target&#39;s output?" in report(out)


def test_json_for_programs_and_samples_of_its_own_for_each_run_without_a_seed(cli, pair, texts):
    command = ["verify", texts, *pair, "-n", "4", "-k", "3", "--check", "greedy", "--json"]
    one, other = (json.loads(cli(*command, code=0).out) for _ in range(2))
    assert one["data"]["verdict"] == "ok"
    assert {row["verdict"] for row in one["data"]["greedy"]} == {"identical"}
    assert one["data"]["distribution"] == one["data"]["coupled"] == []
    assert one["settings"]["drafter"] == "model"
    assert one["settings"]["seed"] != other["settings"]["seed"]


def test_too_few_draft_tokens_are_no_proof_and_end_with_code_2(cli, pair, texts):
    drafter = ["--drafter", "ngram", "-o", "min_ngram=7", "-o", "max_ngram=9"]
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy", *drafter, code=2)
    assert "Not tested: ngram, K=3, rule rejection drafted too little in greedy." in result.shown


def test_a_bug_ends_with_code_1_and_fails_in_the_junit_file(cli, pair, texts, monkeypatch, tmp_path):
    def wrong(draft, picks):
        return follow(draft, [pick ^ 1 for pick in picks] if len(draft) else picks)

    monkeypatch.setattr(step, "follow", wrong)
    junit = tmp_path / "junit.xml"
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy", "--junit", junit, code=1)
    suite = ElementTree.parse(junit).getroot()
    assert int(suite.get("failures")) == len(suite.findall("testcase[@classname='greedy']/failure")) > 0
    assert (suite.get("errors"), suite.get("tests")) == ("0", str(len(suite.findall("testcase"))))
    assert "BUG: model, K=3, rule rejection changes the target's output" in result.out


def test_the_rule_greedy_is_checked_on_greedy_texts_alone(cli, pair, texts):
    output = json.loads(cli("verify", texts, *pair, *QUICK, "--rule", "greedy", "--json", code=0).out)["data"]
    assert {row["verdict"] for row in output["greedy"]} == {"identical"}
    assert output["coupled"] == output["distribution"] == []
