"""Draft models whose tokenizer differs from the target's, with tokenizers of every kind."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.structured import Structured
from slipstream.core.target import Capabilities, Target, TargetOut
from slipstream.drafters.guard import Guard
from slipstream.drafters.model import make
from slipstream.drafters.string_match import Rereader, complete, with_tokenizer
from slipstream.errors import PairError, ParameterError
from slipstream.llm import LLM
from slipstream.targets.decoder import Decoder
from slipstream.tokens.text import tokenizer_of
from slipstream.tokens.token_texts import TokenTexts
from tests.drafters.fakes import MultiStepToy, string_match
from tests.enumeration import enumerate_texts
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import OTHER_TEXTS, Tiny, make_model, make_tokenizer
from tests.tokens.tokenizer_kinds import FAITHFUL, byte_level, sentencepiece, unigram, vocabularies_of, wordpiece

PAIRS = [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level"), ("byte-level", "unigram"),
         ("unigram", "byte-level"), ("byte-level", "byte-level, other merges")]  # fmt: skip
TEXT = (
    "The naïve café 🎈👩‍👩‍👧 returns 日本語のテキスト; e\u0301 and नमस्ते.\n\n"
    "def add(first, second):\n    return first + second  # it's speculative decoding\n"
)
IN_EVERY_ALPHABET = "The first name is speculative decoding\n    return the second name; it's the text\n"


class Told:
    """A model that knows a text, which begins with a letter: every token that continues it is possible, the longest
    most likely. `exactly`: the tokens that it writes instead. It has a KV cache that is checked as the toy target's
    is."""

    context, device = 4096, torch.device("cpu")

    def __init__(self, texts: TokenTexts, text: str, exactly: Seq[int] | None = None):
        self.texts, self.data, self.exactly = texts, text.encode(), exactly
        self.vocab_size = len(texts.written)
        self.capabilities = Capabilities()
        self._checked = ToyTarget(self.vocab_size, order=1)

    def logits(self, tokens: Seq[int]) -> list[float]:
        row = [-30.0] * self.vocab_size
        if self.exactly is not None:
            row[self.exactly[len(tokens)] if len(tokens) < len(self.exactly) else 0] = 0.0
            return row
        at = len(self.texts.bytes_of(list(tokens)).lstrip(b" "))
        for id_, data in enumerate(self.texts.written):
            if data and self.data.startswith(data, at):
                row[id_] = float(len(data))
        return row

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        self._checked.run(seqs, draft)
        rows = []
        for b, seq in enumerate(seqs):
            rows.append(self.logits(seq.tokens[: seq.end]))
            for node in range(len(draft.nodes(b))):
                path = [draft.ids[draft.splits[b] + n] for n in draft.ancestors(b, node)]
                rows.append(self.logits([*seq.tokens[: seq.end], *path]))
        return TargetOut(torch.tensor(rows, dtype=torch.float64))

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        self._checked.commit(seqs, path)

    def release(self, seq_id: int) -> None:
        self._checked.release(seq_id)


def drafter_of(target: Target, ours: Any, model: Target, theirs: Any) -> Drafter:
    return make(target, model=with_tokenizer(model, theirs, ours, target.vocab_size))


def texts_of(ours: Any, theirs: Any) -> tuple[TokenTexts, TokenTexts]:
    return TokenTexts(ours, "the target"), TokenTexts(theirs, "the draft model")


def told(ours: Any, theirs: Any, text: str, written: Seq[int], kind: type[Told] = Told) -> tuple[Told, Drafter]:
    """A target that writes these tokens, and a drafter whose model knows the text."""
    mine, other = texts_of(ours, theirs)
    target = Told(mine, text, exactly=written)
    return target, drafter_of(target, ours, kind(other, text), theirs)


def proposed(drafter: Drafter, tokens: Seq[int], budget: int) -> list[int]:
    """What is drafted after these tokens of the target's."""
    seq = Sequence(tokens, SamplingParams(max_tokens=50))
    seq.kv_len = len(tokens) - 1
    return drafter.propose([seq], [Budget(budget)]).ids


