"""`slipstream sweep`."""

from __future__ import annotations

import json

QUICK = ["code", "-n", "6", "--rounds", "2", "--prompts", "2"]


def test_draft_lengths_with_predictions_and_a_page(cli, pair, tmp_path):
    given = ["--draft-tokens", "2:4", "--out", tmp_path / "s.json", "--page", tmp_path / "s.html"]
    result = cli("sweep", *QUICK, *pair, *given)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("K accept tau tok/s speed-up (95%) predicted", "plain"):
        assert part in said
    assert "Fastest: K=" in said or "The least slow one: K=" in said
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads((tmp_path / "s.json").read_text())
    assert [arm["values"].get("draft_tokens") for arm in found["data"]["arms"]] == [None, 2, 3, 4]
    assert "Speed-up by draft length K" in (tmp_path / "s.html").read_text()


def test_every_other_axis(cli, pair, tmp_path):
    axes = ["--drafter", "ngram", "--option", "max_ngram=2,3", "--temperature", "0,1", "--batch", "1:2", "--json"]
    result = cli("sweep", *QUICK, *pair, *axes)
    assert result.code == 0, result.err
    arms = json.loads(result.out)["data"]["arms"]
    assert sum(arm["plain"] for arm in arms) == 4
    assert {tuple(arm["values"].values()) for arm in arms if not arm["plain"]} == {
        (t, b, n) for t in (0.0, 1.0) for b in (1, 2) for n in (2, 3)
    }


def test_dtypes_have_engines_of_their_own(cli, tiny):
    models = ["-m", tiny.target, "-md", tiny.draft, "--executor", "torch", "--device", "cpu"]
    result = cli("sweep", *QUICK, *models, "--dtype", "float32,float64", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert sorted(found["data"]["costs"]) == ["float32", "float64"]
    assert [arm["values"].get("dtype") for arm in found["data"]["arms"]] == [None, "float32", None, "float64"]
