"""Which tokens two vocabularies share, and a text of one in the tokens of the other, kept up to date."""

import random
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.tokens.rereading import Reading, Vocabularies
from tests.tokens.tokenizer_kinds import FAITHFUL, byte_level, letters, sentencepiece, vocabularies_of, wordpiece

PAIRS = [(a, b) for a, b in product(FAITHFUL, FAITHFUL) if a != b]
TEXT = "The naïve café 🎈👩‍👩‍👧 décoding\n\n    return first_name + 42  # 日本語のテキスト, e\u0301\n" * 2


@pytest.fixture(scope="module", params=PAIRS, ids=" to ".join)
def vocabularies(request: pytest.FixtureRequest) -> Vocabularies:
    return vocabularies_of(*(FAITHFUL[kind]() for kind in request.param))


@pytest.mark.parametrize("target", [byte_level, sentencepiece, wordpiece])
@pytest.mark.parametrize("draft", [byte_level, sentencepiece, wordpiece])
def test_shared_tokens_write_the_same_whatever_they_are_called(target, draft) -> None:
    vocabularies = vocabularies_of(target(), draft())
    assert {vocabularies.target.roles["eos"]: vocabularies.draft.roles["eos"]}.items() <= vocabularies.to_draft.items()
    words = {a: b for a, b in vocabularies.to_draft.items() if vocabularies.target.written[a] is not None}
    assert all(vocabularies.target.written[a] == vocabularies.draft.written[b] for a, b in words.items())
    assert any(vocabularies.target.written[id_] == b" the" for id_ in words)
    assert vocabularies.to_target == {draft_id: id_ for id_, draft_id in vocabularies.to_draft.items()}, (
        "each has one counterpart at most"
    )


def test_tokens_are_shared_in_every_spelling_but_not_beyond_the_logits_also_of_large_vocabularies() -> None:
    vocabularies = vocabularies_of(byte_level(), sentencepiece())
    for target, draft in (("Ġthe", "▁the"), ("ð", "<0xF0>")):
        id_ = byte_level().convert_tokens_to_ids(target)
        assert vocabularies.to_draft[id_] == sentencepiece().convert_tokens_to_ids(draft)
    vocabularies = vocabularies_of(byte_level(), byte_level(290, other=True), (280, 270))
    assert max(vocabularies.to_draft) < 280
    assert max(vocabularies.to_target) < 270
    # 12,000 tokens each: to compare each with each would take minutes.
    words = [f"t{n}" for n in range(16_000)]
    vocabularies = vocabularies_of(letters(tuple(words[:12_000])), letters(tuple(words[4_000:])))
    assert len(vocabularies.to_draft) == 8_000
    assert vocabularies.to_draft[6_000] == 2_000
    said = "8000 tokens are shared, 67% of the target's 12000 and 67% of the draft model's"
    assert str(vocabularies).startswith(said)


def fresh(vocabularies: Vocabularies, tokens: list[int]) -> list[int]:
    reading = Reading(vocabularies)
    reading.update(tokens, 0)
    return reading.ids


def test_the_ids_depend_on_the_tokens_alone(vocabularies: Vocabularies) -> None:
    """Tokens come one by one or in bursts, some are taken back and others follow, the middle of a character among
    them: the ids are those of a fresh reading, and those that are said to be unchanged are."""
    rng, tokens = random.Random(1), vocabularies.target.ids(TEXT)
    reading, text = Reading(vocabularies), list[int]()
    seen = list(reading.ids)
    for _ in range(120):
        back = rng.choice((0, 0, 1, 2, 5))
        same = max(0, len(text) - back)
        wrong = [rng.choice(tokens) for _ in range(rng.randrange(3))]
        more = wrong if rng.random() < 0.3 else tokens[same : same + rng.randrange(1, 6)]
        text = [*text[:same], *more]
        kept = reading.update(text, same)
        assert reading.ids == fresh(vocabularies, text)
        assert reading.ids[:kept] == seen[:kept]
        seen = list(reading.ids)


def test_complete_words_are_read_as_the_draft_models_tokenizer_splits_them(vocabularies: Vocabularies) -> None:
    """Up to the last word, whose tokens are taken one by one."""
    text = "The first name is the second name, speculative decoding returns"
    reading, tokens = Reading(vocabularies), vocabularies.target.ids(text, first=True)
    reading.update(tokens, 0)
    last = vocabularies.target.bytes_of(tokens[reading.open_word :]).decode()
    complete = vocabularies.draft.ids(text.removesuffix(last), first=True)
    assert last.startswith(" ret")
    start = len(vocabularies.draft.begin)
    assert reading.ids[start : start + len(complete)] == complete


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_nothing_that_the_draft_model_can_write_is_lost(vocabularies: Vocabularies, text: str) -> None:
    """What is read is what was written, characters that are unknown to one of them aside."""
    ids = vocabularies.target.ids(text)
    written, read = vocabularies.target.bytes_of(ids), vocabularies.draft.bytes_of(fresh(vocabularies, ids))
    written, read = written.lstrip(b" "), read.lstrip(b" ")  # either may put a space before a text
    if vocabularies.draft.id_of.get(b"\xff") is None:
        assert len(read) <= len(written)
    else:
        assert read == written


def test_a_reading_begins_as_the_draft_models_tokenizer_begins_texts() -> None:
    """Once: not with every new token (transformers pull request 46124)."""
    vocabularies = vocabularies_of(byte_level(), sentencepiece())
    ids = fresh(vocabularies, byte_level().encode("The first name is the second"))
    bos = vocabularies.draft.roles["bos"]
    assert ids[0] == bos
    assert ids.count(bos) == 1
    back = vocabularies_of(sentencepiece(), byte_level())
    tokens = sentencepiece().encode("The first name is")
    assert tokens[0] == bos
    assert byte_level().decode(fresh(back, tokens)) == "The first name is"


def test_special_tokens_are_those_of_the_same_name_or_role_or_left_out() -> None:
    vocabularies = vocabularies_of(byte_level(), byte_level(290, other=True))
    ids = byte_level().encode("first<|user|>name<|end|>")
    assert byte_level(290, other=True).decode(fresh(vocabularies, ids)) == "first<|user|>name<|end|>"
    other = vocabularies_of(byte_level(), sentencepiece())
    read = fresh(other, byte_level().encode("first<|user|>name<|end|>"))
    assert sentencepiece().decode(read) == "<s>firstname</s>" or sentencepiece().decode(read) == "<s> firstname</s>"


def test_texts_without_spaces_are_not_split_again_and_targets_that_write_words_apart_are_read() -> None:
    vocabularies = vocabularies_of(byte_level(), sentencepiece())
    reading = Reading(vocabularies)
    tokens = byte_level().encode("日本語" * 200)
    reading.update(tokens, 0)
    assert reading.open_word > len(tokens) - 100
    assert vocabularies.draft.bytes_of(reading.ids).decode() == " " + "日本語" * 200
    vocabularies = vocabularies_of(wordpiece(), byte_level())
    ids = wordpiece().encode("The first names are decoding", add_special_tokens=False)
    written = vocabularies.target.bytes_of(ids).decode().removeprefix(" ")
    assert vocabularies.draft.bytes_of(fresh(vocabularies, ids)).decode() == written
