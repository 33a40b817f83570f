"""`slipstream info`."""

import json

import pytest

from slipstream.errors import CheckpointError
from slipstream.plan.support_matrix import page
from slipstream.settings import WEIGHT_FORMATS
from tests.checkpoints import make_model, make_tokenizer
from tests.targets.huggingface.architectures import random_model


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
        "drafters all",
    ):
        assert part in said
    found = json.loads(cli("info", tiny.target, "--json").out)
    assert (found["parameters"], found["vocab_size"], found["tied_head"]) == (67824, 320, False)
    assert (found["kv_bytes_per_token"], found["experts"], found["sliding_window"]) == (512, None, [])


@pytest.mark.parametrize("has", [True, False], ids=["with instructions", "without"])
def test_info_shows_the_backend_and_the_effect_of_each_setting(cli, tiny, monkeypatch, has):
    for name in ("has_byte_dots", "has_bfloat16_dots"):
        monkeypatch.setattr(f"slipstream.backends.native.kernels.processor.{name}", lambda: has)
    monkeypatch.setattr("slipstream.backends.native.kernels.processor.is_arm", lambda: False)
    found = json.loads(cli("info", tiny.target, "--json").out)
    said = " ".join(cli("info", tiny.target).out.split())
    assert (found["executor"], found["not_native"]) == ("native", None)
    native = found["native"]
    assert native["distances"].keys() == {*WEIGHT_FORMATS, "bfloat16", "float16 KV"}
    assert native["distances"]["w8a16"] == {"kl": 1.7e-4, "agreement": 0.9933 if has else 0.9938, "refused": None}
    assert native["distances"]["w8a8"]["kl"] == (3.7e-4 if has else 1.7e-4)
    assert native["int8_products"].startswith("VNNI" if has else "none")
    assert native["bfloat16_products"].startswith("AVX-512 BF16" if has else "none")
    assert (native["distances"]["bfloat16"]["refused"] is None) == has
    for part in (
        "executor native on cpu",
        "int8 products VNNI" if has else "int8 products none (16-bit products instead, slower)",
        "quantize w8a8 KL 3.7e-04 nats per token" if has else "quantize w8a8 KL 1.7e-04 nats per token",
        "dtype bfloat16 KL 2.0e-05" if has else "dtype bfloat16 not supported: this processor has no bfloat16 products",
        "kv-dtype float16 KL 6.0e-08 nats per token, argmax agreement 99.98 %",
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


def test_info_shows_what_works_with_what(cli):
    assert cli("info", "--matrix").out == page()


def test_info_says_that_transformers_runs_a_model(cli, tmp_path):
    random_model("stablelm").save_pretrained(tmp_path)
    found = json.loads(cli("info", tmp_path, "--json").out)
    assert (found["architecture"], found["executor"], found["layers"], found["native"]) == (
        "stablelm", "transformers", 2, None,
    )  # fmt: skip
    assert "transformers on cpu" in cli("info", tmp_path).out
