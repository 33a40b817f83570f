"""`TextStream`: pieces add up to the whole text, whole characters only, and stop strings never show."""

import random

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.text_ends import REPLACEMENT, Decode, count_begun, text_after
from slipstream.errors import LoadError, PromptError
from slipstream.tokens.text import TextStream, decoder_of, load_tokenizer, stray_byte, token_text_of
from tests.tiny_checkpoints import Tiny, clone
from tests.tokens.tokenizer_kinds import byte_level, sentencepiece, unigram, wordpiece

TEXT = "def naïve(☃):\n\treturn 'café 🎈🎈' + ''.join(names)  # übergrößenträger 😀\r\n\x00end"


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny):
    return load_tokenizer(tiny.target)


@pytest.fixture(scope="module")
def decode(tokenizer) -> Decode:
    return decoder_of(tokenizer)


def chunks(rng: random.Random, ids: list[int]) -> list[list[int]]:
    """`ids` cut at random places, as steps of different length would."""
    out = []
    while ids:
        n = rng.randint(1, 6)
        out.append(ids[:n])
        ids = ids[n:]
    return out


def streamed(decode: Decode, parts: list[list[int]], stop=(), cause=None) -> list[str]:
    """Text of each step, the last one included."""
    stream, shown = TextStream(decode, stop), []
    for i, part in enumerate(parts):
        for token in part:
            stream.push(token, drafted=False)
        pieces = stream.finish(cause) if i == len(parts) - 1 else stream.take()
        shown.append("".join(piece.text for piece in pieces))
    return shown


@pytest.mark.parametrize(("kind", "count"), [("text", 30), ("ids", 60), ("bytes", 20)])
def test_pieces_add_up_to_the_text_for_every_chunking(tokenizer, decode, kind, count):
    """Of a text, of random tokens, which give broken UTF-8, and of bytes that are no characters by themselves."""
    for seed in range(count):
        rng, ids = random.Random(seed), tokenizer.encode(TEXT)
        if kind != "text":
            some = range(320) if kind == "ids" else [i for i in range(4, 260) if decode([i]) == REPLACEMENT]
            ids = rng.choices(some, k=80 if kind == "ids" else 40)
        assert "".join(streamed(decode, chunks(rng, ids))) == decode(ids)
        assert kind != "text" or decode(ids) == TEXT


def test_a_character_is_shown_once_complete(tokenizer, decode):
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    assert len(ids) >= 5, "the emoji must take several tokens for this test to mean anything"
    shown = streamed(decode, [[i] for i in ids])
    assert REPLACEMENT not in "".join(shown)
    assert [text for text in shown if text] == ["a", "😀", "b"]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("stop", [("return",), ("🎈🎈",), ("é 🎈", "names"), ("join(names)  # ü",)])
def test_a_stop_string_and_its_prefixes_are_never_shown(tokenizer, decode, seed, stop):
    rng = random.Random(seed)
    ids = tokenizer.encode(TEXT)
    end = next(n for n in range(len(ids) + 1) if any(s in decode(ids[:n]) for s in stop))
    cause = next(s for s in stop if s in decode(ids[:end]))
    expected = TEXT[: TEXT.find(cause)]
    so_far = ""
    for text in streamed(decode, chunks(rng, ids[:end]), stop, cause):
        so_far += text
        assert expected.startswith(so_far)
    assert so_far == expected


def test_pieces_keep_tokens_and_their_origin_and_what_only_looked_like_a_stop_string(tokenizer, decode):
    ids = tokenizer.encode("one tw two", add_special_tokens=False)
    assert "".join(streamed(decode, [[i] for i in ids], stop=("two!",))) == "one tw two"
    ids = tokenizer.encode(TEXT)
    origin = [i % 3 == 0 for i in range(len(ids))]
    stream = TextStream(decode)
    pieces = [p for token, drafted in zip(ids, origin, strict=True) for p in stream.add([token], [drafted], False)]
    pieces += stream.finish(None)
    assert [p.token for p in pieces] == ids
    assert [p.drafted for p in pieces] == origin


