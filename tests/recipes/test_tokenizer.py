from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from recipes.embedded.request_pairs import Pair
from recipes.embedded.token_cache import pair_ids
from recipes.embedded.tokenizer import SPECIAL, chat, save_tokenizer, train_tokenizer

CODE = "def f(value):\n    if value > 1234:\n        return 'tab\t' + str(value)  # ü – 漢字 🙂\n\n\n    return None\n"


@pytest.fixture(scope="module", params=["code", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    texts = [CODE * 3, "class A:\n    def g(self, other_value):\n        return other_value\n" * 50]
    return train_tokenizer(texts, 400, request.param)


@pytest.fixture
def loaded(tokenizer: Tokenizer, tmp_path: Path) -> Any:
    save_tokenizer(tokenizer, tmp_path, 128)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "text", [CODE, "", " ", "\n", "\r\n x\r\n", "a  b   c\t\td", "\x00\x7f", "日本語", "  indented\n"]
)
def test_encoding_and_decoding_keeps_every_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_layout_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(t) for t in SPECIAL] == [0, 1, 2, 3]
    assert tokenizer.get_vocab_size() <= 400


@pytest.mark.parametrize(
    ("tokenizer", "pieces", "digits"),
    [("code", {"\n        "}, ["1", "2", "3", "4"]), ("gpt2", {"\n       ", " return"}, [])],
    indirect=["tokenizer"],
)
def test_indentation_is_one_token_and_digits_are_single_ones(tokenizer, pieces, digits):
    """As GPT-2 splits text, the last space of an indentation goes with the word after it."""
    written = [tokenizer.decode([i]) for i in tokenizer.encode("    def g(self):\n        return 1234").ids]
    assert pieces <= {*written}
    assert ("\n        " in written) == ("\n        " in pieces)
    assert written[len(written) - len(digits) :] == digits


def test_chat_template_agrees_with_training_pairs(tokenizer: Tokenizer, loaded: Any) -> None:
    pair = Pair("rename", "Rename `a` to `b`.\n\ndef f(a):\n    return a", "def f(b):\n    return b")
    messages = [{"role": "user", "content": pair.user}, {"role": "assistant", "content": pair.assistant}]
    assert loaded.apply_chat_template(messages, tokenize=False) == chat(pair.user, pair.assistant)
    assert loaded(chat(pair.user, pair.assistant)).input_ids == next(pair_ids(tokenizer, [pair]))
    assert (loaded.eos_token, loaded.pad_token) == ("<|endoftext|>", "<|endoftext|>")


def test_system_message_joins_the_first_user_turn(loaded: Any) -> None:
    roles = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": r, "content": c} for r, c in roles]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|user|>\nBe brief.\n\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n")
    with pytest.raises(Exception, match="Unknown role"):
        loaded.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)


def test_special_tokens_in_source_stay_text(tokenizer: Tokenizer) -> None:
    ids = next(pair_ids(tokenizer, [Pair("write", "say <|end|>", "<|endoftext|>")]))
    assert (ids.count(0), ids.count(3)) == (0, 2)
