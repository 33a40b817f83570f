"""`slipstream verify`."""

from __future__ import annotations

import json

import pytest

QUICK = ["-n", "8", "--samples", "60", "--law-prompts", "1", "-k", "3"]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"for name in names{i}:\n"}) for i in range(2)))
    return path


def test_the_report_for_people(cli, pair, texts, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    result = cli("verify", texts, *pair, *QUICK, "--out", out, "--page", page)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("control, no drafter", "greedy texts", "sampled texts of one seed", "the target's own law",
                 "No bug found in model, K=3, rule rejection: 4 of 4 texts identical", "bias"):  # fmt: skip
        assert part in said
    assert max(map(len, result.out.splitlines())) <= 80
    assert json.loads(out.read_text())["kind"] == "verify"
    assert "Does speculation change what the target says?" in page.read_text()


def test_json_for_programs(cli, pair, texts):
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy", "--drafter", "ngram", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["data"]["verdict"] == "ok"
    assert [row["verdict"] for row in found["data"]["greedy"]] == ["identical"] * 2
    assert found["data"]["law"] == found["data"]["coupled"] == []
    assert found["settings"]["drafter"] == "ngram"


def test_a_bug_ends_with_code_1(cli, pair, texts, monkeypatch):
    from slipstream.core import step
    from slipstream.core.rules import follow

    def wrong(draft, picks):
        return follow(draft, [pick ^ 1 for pick in picks] if len(draft) else picks)

    monkeypatch.setattr(step, "follow", wrong)
    result = cli("verify", texts, *pair, *QUICK, "--check", "greedy")
    assert result.code == 1
    assert "BUG: model, K=3, rule rejection changes what the target says" in result.out


def test_ctrl_c_keeps_what_was_checked(cli, pair, texts, tmp_path, monkeypatch):
    from slipstream.lab import verification as lab

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "cells", stop)
    result = cli("verify", texts, *pair, *QUICK, "--out", tmp_path / "r.json")
    assert result.code == 130
    assert "the run was interrupted" in result.said
    kept = json.loads((tmp_path / "r.json").read_text())
    assert (kept["complete"], len(kept["data"]["coupled"]), kept["data"]["law"]) == (False, 2, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", "gredy"], "did you mean 'greedy'"),
        (["--drafter", "none"], "there is no drafter to check"),
        (["--drafter", "ngrm"], "did you mean 'ngram'"),
        (["--rule", "rejektion"], "did you mean 'rejection'"),
        (["--out", "/nonexistent/r.json"], "the folder /nonexistent does not exist"),
        (["--level", "2"], "level is 2.0"),
        (["nowhere.jsonl"], "there is no prompt file 'nowhere.jsonl'"),
    ],
)
def test_bad_input_is_one_clear_error(cli, pair, texts, arguments, said):
    source = [] if arguments[0] == "nowhere.jsonl" else [texts]
    result = cli("verify", *source, *pair, *QUICK, *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.said
    assert result.err.count("error:") == 1


def test_an_empty_prompt_file_and_a_result_of_another_version(cli, pair, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no prompt" in cli("verify", tmp_path / "empty.jsonl", *pair).said
    (tmp_path / "old.json").write_text(json.dumps({"format": "slipstream-lab", "format_version": 0}))
    result = cli("report", tmp_path / "old.json", "-o", tmp_path / "page.html")
    assert (result.code, "format version 0" in result.said) == (2, True)
