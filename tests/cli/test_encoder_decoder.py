"""Commands on the folder of an encoder-decoder."""

import json
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from tests.checkpoints import make_model, make_tokenizer
from tests.targets.huggingface.encoder_decoders import make_encoder_decoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, a draft model for it, and a decoder with the same tokenizer."""
    target, draft, decoder = (tmp_path_factory.mktemp(name) for name in ("target", "draft", "decoder"))
    make_encoder_decoder(target)
    make_encoder_decoder(draft, layers=1)
    make_model(decoder)
    make_tokenizer(decoder)
    return target, draft, decoder


def test_generate_answers_the_prompt(cli, folders):
    target, draft, _ = folders
    result = cli("generate", "def add(", "-n", "6", "-m", target, "-md", draft, "--dtype", "float64", "-k", "2")
    assert result.code == 0
    [wanted] = LLM(target, dtype="float64").generate(["def add("], SamplingParams(max_tokens=6))
    assert result.out.rstrip("\n") == wanted.text.rstrip("\n")


def test_info_shows_both_parts(cli, folders):
    result = cli("info", folders[0])
    assert "no bound, read once" in result.out
    output = json.loads(cli("info", folders[0], "--json").out)
    assert output["source_context"] > 10**6
    assert output["executor"] == "transformers"
    assert json.loads(cli("info", folders[2], "--json").out)["source_context"] is None


def test_pairs_of_two_kinds_are_refused_before_weights_are_read(cli, folders):
    target, draft, decoder = folders
    shown = cli("info", decoder, draft)
    assert "the target is a decoder, the draft model is an encoder-decoder" in " ".join(shown.out.split())
    assert "--draft-tokenizer" not in shown.out
    weights = decoder / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(b"")
        result = cli("generate", "x", "-m", target, "-md", decoder)
        assert result.code == 2
        assert "the target is an encoder-decoder, the draft model is a decoder" in result.said
    finally:
        weights.write_bytes(kept)


def test_a_chat_without_a_template_is_refused_by_name(cli, folders):
    assert "no chat template" in cli("generate", "--chat", "x", "-m", folders[0]).said
