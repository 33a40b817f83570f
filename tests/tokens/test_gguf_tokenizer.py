"""Tokenizers of GGUF files that hold no tokenizer.json: BOS, ends, words, merges, templates, as llama.cpp has them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer as Backend, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_header import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, read_header
from slipstream.errors import LoadError
from slipstream.tokens.gguf_tokenizer import SAME_SPLIT, SPLITS
from slipstream.tokens.text import load_tokenizer
from slipstream.tokens.token_map import has_chat_template
from slipstream.tokens.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import byte_level_keys
from tests.checkpoints.odd_gguf_files import write
from tests.tokens.tokenizer_kinds import BYTES, sentencepiece

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


@pytest.mark.parametrize(("kind", "pre"), [("gpt2", "another"), ("t5", "default"), ("bert", "jina-v2-en")])
def test_an_unknown_kind_is_refused_by_name_with_what_to_do(kind: str, pre: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=rf"a\.gguf has a tokenizer of an unknown kind \({kind}, {pre}\)") as refused:
        load_tokenizer(write(tmp_path / "a.gguf", **{"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre}))
    assert "tokenizer=" in refused.value.fix
    assert "--base-url" in refused.value.fix


def test_a_given_tokenizer_replaces_one_that_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", **{"tokenizer.ggml.pre": "another"})
    llm = LLM(file, tokenizer=load_tokenizer(write(tmp_path / "b.gguf")), threads=1)
    assert llm.generate("hello", SamplingParams(max_tokens=3))[0].token_ids
    with pytest.raises(LoadError, match="of an unknown kind"):
        LLM(file, threads=1)


def sentencepiece_keys(source: PreTrainedTokenizerFast, **keys: Any) -> dict[str, Any]:
    """Metadata of a tokenizer as converters write them. The merges are said by the scores of the tokens they make."""
    model = json.loads(source.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ranks = {"".join(merge): -float(i) for i, merge in reversed(list(enumerate(model["merges"])))}
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | dict.fromkeys(BYTES, BYTE)
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.scores": [ranks.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}  # fmt: skip


def random_texts(count: int = 60) -> list[str]:
    pick = random.Random(5).choice
    parts = [
        "def",
        "name",
        " ",
        "  ",
        "\n",
        "s",
        "<s>",
        "</s>",
        "x",
        "☃",
        "é",
        "日本",
        "🎈",
        "\t",
        "speculative ",
        "(",
        "42",
    ]
    return ["", " ", "▁", *("".join(pick(parts) for _ in range(12)) for _ in range(count))]


def assert_same(own: Tokenizer, source: PreTrainedTokenizerFast) -> None:
    for text in random_texts():
        ids = own.encode(text)
        assert ids == source.encode(text), text
        for skip in (False, True):
            assert own.decode(ids, skip_special_tokens=skip) == source.decode(ids, skip_special_tokens=skip), text
    assert own.encode("a", add_special_tokens=False) == source.encode("a", add_special_tokens=False)


@pytest.mark.parametrize("size", [320, 400])
def test_a_sentencepiece_tokenizer_is_that_of_the_checkpoint(size: int, tmp_path: Path) -> None:
    source = sentencepiece(size)
    own = load_tokenizer(write(tmp_path / "a.gguf", **sentencepiece_keys(source)))
    assert_same(own, source)
    assert own.encode("ab")[0] == 1  # BOS, though the file is silent
    assert own.transformers.encode("def add") == source.encode("def add")


def altered(source: PreTrainedTokenizerFast, change: Callable[[Any], None]) -> PreTrainedTokenizerFast:
    """The tokenizer with another backend: `change` is given the fields of its tokenizer.json."""
    fields = json.loads(source.backend_tokenizer.to_str())
    change(fields)
    backend = Backend.from_str(json.dumps(fields))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def without_prefix(fields: dict[str, Any]) -> None:
    fields["normalizer"] = fields["normalizer"]["normalizers"][1]
    fields["decoder"]["decoders"].pop()


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece(400), add_space_prefix=False)
    assert_same(load_tokenizer(write(tmp_path / "a.gguf", **keys)), altered(sentencepiece(400), without_prefix))


def test_a_tokenizer_of_gemma_4_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    source = altered(sentencepiece(400), without_prefix)
    merges = json.loads(source.backend_tokenizer.to_str())["model"]["merges"]
    more = {"model": "gemma4", "merges": [" ".join(merge) for merge in merges], "scores": None}
    keys = sentencepiece_keys(source, **more, add_bos_token=True, bos_token_id=1, unknown_token_id=0)
    assert_same(load_tokenizer(write(tmp_path / "a.gguf", **keys)), source)


def test_a_bos_that_is_no_token_is_an_error(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece(400), model="gemma4", merges=[], add_bos_token=True)
    with pytest.raises(LoadError, match="it adds BOS to texts, but does not define this token"):
        load_tokenizer(write(tmp_path / "a.gguf", **keys))


def test_tokens_of_a_user_are_found_before_merges(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece(400))
    token = keys["tokenizer.ggml.tokens"].index("▁the")
    keys["tokenizer.ggml.tokens"][token] = "  "
    keys["tokenizer.ggml.token_type"][token] = USER_DEFINED
    own = load_tokenizer(write(tmp_path / "a.gguf", **keys))
    assert token in own.encode("a  b")
    assert own.decode(own.encode("a  b"), skip_special_tokens=True).count("  ") == 1


@pytest.mark.parametrize("name", ["Phi-3-mini-4k-instruct", "another"])
def test_special_tokens_of_phi_3_swallow_the_white_space_behind_them(name: str, tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece(400)) | {"general.name": name}
    own = load_tokenizer(write(tmp_path / "a.gguf", **keys))
    same = own.encode("</s>\n a") == own.encode("</s>a")
    assert same == (name != "another")
    assert own.encode("<s>\na") != own.encode("<s>a")


def test_scores_that_are_missing_are_an_error(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece(400), scores=[0.0])
    with pytest.raises(LoadError, match="tokens but 1 scores"):
        load_tokenizer(write(tmp_path / "a.gguf", **keys))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-4o", "HelloWORLD it's 12345//\n", ["Hello", "WORLD", " it's", " ", "123", "45", "//\n"]),
        ("tekken", "HelloWORLD it's 123", ["Hello", "WORLD", " it", "'s", " ", "1", "2", "3"]),
        ("seed-coder", "a+\n\nb12", ["a", "+", "\n\n", "b", "1", "2"]),
        ("qwen35", "कि 12", ["कि", " ", "1", "2"]), ("deepseek-v3", "a日本1234 b", ["a", "日本", "123", "4", " b"]),
    ],
)  # fmt: skip
def test_texts_are_split_into_words_as_the_families_do(pre: str, text: str, words: list[str]) -> None:
    parts = [(text, (0, len(text)))]
    for each in SPLITS[pre]:
        split = pre_tokenizers.Split(Regex(each), "isolated")
        parts = [piece for part, _ in parts for piece in split.pre_tokenize_str(part)]
    assert [part for part, _ in parts] == words


def test_two_tokens_of_one_text_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", **{"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None})
    with pytest.raises(LoadError, match="2 of its tokens are 'a'"):
        load_tokenizer(file)
    assert read_header(file).has_tokenizer
