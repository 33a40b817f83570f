"""`slipstream info`, `check-pair` and `demo`."""

from __future__ import annotations

import json

import pytest

from slipstream.errors import CheckpointError
from slipstream.llm import LLM
from tests.checkpoints import OTHER_TEXTS, Tiny, make_model, make_tokenizer


@pytest.fixture
def embedded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The tiny pair in place of the embedded models."""
    monkeypatch.setattr("slipstream.zoo.target_dir", lambda: tiny.target)
    monkeypatch.setattr("slipstream.zoo.draft_dir", lambda: tiny.draft)
    return tiny


def test_info_for_people_and_programs(cli, tiny):
    result = cli("info", tiny.target)
    assert result.code == 0
    said = " ".join(result.out.split())
    for part in (
        "llama, 2 layers of width 48",
        "63.2k",
        "252.9 kB in F32",
        "padded to 320 ids",
        "192 tokens",
        "chat template yes",
    ):
        assert part in said
    found = json.loads(cli("info", tiny.target, "--json").out)
    assert (found["parameters"], found["vocab_size"], found["tied_head"]) == (63216, 320, False)
    assert (found["kv_bytes_per_token"], found["experts"], found["sliding_window"]) == (384, None, [])


def test_info_of_the_embedded_model(cli, embedded, monkeypatch):
    assert json.loads(cli("info", "--json").out)["folder"] == str(embedded.target)

    def missing():
        raise CheckpointError("the embedded target is missing", fix="reinstall slipstream")

    monkeypatch.setattr("slipstream.zoo.target_dir", missing)
    result = cli("info")
    assert (result.code, result.said) == (2, "error: the embedded target is missing. Fix: reinstall slipstream.")


def test_check_pair_of_models_that_fit(cli, tiny, tmp_path):
    make_model(tmp_path, num_hidden_layers=8)
    make_tokenizer(tmp_path)
    result = cli("check-pair", tmp_path, tiny.draft)
    said = " ".join(result.out.split())
    assert result.code == 0
    assert "The pair fits: all 316 common token ids agree." in said
    assert "target steps" in said
    assert "at 80% acceptance: 1." in said
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads(cli("check-pair", tmp_path, tiny.draft, "--json").out)
    assert (found["fits"], found["differing_ids"], found["measured"]) == (True, 0, [])


def test_check_pair_of_models_that_do_not(cli, tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    result = cli("check-pair", tiny.target, tmp_path)
    assert result.code == 1
    assert "do not share a vocabulary" in " ".join(result.out.split())
    found = json.loads(cli("check-pair", tiny.target, tmp_path, "--json").out)
    assert found["fits"] is False
    assert len(found["differences"]) == 5


def test_check_pair_measures(cli, tiny, monkeypatch):
    monkeypatch.setattr("slipstream.cli.check_pair.ROUNDS", 1)
    monkeypatch.setattr("slipstream.cli.check_pair.TOKENS", 8)
    found = json.loads(cli("check-pair", tiny.target, tiny.draft, "--measure", "--json").out)
    plain, speculative = found["measured"]
    assert speculative["draft_tokens"] == 4
    assert (plain["method"], plain["speedup"]["value"]) == ("plain", 1.0)
    assert 0 < speculative["stats"]["acceptance_rate"] < 1
    assert speculative["lossless"] is True


DEMO = ["demo", "-n", "12", "--prompts", "1", "--rounds", "2", "--executor", "torch", "--dtype", "float64"]


def test_the_demo_shows_text_and_one_table(cli, embedded):
    result = cli(*DEMO)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in (
        "Continue 1 of 1:", "Edit 1 of 1:", "s plain; token-identical]", "tokens/s",
        "speed-up", "accept", "mean", "lossless", "draft model, K=4", "n-gram, K=10",
        "Every speculative text is token-identical to plain decoding.",
    ):  # fmt: skip
        assert part in said
    table = result.out[result.out.index("task") :]
    assert max(map(len, table.splitlines())) <= 80
    assert "NO" not in table
    assert "\x1b" not in result.out
    assert "SD ACTIVE method=model" in result.said


def test_the_demo_as_json(cli, embedded):
    result = cli(*DEMO, "--json")
    found = json.loads(result.out)
    assert [m["method"] for m in found["edit"]] == ["plain", "draft model", "n-gram"]
    assert all(m["token_identical"] and m["lossless"] for group in found.values() for m in group)


def test_the_demo_fails_loudly_where_texts_differ(cli, embedded, monkeypatch):
    generate, calls = LLM.generate, []

    def wrong(self, prompts, params=None):
        done = generate(self, prompts, params)
        calls.append(1)
        if self.drafter.name == "model":
            done[0].token_ids[5] ^= 1
        return done

    monkeypatch.setattr(LLM, "generate", wrong)
    result = cli(*DEMO)
    assert result.code == 1
    assert "NO" in result.out
    assert "draft model, code prompt 1, token 5: the target's two best logits are" in " ".join(result.out.split())
    assert "this is a bug" in " ".join(result.out.split())
