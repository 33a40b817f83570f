"""What tokens write, and how text in the middle of a text is split."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from slipstream.errors import PairError
from slipstream.tokens.token_texts import TokenTexts
from tests.tokens.tokenizer_kinds import FAITHFUL, TEXTS, byte_level, sentencepiece, unigram, wordpiece

WITH_BYTES = ("byte-level", "byte-level, other merges", "sentencepiece")
"""Kinds that have a token for every byte."""


def texts_of(kind: str) -> TokenTexts:
    return TokenTexts(FAITHFUL[kind](), "the target")


@pytest.fixture(scope="module", params=WITH_BYTES)
def whole(request: pytest.FixtureRequest) -> TokenTexts:
    return texts_of(request.param)


@pytest.mark.parametrize("kind", FAITHFUL)
def test_tokens_write_what_the_tokenizer_decodes(kind: str) -> None:
    tokenizer, texts = FAITHFUL[kind](), texts_of(kind)
    texts.require_faithful()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        written = texts.bytes_of(ids).decode()
        assert written.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=True).removeprefix(" ")
        assert written.removeprefix(" ") == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_text_in_the_middle_comes_back_whole(whole: TokenTexts, text: str) -> None:
    """No space is added, no character lost: emoji, combining characters, control characters, any script."""
    if any(name in text for name in whole.special):
        return
    if whole.ids("▁") == whole.ids(" "):  # the mark of SentencePiece: its tokenizers cannot tell it from a space
        text = text.replace("▁", " ")
    assert whole.bytes_of(whole.ids(text)) == text.encode()


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=24))
def test_bytes_that_are_no_text_have_tokens(whole: TokenTexts, data: bytes) -> None:
    assert whole.bytes_of(whole.pieces(data)) == data


def test_bytes_without_tokens_are_left_out_and_what_is_put_around_a_text_is_known() -> None:
    texts = texts_of("unigram")
    assert texts.bytes_of(texts.pieces(b" the\xf0\x9f first")) == b" the first"
    plain, sentence = texts_of("byte-level"), TokenTexts(sentencepiece(), "the target")
    assert (plain.begin, plain.drops_space) == ((), False)
    assert (sentence.begin, sentence.drops_space) == ((sentence.roles["bos"],), True)
    assert sentence.bytes_of(sentence.ids("the", first=True)) == b" the"
    assert sentence.bytes_of(sentence.ids("the")) == b"the"


def test_of_two_tokens_that_write_the_same_one_counts_and_special_ones_write_nothing() -> None:
    """Llama 2 has "A" and <0x41>; only the first occurs where a text has an A."""
    texts = TokenTexts(sentencepiece(), "the target")
    byte = sentencepiece().convert_tokens_to_ids("<0x66>")
    assert texts.written[byte] == b"f"
    assert texts.id_of[b"f"] == sentencepiece().convert_tokens_to_ids("f") != byte
    texts = TokenTexts(unigram(), "the target")
    assert texts.unknown is not None
    assert texts.text_of(texts.unknown) is None
    assert texts.text_of(texts.special["</s>"]) is None
    assert texts.text_of(10**6) is None


@pytest.mark.parametrize("lowercase", [False, True])
def test_a_tokenizer_that_changes_text_is_refused_by_what_it_does(lowercase: bool) -> None:
    with pytest.raises(PairError, match=r"the tokenizer of the draft model does not preserve text: .* becomes"):
        TokenTexts(wordpiece(lowercase=lowercase), "the draft model").require_faithful()


def test_tokenizers_whose_tokens_cannot_be_read_are_refused() -> None:
    with pytest.raises(PairError, match="it is a object, not a fast tokenizer"):
        TokenTexts(object(), "the target")
    odd = Tokenizer(models.BPE({"a": 0}, []))
    odd.decoder = decoders.CTC()
    with pytest.raises(PairError, match="its decoder is CTC"):
        TokenTexts(PreTrainedTokenizerFast(tokenizer_object=odd), "the target")


def test_a_change_of_the_tokenizer_for_another_call_is_not_seen() -> None:
    """Truncation and padding are state of a tokenizer, which another thread may set."""
    tokenizer = byte_level(310)
    tokenizer.backend_tokenizer.enable_truncation(2)
    try:
        assert len(TokenTexts(tokenizer, "the target").ids("return first second")) > 2
    finally:
        tokenizer.backend_tokenizer.no_truncation()