def toy(tokenizer: Any, kind: type[ToyTarget] = ToyTarget, **own: Any) -> ToyTarget:
    return kind(len(TokenTexts(tokenizer, "a toy model").written), order=2, **{"seed": 5, "sharpness": 3.0} | own)


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_greedy_text_is_the_targets(pair: tuple[str, str]) -> None:
    """Texts of random tokens: halves of characters, stray bytes and special tokens among them. In batches, with drafts
    of every length, and from prompts of ids."""
    ours, theirs = (FAITHFUL[kind]() for kind in pair)
    prompts = [
        ours.encode("The first name"), [7], ours.encode("def add(first, second):\n    ☃"), [40, 41, 300 % len(ours)],
    ]  # fmt: skip
    truth = [Oracle(toy(ours)).greedy(prompt, 24) for prompt in prompts]
    for kind, most in ((ToyTarget, 4), (MultiStepToy, 7)):
        target = toy(ours)
        guard = Guard(drafter_of(target, ours, toy(theirs, kind, seed=6), theirs), target)
        llm = LLM(target, guard, draft_tokens=most, max_batch=3)
        done = llm.generate(prompts, SamplingParams(max_tokens=24))
        assert [d.token_ids for d in done] == truth
        assert guard.faults == 0
        assert sum(d.stats.proposed for d in done) > 0


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_a_draft_model_that_agrees_is_accepted(pair: tuple[str, str]) -> None:
    """It knows the text, in its own tokens; so nearly every draft token is the target's. Characters that take several
    tokens, and texts that the draft model splits elsewhere, cost little."""
    ours, theirs = (FAITHFUL[kind]() for kind in pair)
    text = IN_EVERY_ALPHABET if "unigram" in pair else TEXT
    mine, _ = texts_of(ours, theirs)
    written = [*mine.begin, *mine.ids(text, first=mine.drops_space)]
    target, drafter = told(ours, theirs, text, written)
    guard = Guard(drafter, target)
    done = LLM(target, guard, draft_tokens=4).generate([written[:3]], SamplingParams(max_tokens=len(written) - 3))[0]
    assert done.token_ids == written[3:]
    assert guard.faults == 0
    assert done.stats.acceptance_rate > 0.7
    assert done.stats.mean_acceptance_length > 2.9


def test_words_that_the_target_splits_elsewhere_are_drafted_from_its_own_tokens() -> None:
    """The text ends within a word that the draft model writes as one token, and goes on within it."""
    ours, theirs = byte_level(), byte_level(290, other=True)
    mine, _ = texts_of(ours, theirs)
    text = "decoding speculative decoding"
    for n in range(1, len(text)):
        head, tail = mine.ids(text[:n]), mine.ids(text[n:])
        _, drafter = told(ours, theirs, text, [*head, *tail])
        ids = proposed(drafter, head, 4)
        assert ids
        assert text.encode()[n:].startswith(mine.bytes_of(ids))


@pytest.mark.parametrize("theirs", [sentencepiece(), unigram()], ids=["bytes", "no bytes"])
def test_half_a_character_is_continued(theirs: Any) -> None:
    """☃ has three bytes, and the text ends after one or two of them. A draft model without tokens for bytes writes the
    character again."""
    ours = byte_level(262)
    mine, _ = texts_of(ours, theirs)
    text = "a ☃☃ the"
    whole = mine.ids(text)
    for n in range(1, len(whole)):
        cut = mine.bytes_of(whole[:n])
        _, drafter = told(ours, theirs, text, whole)
        ids = proposed(drafter, whole[:n], 3)
        assert ids
        assert text.encode().startswith(cut + mine.bytes_of(ids))


def test_what_the_draft_model_leaves_incomplete_is_held_back() -> None:
    """It stops after some of the four bytes of a character: the text before it is drafted."""
    ours, theirs = byte_level(), sentencepiece()
    mine, _ = texts_of(ours, theirs)
    _, drafter = told(ours, theirs, "a 🎈", mine.ids("a 🎈"))
    for budget in range(1, 8):
        assert " 🎈".encode().startswith(mine.bytes_of(proposed(drafter, mine.ids("a"), budget)))
    assert complete(" 🎈".encode()[:4]) == b" "
    assert complete(b"\xf0\x9f") == b""