def test_a_folder_without_a_tokenizer_is_refused_with_what_is_missing(tmp_path):
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_takes_token_ids(tiny, tmp_path):
    clone(tiny.target, tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*token*"):
        path.unlink()
    llm = LLM(tmp_path / "bare", "ngram", executor="torch", draft_tokens=4)
    assert llm.tokenizer is None
    params = SamplingParams(max_tokens=5)
    wanted = LLM(tiny.target, executor="torch", draft_tokens=4).generate([[5, 6, 7]], params)[0].token_ids
    done = llm.generate([[5, 6, 7]], params)[0]
    assert (done.token_ids, done.text) == (wanted, "")
    assert list(llm.stream([5, 6, 7], params))[-1].completion.token_ids == wanted
    with pytest.raises(PromptError, match="has no tokenizer"):
        llm.generate("text")
    with pytest.raises(PromptError, match="no chat template"):
        llm.chat("text")
    (tmp_path / "bare" / "tokenizer.json").write_text("{")  # one that is there and broken is an error
    with pytest.raises(LoadError):
        LLM(tmp_path / "bare", executor="torch", draft_tokens=4)


def test_only_a_tokenizer_that_falls_back_to_bytes_has_a_stray_byte(tokenizer):
    assert stray_byte(tokenizer) is None
    assert stray_byte(sentencepiece()) == sentencepiece().convert_tokens_to_ids("<0xFF>")


@pytest.mark.parametrize("seed", range(200))
def test_pieces_add_up_to_the_text_where_bytes_are_no_text(seed):
    """Whole characters, parts of characters and stray bytes in runs, between words."""
    byte_fallback = sentencepiece()
    rng, decode, ids = random.Random(seed), decoder_of(byte_fallback), list[int]()
    first_byte = byte_fallback.convert_tokens_to_ids("<0x00>")
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.4:
            ids.append(rng.randrange(first_byte + 256, len(byte_fallback)))
        else:
            run = "".join(rng.choice("\u00e9\u2603\U0001f600\nx") for _ in range(rng.randint(1, 3))).encode()
            damaged = rng.random()
            if damaged < 0.3:
                run = run[: rng.randint(1, len(run))]
            elif damaged < 0.6:
                run += bytes([rng.choice([0xFF, 0x80, 0xC3])])
            ids += [first_byte + byte for byte in run]
    stream, shown = TextStream(decode, (), stray_byte(byte_fallback)), ""
    for part in chunks(rng, ids):
        for token in part:
            stream.push(token, drafted=False)
        shown += "".join(piece.text for piece in stream.take())
        assert decode(ids).startswith(shown)
    assert shown + "".join(piece.text for piece in stream.finish(None)) == decode(ids)


@pytest.mark.parametrize("kind", [byte_level, sentencepiece, unigram, wordpiece])
def test_an_output_reads_as_in_the_text_with_its_prompt(kind):
    """Also behind and between special tokens, which write nothing."""
    tokenizer, rng = kind(), random.Random(0)
    decode, ids = decoder_of(tokenizer), tokenizer.encode("the first name and the second café  text ☃ it's", None)
    ids = [token for id_ in ids for token in [id_, *[tokenizer.all_special_ids[-1]] * rng.choice((0, 0, 1, 12))]]
    for cut in range(len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        complete = next(n for n in range(cut, -1, -1) if not decode(ids[:n]).endswith(REPLACEMENT))
        wanted = decode(ids)[len(decode(ids[:complete])) :]
        stream = TextStream(decode, ("never",), stray_byte(tokenizer), prompt)
        pieces = [piece for part in chunks(rng, output) for piece in stream.add(part, [False] * len(part), False)]
        assert "".join(piece.text for piece in [*pieces, *stream.finish(None)]) == wanted
        assert text_after(decode, prompt, output) == wanted


def test_the_text_of_a_token_has_its_space():
    text, ids = token_text_of(sentencepiece()), sentencepiece().encode("the first name", add_special_tokens=False)
    assert "".join(map(text, ids)) == " the first name"
    assert [text(sentencepiece().convert_tokens_to_ids(token)) for token in ("</s>", "<0xE2>")] == ["</s>", REPLACEMENT]


def test_what_may_begin_a_stop_string_is_looked_for_in_proportion_to_the_text(tokenizer, decode):
    """And not to the length of the stop strings."""
    looked = 0

    class Counted(str):
        def __getitem__(self, at):
            nonlocal looked
            looked += 1
            return super().__getitem__(at)

        def startswith(self, *given):
            nonlocal looked
            looked += 1
            return super().startswith(*given)

    ids = tokenizer.encode(TEXT)
    stop = [Counted("return " + end * 10_000) for end in "ab"]
    assert "".join(streamed(decode, [[i] for i in ids], stop)) == TEXT
    assert looked < 4 * len(stop) * len(ids)


@pytest.mark.parametrize("seed", range(20))
def test_text_is_held_back_as_long_as_it_may_become_a_stop_string(seed):
    rng = random.Random(seed)
    for _ in range(200):
        text, stop = ("".join(rng.choices("ab", k=rng.randint(0, 9))) for _ in range(2))
        stop += "b"
        assert count_begun(text, stop) == max(n for n in range(len(stop)) if text.endswith(stop[:n]))
