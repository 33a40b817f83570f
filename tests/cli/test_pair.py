"""`slipstream info TARGET DRAFT`."""

from __future__ import annotations

import json

from tests.checkpoints import OTHER_TEXTS, make_model, make_tokenizer


def test_a_pair_of_compatible_models(cli, tiny, tmp_path):
    make_model(tmp_path, num_hidden_layers=8)
    make_tokenizer(tmp_path)
    result = cli("info", tmp_path, tiny.draft)
    said = " ".join(result.out.split())
    assert result.code == 0
    assert "The models are compatible: all 316 common token ids agree." in said
    assert "target steps" in said
    assert "at 80% acceptance: 1." in said
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads(cli("info", tmp_path, tiny.draft, "--json").out)
    assert (found["fits"], found["differing_ids"], found["measured"]) == (True, 0, [])


def test_a_pair_of_incompatible_models(cli, tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    result = cli("info", tiny.target, tmp_path)
    assert result.code == 1
    said = " ".join(result.out.split())
    assert "do not share a vocabulary" in said
    assert "with --draft-tokenizer intersection or string the draft model keeps its tokenizer: 2" in said
    assert "tokens are shared" in said
    found = json.loads(cli("info", tiny.target, tmp_path, "--json").out)
    assert found["fits"] is False
    assert len(found["differences"]) == 5


def test_a_pair_is_measured(cli, tiny, monkeypatch):
    monkeypatch.setattr("slipstream.cli.info.PASSES", 1)
    monkeypatch.setattr("slipstream.cli.info.TOKENS", 8)
    found = json.loads(cli("info", tiny.target, tiny.draft, "--measure", "--json").out)
    plain, speculative = found["measured"]
    assert speculative["draft_tokens"] == 4
    assert (plain["method"], plain["speedup"]["value"]) == ("plain", 1.0)
    assert 0 < speculative["stats"]["acceptance_rate"] < 1
    assert speculative["lossless"] is True


def test_another_target_of_the_same_draft_is_measured_beside(cli, tiny, tmp_path, monkeypatch):
    """For example the target, quantised: both acceptance rates are in one table."""
    monkeypatch.setattr("slipstream.cli.info.PASSES", 1)
    monkeypatch.setattr("slipstream.cli.info.TOKENS", 8)
    other = tmp_path / "disturbed"
    make_model(other, noise=0.05)
    make_tokenizer(other)
    command = ["info", tiny.target, tiny.draft, "--measure", "--also", other]
    found = json.loads(cli(*command, "--json").out)["measured"]
    assert [run["target"] for run in found] == [str(tiny.target)] * 2 + [str(other)] * 2
    assert [run["method"] for run in found] == ["plain", "draft model"] * 2
    rates = [run["stats"]["acceptance_rate"] for run in found[1::2]]
    assert 0 < rates[0] < rates[1] == 1.0, "the other target has the weights of the draft"
    shown = cli(*command).out
    assert "disturb" in shown
    assert "100%" in shown
    formats = [*command[:-1], "quantize=int8", "--also", "draft_quantize=int8", "--json"]
    found = json.loads(cli(*formats).out)["measured"]
    assert [run["target"] for run in found[1::2]] == [str(tiny.target), "quantize=int8", "draft_quantize=int8"]
    refused = cli("info", tiny.target, tiny.draft, "--also", other)
    assert refused.code == 2
