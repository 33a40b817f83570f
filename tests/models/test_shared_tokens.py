"""Which tokens two vocabularies have in common."""

import logging

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from slipstream.errors import PairError
from slipstream.models.shared_tokens import SharedTokens
from slipstream.models.token_texts import TokenTexts
from tests.models.tokenizer_kinds import byte_level, letters, sentencepiece, wordpiece

WIDE = (10**6, 10**6)


def shared(ours: object, theirs: object, width: tuple[int, int] = WIDE) -> SharedTokens:
    return SharedTokens(TokenTexts(ours, "the target"), TokenTexts(theirs, "the draft model"), width)


@pytest.mark.parametrize("ours", [byte_level, sentencepiece, wordpiece])
@pytest.mark.parametrize("theirs", [byte_level, sentencepiece, wordpiece])
def test_shared_tokens_write_the_same_whatever_they_are_called(ours, theirs) -> None:
    mine, other = TokenTexts(ours(), "the target"), TokenTexts(theirs(), "the draft model")
    both = SharedTokens(mine, other, WIDE)
    assert {mine.roles["eos"]: other.roles["eos"]}.items() <= both.to_theirs.items()
    words = {id_: their for id_, their in both.to_theirs.items() if mine.written[id_] is not None}
    assert all(mine.written[id_] == other.written[their] for id_, their in words.items())
    assert any(mine.written[id_] == b" the" for id_ in words)
    assert both.to_ours == {their: id_ for id_, their in both.to_theirs.items()}, "each has one counterpart at most"


def test_the_space_of_a_word_is_the_same_token_in_every_spelling() -> None:
    both = shared(byte_level(), sentencepiece())
    ours, theirs = byte_level().convert_tokens_to_ids("Ġthe"), sentencepiece().convert_tokens_to_ids("▁the")
    assert both.to_theirs[ours] == theirs
    part = byte_level().convert_tokens_to_ids("ð")  # a byte of a character
    assert both.to_theirs[part] == sentencepiece().convert_tokens_to_ids("<0xF0>")


def test_ids_beyond_the_logits_are_not_shared() -> None:
    both = shared(byte_level(), byte_level(290, other=True), (280, 270))
    assert both.ours.max() < 280
    assert both.theirs.max() < 270


def test_vocabularies_without_a_common_token_are_refused_with_the_share() -> None:
    apart = shared(letters(("a", "b")), letters(("c", "d", "e")))
    with pytest.raises(PairError, match="0 tokens are shared, 0% of the target's 2 and 0% of the draft"):
        apart.require_some()


def test_few_common_tokens_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    words = tuple(f"{chr(97 + n % 26)}{n}" for n in range(30))
    with caplog.at_level(logging.WARNING, "slipstream"):
        shared(letters(("zz", *words[:2])), letters(words)).require_some()  # most of the target's can be drafted
        assert not caplog.text
        shared(letters(words), letters(("zz", *words[:2]))).require_some()
    assert "2 tokens are shared, 7% of the target's 30 and 67% of the draft model's 3" in caplog.text


def test_large_vocabularies_are_compared_in_one_pass() -> None:
    """12,000 tokens each: to compare each with each would take minutes."""

    def large(offset: int) -> PreTrainedTokenizerFast:
        made = Tokenizer(models.BPE({f"t{n}": n - offset for n in range(offset, offset + 12_000)}, []))
        made.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=made)

    both = shared(large(0), large(4_000))
    assert len(both.ours) == 8_000
    assert both.to_theirs[6_000] == 2_000