def test_the_end_of_the_text_is_drafted() -> None:
    """Each model has a token of its own for it."""
    ours, theirs = byte_level(), sentencepiece()
    mine, _ = texts_of(ours, theirs)

    class Ending(Told):
        def logits(self, tokens: Seq[int]) -> list[float]:
            row = super().logits(tokens)
            if max(row) < 0:
                row[self.texts.roles["eos"]] = 1.0
            return row

    text = "The first name"
    _, drafter = told(ours, theirs, text, [*mine.ids(text), mine.roles["eos"]], Ending)
    ids = proposed(drafter, mine.ids("The first"), 8)
    assert mine.bytes_of(ids) == b" name"
    assert ids[-1] == mine.roles["eos"]


def test_every_text_is_exactly_as_probable_as_in_plain_decoding() -> None:
    """By enumeration, under penalties and filters, which name the target's tokens; another penalty would be seen."""

    def llm() -> LLM:
        target = ToyTarget(5, order=3, seed=21, sharpness=1.5)
        return LLM(target, string_match(target), draft_tokens=2)

    params = SamplingParams(
        temperature=1.2, top_p=0.95, presence_penalty=0.5, logit_bias={1: 0.5}, bad_words=((2, 3),), max_tokens=4
    )
    oracle, prompt = Oracle(llm().target), [0, 1, 2, 0, 3, 1, 2]
    (texts,) = enumerate_texts(llm, prompt, params, steps=3)
    texts.check(oracle, prompt, params)
    assert texts.accepted > 0.1
    assert texts.error(oracle, prompt, replace(params, presence_penalty=0.0)) > 1e-3


def test_a_form_is_kept_and_no_drawn_token_is_cut() -> None:
    """Structured output over real tokenizers: greedy texts are those of plain decoding, sampled ones have the form."""
    pytest.importorskip("llguidance")
    ours, theirs = byte_level(), sentencepiece()
    target = toy(ours)
    drafter = drafter_of(target, ours, toy(theirs, seed=6), theirs)
    form = Structured(regex="(The|first|name| |[0-9])+!")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=20, structured=form, seed=3)
        plain = LLM(target, tokenizer=ours).generate("The", params)[0]
        done = LLM(target, drafter, tokenizer=ours, draft_tokens=4).generate("The", params)[0]
        assert done.stats.drafter_faults == 0
        if temperature == 0:
            assert done.token_ids == plain.token_ids
        assert set(done.text) <= set("Thefirstname 0123456789!")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("foreign")
    make_model(folder, noise=0.05, vocab_size=300)
    make_tokenizer(folder, 300, OTHER_TEXTS)
    return folder


class TestFromFolders:
    """`LLM` and its option."""

    def test_another_tokenizer_is_refused_by_the_name_of_the_option(self, tiny: Tiny, foreign: Path) -> None:
        with pytest.raises(PairError, match=r"do not share a vocabulary.*draft_tokenizer='string'"):
            LLM(tiny.target, draft=foreign, executor="torch")

    def test_texts_are_the_targets(self, tiny: Tiny, foreign: Path) -> None:
        load: dict[str, Any] = {"executor": "torch", "dtype": "float64"}
        prompts = ["def add(first", "naïve café 🎈 ☃", "SELECT"]
        plain = LLM(tiny.target, **load).generate(prompts, SamplingParams(max_tokens=16))
        llm = LLM(tiny.target, draft=foreign, draft_tokenizer="string", draft_tokens=4, **load)
        done = llm.generate(prompts, SamplingParams(max_tokens=16))
        assert [d.token_ids for d in done] == [d.token_ids for d in plain]
        assert sum(d.stats.proposed for d in done) > 0
        assert sum(d.stats.drafter_faults for d in done) == 0
        stacked = LLM(tiny.target, draft=["suffix", foreign], draft_tokenizer="string", draft_tokens=4, **load)
        stacked_texts = stacked.generate(prompts, SamplingParams(max_tokens=16))
        assert [d.token_ids for d in stacked_texts] == [d.token_ids for d in plain]

    def test_equal_tokenizers_are_not_translated(self, tiny: Tiny) -> None:
        load: dict[str, Any] = {"executor": "torch", "draft_tokens": 3}
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=1)
        same = LLM(tiny.target, draft=tiny.draft, **load).generate("def", params)[0]
        asked = LLM(tiny.target, draft=tiny.draft, draft_tokenizer="string", **load).generate("def", params)[0]
        assert asked.token_ids == same.token_ids
        assert asked.stats.accepted == same.stats.accepted

    def test_options_that_string_match_has_not_are_refused(self, tiny: Tiny, foreign: Path) -> None:
        draft = foreign, {"window": 9}
        with pytest.raises(ParameterError, match="has no parameter 'window'"):
            LLM(tiny.target, draft=draft, draft_tokenizer="string", executor="torch")


