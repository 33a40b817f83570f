"""`slipstream info`."""

import json

import pytest

from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.cli.info import positions
from slipstream.errors import CheckpointError
from tests.heads.tiny_mtp import write
from tests.targets.huggingface.architectures import random_model
from tests.targets.huggingface.encoder_decoders import make_encoder_decoder
from tests.tiny_checkpoints import OTHER_TEXTS, make_model, make_tokenizer


def test_info_for_people_and_programs(cli, tiny):
    shown = cli("info", tiny.target, code=0).shown
    for part in (
        "llama, 2 layers of width 48", "67.8k", "271.3 kB in F32", "padded to 320 ids", "192 tokens",
        "chat template yes", "drafters all", "KV cache 98.3 kB for 192 tokens of all requests free after that",
    ):  # fmt: skip
        assert part in shown
    output = json.loads(cli("info", tiny.target, "--json").out)
    assert (output["parameters"], output["vocab_size"], output["tied_head"]) == (67824, 320, False)
    assert (output["kv_bytes_per_token"], output["experts"], output["sliding_window"]) == (512, None, [])


@pytest.mark.parametrize("has", [True, False], ids=["with instructions", "without"])
def test_info_shows_the_backend_and_which_settings_it_supports(cli, tiny, monkeypatch, has):
    for name in ("has_byte_dots", "has_bfloat16_dots", "converts_half"):
        monkeypatch.setattr(f"slipstream.backends.native.kernels.processor.{name}", lambda: has)
    monkeypatch.setattr("slipstream.backends.native.kernels.processor.is_arm", lambda: False)
    output = json.loads(cli("info", tiny.target, "--json").out)
    shown = cli("info", tiny.target).shown
    assert (output["executor"], output["not_native"]) == ("native", None)
    native = output["native"]
    known = {*(f"quantize {name}" for name in QUANTISED), "dtype bfloat16", "kv_dtype float16", "kv_dtype q8_0"}
    assert native["settings"].keys() == known
    assert native["settings"]["quantize w8a8"] is None
    assert native["int8_products"].startswith("VNNI" if has else "none")
    assert (native["settings"]["dtype bfloat16"] is None) == has
    for part in (
        "executor native on cpu",
        "int8 products VNNI" if has else "int8 products none (16-bit products instead, slower)",
        "quantize w8a8 supported",
        "kv_dtype q8_0 supported" if has else "kv_dtype q8_0 not supported: this processor has no instructions for flo",
        "dtype bfloat16 supported" if has else "dtype bfloat16 not supported: this processor has no bfloat16 products",
    ):
        assert part in shown


def test_info_says_why_a_model_is_not_native(cli, tmp_path):
    make_model(tmp_path, head_dim=12)
    make_tokenizer(tmp_path)
    output = json.loads(cli("info", tmp_path, "--json").out)
    assert (output["executor"], output["native"]) == ("torch", None)
    assert "torch on cpu; not native: the size of its heads is 12, not a multiple of 16" in cli("info", tmp_path).shown


def test_info_shows_what_mtp_layers_take(cli, tmp_path):
    output = json.loads(cli("info", write("glm4_moe", tmp_path, 2), "--json").out)
    assert output["mtp_kv_bytes_per_token"] == output["kv_bytes_per_token"] == 256  # two layers, as the target has
    assert "256 B of KV for each token" in cli("info", tmp_path).shown


def test_info_shows_what_an_mtp_layer_on_our_own_kernels_takes(cli, tmp_path):
    place = write("glm4_moe", tmp_path, head_dim=16)
    output = json.loads(cli("info", place, "--json").out)
    assert output["mtp_kv_bytes_per_token"] == output["kv_bytes_per_token"] / 2  # of one layer
    assert 0 < output["mtp_bytes"] < output["loaded_bytes"]
    assert "mtp" in output["drafters"]


def test_info_of_the_embedded_model(cli, refused, embedded, monkeypatch):
    assert json.loads(cli("info", "--json").out)["folder"] == str(embedded.target)

    def missing():
        raise CheckpointError("the embedded target is missing", fix="reinstall slipstream")

    monkeypatch.setattr("slipstream.zoo.target_dir", missing)
    assert refused("info") == "error: the embedded target is missing. Fix: reinstall slipstream."


def test_info_says_that_transformers_runs_a_model(cli, tmp_path):
    random_model("stablelm").save_pretrained(tmp_path)
    output = json.loads(cli("info", tmp_path, "--json").out)
    assert (output["architecture"], output["executor"], output["layers"], output["native"]) == (
        "stablelm", "transformers", 2, None,
    )  # fmt: skip
    assert "transformers on cpu" in cli("info", tmp_path).out


def test_rotary_parameters_by_kind_of_layer_are_shown() -> None:
    """Gemma 3 and 4."""
    rope = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip
    assert positions({"position": "rope", "rope": rope}) == (
        "rotary, theta 1e+06, scaled linear by 8 (full_attention); rotary, theta 10000 (sliding_attention)"
    )


def test_a_pair_of_compatible_models(cli, tiny, tmp_path):
    make_model(tmp_path, num_hidden_layers=8)
    make_tokenizer(tmp_path)
    result = cli("info", tmp_path, tiny.draft, code=0)
    assert "The models are compatible: all 316 common token ids agree." in result.shown
    assert "`slipstream simulate -m TARGET -md DRAFT` predicts the speed-up" in result.shown
    assert "KV cache 491.5 kB for 192 tokens of all requests free after that" in result.shown
    assert result.width <= 80
    output = json.loads(cli("info", tmp_path, tiny.draft, "--json").out)
    assert (output["fits"], output["differing_ids"]) == (True, 0)
    for side, model in (("target", tmp_path), ("draft", tiny.draft)):
        alone = json.loads(cli("info", model, "--json").out)
        alone.pop("memory")
        assert output[side] == alone


def test_a_pair_of_incompatible_models(cli, tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    shown = cli("info", tiny.target, tmp_path, code=1).shown
    assert "do not share a vocabulary" in shown
    assert "with --draft-tokenizer string the draft model keeps its tokenizer: 2" in shown
    assert "tokens are shared" in shown
    output = json.loads(cli("info", tiny.target, tmp_path, "--json").out)
    assert output["fits"] is False
    assert len(output["differences"]) == 5


def test_an_encoder_decoder_is_described_and_is_no_pair_with_a_decoder(cli, refused, tmp_path):
    whole, decoder = tmp_path / "whole", tmp_path / "decoder"
    whole.mkdir()
    make_encoder_decoder(whole)
    make_model(decoder)
    make_tokenizer(decoder)
    assert "no bound, read once" in cli("info", whole).out
    output = json.loads(cli("info", whole, "--json").out)
    assert (output["source_context"] > 10**6, output["executor"]) == (True, "transformers")
    assert json.loads(cli("info", decoder, "--json").out)["source_context"] is None
    shown = cli("info", decoder, whole).shown
    assert "the target is a decoder, but the draft model is an encoder-decoder" in shown
    assert "--draft-tokenizer" not in shown
    (decoder / "model.safetensors").write_bytes(b"")  # weights are not read
    said = refused("generate", "x", "-m", whole, "-md", decoder)
    assert "the target is an encoder-decoder, but the draft model is a decoder" in said
