"""`slipstream doctor`."""

from __future__ import annotations

import json

QUICK = ["-n", "8", "--rounds", "1"]


def test_the_report_for_people(cli, pair, texts, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    result = cli("doctor", texts, *pair, *QUICK, "--out", out, "--page", page)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("predicted from the parts", "plain step", "break-even acceptance", "rows per pass 1 2 4 8 16 32 64",
                 "nothing removed", "draft too expensive", "host overhead"):  # fmt: skip
        assert part in said
    assert any(verdict in said for verdict in ("Cause: ", "Nothing is wrong: ", "Not diagnosed: "))
    found = json.loads(out.read_text())
    assert found["data"]["measured"]["costs"]["rows"][-1] == 64
    assert found["data"]["diagnosis"]["counterfactuals"]
    assert "Why is it slow?" in page.read_text()


def test_json_for_programs(cli, pair, texts):
    result = cli("doctor", texts, *pair, *QUICK, "--drafter", "ngram:max_ngram=2", "-k", "3", "--batch", "2", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["settings"]["contender"] == "ngram max_ngram=2"
    assert (found["data"]["measured"]["batch"], found["data"]["measured"]["draft_tokens"]) == (2, 3)


def test_ctrl_c_keeps_what_was_measured(cli, pair, texts, tmp_path, monkeypatch):
    from slipstream.bench import measure

    timed, calls = measure._timed, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        timed(*given)

    monkeypatch.setattr(measure, "_timed", interrupted)
    result = cli("doctor", texts, *pair, "-n", "8", "--rounds", "3", "--out", tmp_path / "r.json")
    assert result.code == 130
    assert "the run was interrupted" in result.said
    kept = json.loads((tmp_path / "r.json").read_text())
    assert (kept["complete"], "diagnosis" in kept["data"]) == (False, True)
