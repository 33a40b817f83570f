from pathlib import Path

import pytest
from tokenizers import Tokenizer

from recipes.embedded.request_pairs import Pair
from recipes.embedded.token_cache import pair_ids
from recipes.embedded.tokenizer import SPECIAL, chat, save_tokenizer, train_tokenizer

CODE = "def f(value):\n    if value > 1234:\n        return 'tab\t' + str(value)  # ü – 漢字 🙂\n\n\n    return None\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        [CODE * 3, "class A:\n    def g(self, other_value):\n        return other_value\n" * 50], 400
    )


@pytest.mark.parametrize(
    "text", [CODE, "", " ", "\n", "\r\n x\r\n", "a  b   c\t\td", "\x00\x7f", "日本語", "  indented\n"]
)
def test_encoding_and_decoding_keeps_every_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_layout_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(t) for t in SPECIAL] == [0, 1, 2, 3]
    assert tokenizer.get_vocab_size() <= 400


def test_digits_are_single_tokens_and_indentation_is_one_token(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("    def g(self):\n        return 1234").ids]
    assert pieces[-4:] == ["1", "2", "3", "4"]
    assert "\n        " in pieces


def test_another_pre_tokenizer_makes_other_tokens_and_keeps_every_text(tokenizer: Tokenizer) -> None:
    """As GPT-2 splits text, the last space of an indentation goes with the word after it."""
    other = train_tokenizer([CODE * 3, "class A:\n    def g(self):\n        return 1234\n" * 50], 400, "gpt2")
    assert [other.token_to_id(t) for t in SPECIAL] == [0, 1, 2, 3]
    for text in (CODE, "  indented\n", "日本語"):
        assert other.decode(other.encode(text).ids, skip_special_tokens=False) == text
    pieces = [other.decode([i]) for i in other.encode("    def g(self):\n        return 1234").ids]
    assert "\n        " not in pieces
    assert {"\n       ", " return"} <= {*pieces}
    assert {*other.get_vocab()} != {*tokenizer.get_vocab()}


def test_chat_template_agrees_with_training_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path, 128)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    pair = Pair("rename", "Rename `a` to `b`.\n\ndef f(a):\n    return a", "def f(b):\n    return b")
    messages = [{"role": "user", "content": pair.user}, {"role": "assistant", "content": pair.assistant}]
    assert loaded.apply_chat_template(messages, tokenize=False) == chat(pair.user, pair.assistant)
    assert loaded(chat(pair.user, pair.assistant)).input_ids == next(pair_ids(tokenizer, [pair]))
    assert (loaded.eos_token, loaded.pad_token) == ("<|endoftext|>", "<|endoftext|>")


def test_system_message_joins_the_first_user_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path, 128)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    roles = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    text = loaded.apply_chat_template(
        [{"role": r, "content": c} for r, c in roles], tokenize=False, add_generation_prompt=True
    )
    assert text == ("<|user|>\nBe brief.\n\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n")
    with pytest.raises(Exception, match="Unknown role"):
        loaded.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)


def test_special_tokens_in_source_stay_text(tokenizer: Tokenizer) -> None:
    ids = next(pair_ids(tokenizer, [Pair("write", "say <|end|>", "<|endoftext|>")]))
    assert (ids.count(0), ids.count(3)) == (0, 2)