def test_what_cannot_work_is_refused_by_name() -> None:
    ours, theirs = byte_level(), wordpiece(lowercase=True)
    with pytest.raises(PairError, match="the tokenizer of the draft model does not preserve text"):
        with_tokenizer(toy(theirs), theirs, ours, 330)
    with pytest.raises(PairError, match="the tokenizer of the target does not preserve text"):
        with_tokenizer(toy(ours), ours, theirs, 160)
    with pytest.raises(PairError, match="the draft model has no tokenizer"):
        with_tokenizer(toy(ours), None, ours, 330)
    with pytest.raises(ParameterError, match=r"draft_tokenizer is 'strin'.*did you mean 'string'"):
        LLM(toy(ours), draft_tokenizer="strin")
    with pytest.raises(ParameterError, match="draft_tokenizer is 'string', but the drafter 'ngram' loads no draft"):
        LLM(toy(ours), "ngram", draft_tokenizer="string")
    with pytest.raises(PairError, match="'string', but the target has no tokenizer"):
        LLM(toy(ours), toy(ours), draft_tokenizer="string")


def test_unknown_characters_do_not_stop_drafts() -> None:
    """The draft model has no token for a snowman: it reads the text without it."""
    ours, theirs = byte_level(), unigram()
    target = toy(ours)
    drafter = drafter_of(target, ours, toy(theirs, seed=6), theirs)
    assert proposed(drafter, ours.encode("The ⛄ first"), 3)


def test_a_special_token_of_both_is_drafted_and_ends_the_draft() -> None:
    """<|user|> in the middle of what the draft model writes."""
    ours, theirs = byte_level(), byte_level(290, other=True)
    mine, other = texts_of(ours, theirs)
    assert mine.special["<|user|>"] == 1 == other.special["<|user|>"]
    written = [*other.ids(" name"), 1, *other.ids(" first")]
    start = other.ids("The first")
    target, model = toy(ours), Told(other, "", exactly=[*start, *written])
    drafter = drafter_of(target, ours, model, theirs)
    assert proposed(drafter, mine.ids("The first"), 9) == [*mine.ids(" name"), 1]


def test_a_text_longer_than_the_draft_models_context_is_drafted_on() -> None:
    ours, theirs = byte_level(), sentencepiece()
    target = toy(ours)
    guard = Guard(drafter_of(target, ours, toy(theirs, seed=6, context=32), theirs), target)
    done = LLM(target, guard, draft_tokens=3).generate([[40, 41]], SamplingParams(max_tokens=80))[0]
    assert done.token_ids == Oracle(toy(ours)).greedy([40, 41], 80)
    assert guard.faults == 0


def test_a_loaded_draft_model_that_was_given_its_tokenizer_is_taken(tiny: Tiny, tmp_path: Path) -> None:
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    theirs, ours = tokenizer_of(tmp_path), tokenizer_of(tiny.target)
    model = with_tokenizer(Decoder.load(tmp_path, executor="torch"), theirs, ours, 320)
    done = LLM(tiny.target, model, executor="torch", device="cpu").generate("def", SamplingParams(max_tokens=8))
    assert done[0].stats.drafter_faults == 0


def test_what_was_read_for_an_earlier_text_is_not_computed_again(tiny: Tiny) -> None:
    model = Decoder.load(tiny.draft, executor="torch", dtype="float64")
    ours, theirs, rows = byte_level(), tokenizer_of(tiny.draft), list[int]()
    reader, memory = Rereader(model, vocabularies_of(ours, theirs, (len(ours), 320))), model.capabilities.memory
    text = ours.encode("def add(first, second):\n    return first + second\n" * 3)
    for _ in range(2):
        seq = Sequence(text)
        reader.begin(seq.id)
        reading = reader.follow(seq, len(text))
        rows.append(len(reading.pending))
        model.run([reading], Draft.empty(1))
        model.commit([reading], [[]])
        reading.kv_len = len(reading.tokens)
        reader.keep(seq.id)
        reader.release(seq.id)
    assert rows[1] == rows[0] - memory.block
