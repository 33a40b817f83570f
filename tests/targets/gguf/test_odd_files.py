"""Odd GGUF files under both executors: our own decoder reads each as llama.cpp does, or refuses it by name."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.llamacpp_library import LlamaModel
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.tokens.gguf_tokenizer import SAME_SPLIT, GgufTokenizer
from slipstream.tokens.text import load_tokenizer
from tests.checkpoints.odd_gguf_files import DIVISORS, ODD, added, write

pytest.importorskip("llama_cpp")

PROMPTS = [list(range(5, 45)), [7, 8, 7, 8]]
TEXTS = (
    " hello", "hello hellohell It's 1234567, \n\n  x!", "",
    "<|im_end|>don't DON'T<s>  <|fim_pad|>\r\n\té 日本 🎈 ½ … ...",
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def seen(file: Path, **settings: Any) -> tuple[list[list[int]], list[int]]:
    """Greedy texts, and the ids that end a text."""
    llm = LLM(file, threads=1, **settings)
    return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)], sorted(llm.target.capabilities.eos_ids)


def assert_same_tokens(file: Path) -> None:
    """Our own tokenizer encodes and decodes as llama.cpp does."""
    own, reference = load_tokenizer(file), GgufTokenizer(LlamaModel(read_header(file), vocab_only=True))
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == reference.encode(text), text
        for skip in (False, True):
            assert own.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ODD)
def test_our_own_decoder_reads_an_odd_file_as_llamacpp_does(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "odd.gguf", **ODD[name])
    assert seen(file, executor="torch") == seen(file, executor="llamacpp", kv_dtype="float32")
    assert_same_tokens(file)


@pytest.mark.parametrize("pre", SAME_SPLIT)
def test_a_name_of_a_splitting_means_what_it_means_to_llamacpp(pre: str, tmp_path: Path) -> None:
    try:
        assert_same_tokens(write(tmp_path / "a.gguf", **{"tokenizer.ggml.pre": pre}))
    except UnsupportedModelError as refused:
        assert "unknown pre-tokenizer" in str(refused)  # noqa: PT017 - an older llama.cpp
        pytest.skip(str(refused))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("attn_q.bias is F16", {"change": added("attn_q"), "kinds": {"blk.1.attn_q.bias": "F16"}}),
        ("of its tokens are 'a'", {"tokenizer.ggml.tokens": ["a\0b", "a\0c"], "tokenizer.ggml.token_type": None}),
        ("of its tokens are 'a'", {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None}),
        ("value_length", {"llama.attention.value_length": 8}),
        ("rope.dimension_count", {"llama.rope.dimension_count": 8}), ("experts", {"llama.expert_count": 4}),
        ("experts", {"llama.expert_used_count": 2}), ("groups", {"llama.expert_group_count": 2}),
        ("further tokens", {"llama.nextn_predict_layers": 3}), ("scaling.type", {"llama.rope.scaling.type": "dynamic"}),
        ("rope_freqs", {"change": lambda tensors: tensors | {"rope_freqs.weight": DIVISORS},
                        "kinds": {"rope_freqs.weight": "F16"}}),
        ("bos", {"tokenizer.ggml.pre": "chatglm-bpe", "tokenizer.ggml.bos_token_id": None,
                 "tokenizer.ggml.add_bos_token": True}),
    ],
)  # fmt: skip
def test_what_would_end_the_process_of_llamacpp_is_refused_by_name(name, settings, tmp_path):
    with pytest.raises(CheckpointError, match=name):
        LLM(write(tmp_path / "a.gguf", **settings), executor="llamacpp", threads=1)


def test_ids_outside_of_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = GgufTokenizer(LlamaModel(read_header(write(tmp_path / "a.gguf")), vocab_only=True))
    assert tokenizer.decode([97, 300, -1, 98]) == "ab"
