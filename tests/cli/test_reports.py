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
        "67.8k",
        "271.3 kB in F32",
        "padded to 320 ids",
        "192 tokens",
        "chat template yes",
    ):
        assert part in said
    found = json.loads(cli("info", tiny.target, "--json").out)
    assert (found["parameters"], found["vocab_size"], found["tied_head"]) == (67824, 320, False)
    assert (found["kv_bytes_per_token"], found["experts"], found["sliding_window"]) == (512, None, [])


@pytest.mark.parametrize("has", [True, False], ids=["with instructions", "without"])
def test_info_says_what_runs_the_model_and_what_each_setting_changes(cli, tiny, monkeypatch, has):
    for name in ("has_byte_dots", "has_bfloat16_dots"):
        monkeypatch.setattr(f"slipstream.backends.native.kernels.processor.{name}", lambda: has)
    monkeypatch.setattr("slipstream.backends.native.kernels.processor.is_arm", lambda: False)
    found = json.loads(cli("info", tiny.target, "--json").out)
    said = " ".join(cli("info", tiny.target).out.split())
    assert (found["executor"], found["not_native"]) == ("native", None)
    native = found["native"]
    assert native["distances"].keys() == {"w8a16", "w8a8", "bfloat16", "float16 KV"}
    assert native["distances"]["w8a16"] == {"kl": 1.7e-4, "agreement": 0.9933 if has else 0.9938, "refused": None}
    assert native["distances"]["w8a8"]["kl"] == (3.7e-4 if has else 1.7e-4)
    assert native["int8_products"].startswith("VNNI" if has else "none")
    assert native["bfloat16_products"].startswith("AVX-512 BF16" if has else "none")
    assert (native["distances"]["bfloat16"]["refused"] is None) == has
    for part in (
        "executor native on cpu",
        "int8 products VNNI" if has else "int8 products none (16-bit products instead, slower)",
        "quantize w8a8 KL 3.7e-04 nats a token" if has else "quantize w8a8 KL 1.7e-04 nats a token",
        "dtype bfloat16 KL 2.0e-05" if has else "dtype bfloat16 not here: this processor has no bfloat16 products",
        "kv-dtype float16 KL 6.0e-08 nats a token, argmax agreement 99.98 %",
        "4,642 rows of the embedded target's held-out prompts, against float64",
    ):
        assert part in said


def test_info_says_why_a_model_is_not_native(cli, tmp_path):
    make_model(tmp_path, head_dim=12)
    make_tokenizer(tmp_path)
    found = json.loads(cli("info", tmp_path, "--json").out)
    assert (found["executor"], found["native"]) == ("torch", None)
    said = " ".join(cli("info", tmp_path).out.split())
    assert "torch on cpu; not native: heads of 12 values are not a multiple of 16" in said


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
