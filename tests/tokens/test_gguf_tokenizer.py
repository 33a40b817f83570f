"""Tokenizers of GGUF files that hold no tokenizer.json: BOS, ends, words, chat templates, as llama.cpp has them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.llamacpp_library import llama_cpp
from slipstream.errors import LoadError
from slipstream.tokens.gguf_tokenizer import SAME_SPLIT
from slipstream.tokens.text import load_tokenizer
from slipstream.tokens.token_map import has_chat_template
from tests.checkpoints.gguf_files import byte_level_keys
from tests.checkpoints.odd_gguf_files import write

TEMPLATE = "tokenizer.chat_template"
BOS, EOS = 262, 263
TEXT = "It's 1234567, \n\n  hello x"


@pytest.mark.parametrize(
    ("pre", "given", "before", "after"),
    [
        ("llama-bpe", {}, [BOS], []), ("llama3", {}, [BOS], []), ("llama-bpe", {"add_bos_token": False}, [], []),
        ("qwen2", {}, [], []), ("qwen2", {"add_bos_token": True}, [BOS], []), ("dbrx", {}, [], []),
        ("glm4", {}, [], []), ("qwen2", {"add_eos_token": True}, [], [EOS]),
        ("llama-bpe", {"bos_token_id": None}, [11], []),
        ("llama-bpe", {"bos_token_id": 1000, "add_eos_token": True}, [11], [EOS]),
    ],
)  # fmt: skip
def test_bos_and_eos_are_put_where_llamacpp_puts_them(pre, given, before, after, tmp_path):
    keys = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", **{"tokenizer.ggml.pre": pre}, **keys))
    assert tokenizer.encode("ab") == [*before, 97, 98, *after]
    assert tokenizer.encode("ab", add_special_tokens=False) == [97, 98]


@pytest.mark.parametrize(
    ("pre", "ids"), [("llama-bpe", [260]), ("falcon3", [260]), ("qwen2", [32, 259]), ("glm4", [260])]
)
def test_whole_words_come_before_merges_where_llamacpp_ignores_merges(pre: str, ids: list[int], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", **{"tokenizer.ggml.pre": pre}))
    assert tokenizer.encode(" hello", add_special_tokens=False) == ids


def test_names_that_mean_the_same_split_a_text_in_the_same_way(tmp_path: Path) -> None:
    def ids(pre: str) -> list[int]:
        keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": None, "tokenizer.ggml.merges": None}
        merged = byte_level_keys(pre, ("12", "123", "n\u010a", "'s", ",Ġ"), ("1 2", "12 3", "n \u010a", "' s", ", Ġ"))
        file = write(tmp_path / "a.gguf", **keys | merged)
        return load_tokenizer(file).encode(TEXT, add_special_tokens=False)  # type: ignore[no-any-return]

    assert len({tuple(ids(pre)) for pre in set(SAME_SPLIT.values())}) > 2
    for name, split in SAME_SPLIT.items():
        assert ids(name) == ids(split), name


@pytest.mark.parametrize(
    ("special", "eos", "ends"),
    [
        ("<s> <|end_of_text|> <|eot_id|>", "<|end_of_text|>", "<|end_of_text|> <|eot_id|>"),
        ("<|endoftext|> <|im_start|> <|im_end|> <|fim_pad|> <|fim_prefix|>", "<|im_end|>",
         "<|endoftext|> <|im_end|> <|fim_pad|>"),
        ("<|call|> <|end|>", "<|end|>", "<|call|> <|end|>"),
        ("<e> </s>", None, "</s>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ordinary", [False, True])
def test_texts_end_at_tokens_that_llamacpp_knows_by_name(special, eos, ends, ordinary, tmp_path):
    """Whatever their type: those that the file calls ordinary are control tokens, too."""
    keys = byte_level_keys("qwen2", special=special.split(), bos=special.split()[0], **({"eos": eos} if eos else {}))
    if ordinary:
        keys["tokenizer.ggml.token_type"] = [1] * 300
    file = write(tmp_path / "a.gguf", **keys)
    tokenizer, wanted = load_tokenizer(file), [256 + special.split().index(text) for text in ends.split()]
    assert sorted(DecoderConfig.load(file).eos_ids) == sorted(wanted)
    assert tokenizer.encode(f"a{ends.split()[0]}b") == [97, wanted[0], 98]
    assert tokenizer.decode([97, *wanted, 98], skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    ("given", "plain", "tools"),
    [
        ({TEMPLATE: "plain", f"{TEMPLATE}.tool_use": "tools"}, "plain", "tools"),
        ({TEMPLATE: "plain"}, "plain", "plain"),
        ({TEMPLATE: "plain", f"{TEMPLATE}.rag": "rag", "tokenizer.chat_templates": ["rag"]}, "plain", "plain"),
        ({f"{TEMPLATE}.tool_use": "tools"}, None, "tools"),
    ],
)  # fmt: skip
def test_the_template_for_tools_is_taken_where_a_conversation_has_tools(given, plain, tools, tmp_path):
    file = write(tmp_path / "a.gguf", **given)
    tokenizer, chat = load_tokenizer(file), [{"role": "user", "content": "hi"}]
    more: dict[str, Any] = {"tokenize": False, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert has_chat_template(Checkpoint.open(file))
    assert tokenizer.apply_chat_template(chat, **more) == tools
    if plain is not None:
        assert tokenizer.apply_chat_template(chat, tokenize=False) == plain
    assert tokenizer.transformers.apply_chat_template(chat, **more) == tools


def test_an_unknown_splitting_is_named_where_llamacpp_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_cpp.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(
        LoadError, match=r"the tokenizer of a\.gguf \(gpt2, tekken\) is read by llama\.cpp: llama-cpp-python"
    ):
        load_tokenizer(write(tmp_path / "a.gguf", **{"tokenizer.ggml.pre": "tekken"}))
    llama_cpp.cache_clear()


def test_two_tokens_of_one_text_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", **{"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None})
    with pytest.raises(LoadError, match="2 of its tokens are 'a'"):
        load_tokenizer(file)
    assert read_header(file).has_tokenizer
