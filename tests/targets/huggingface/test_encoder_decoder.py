"""Encoder-decoders against transformers' own models, in float64."""

import functools
import threading
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import slipstream
from slipstream import LLM, BeamParams, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.core.target import start_sequence
from slipstream.errors import PairError, ParameterError, PromptError, TargetError, UnsupportedModelError
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface import kinds
from slipstream.targets.huggingface.encoder_decoder import EncoderDecoder
from slipstream.targets.huggingface.huggingface_target import of_module
from tests.drafters.scripted_drafters import ScriptedDrafter, replay
from tests.enumeration import enumerate_texts
from tests.oracle import Oracle
from tests.targets.conformance import Case, Conformance
from tests.targets.huggingface.architectures import generated
from tests.targets.huggingface.encoder_decoders import (
    ENCODER_DECODERS,
    PACKED,
    SOURCES,
    TOKENS,
    VOCAB,
    WrongSiblings,
    random_encoder_decoder,
)
from tests.targets.reference import CLOSE, Wide, assert_close, assert_spoils_only_what_sees_it
from tests.tiny_checkpoints import random_llama


@functools.cache
def model(name: str) -> Any:
    return random_encoder_decoder(name)


@functools.cache
def target(name: str) -> EncoderDecoder:
    of = of_module(model(name))
    assert isinstance(of, EncoderDecoder)
    assert isinstance(of.runner, Decoder) == (name in PACKED)
    return of


def keeps_nothing(of: EncoderDecoder) -> bool:
    """Neither sources nor keys and values."""
    runner = of.runner
    kept = runner.executor.kv_memory.usage.used if isinstance(runner, Decoder) else len(runner._caches)
    return not len(of.sources) and not kept


@functools.cache
def texts(name: str) -> list[list[int]]:
    return generated(model(name), SOURCES, TOKENS)


def logits(name: str, source: Seq[int], text: Seq[int]) -> torch.Tensor:
    """[n, V] of the model's own forward, without a cache."""
    with torch.no_grad():
        ids, out = torch.tensor([list(source)]), torch.tensor([list(text)])
        return model(name)(input_ids=ids, decoder_input_ids=out, use_cache=False).logits[0]


@contextmanager
def passes_of(part: Any, dim: int = 0) -> Iterator[list[int]]:
    """How many sources or, with dim 1, how many tokens each pass of an encoder or a decoder reads."""
    counted: list[int] = []
    hook = part.register_forward_pre_hook(
        lambda _, __, given: counted.append(given["input_ids"].shape[dim]), with_kwargs=True
    )
    try:
        yield counted
    finally:
        hook.remove()


def test_every_entry_of_the_table_has_a_model_here() -> None:
    known = {model(name).config.model_type for name in ENCODER_DECODERS}
    of_both = (kinds.ENCODER_DECODER, kinds.ENCODER_DECODER_EACH)
    assert {name for name, kind in kinds.ARCHITECTURES.items() if kind in of_both} == known


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_what_it_declares_is_what_the_table_says(name: str) -> None:
    can, kind = target(name).capabilities, kinds.ARCHITECTURES[model(name).config.model_type]
    assert kind is (kinds.ENCODER_DECODER if name in PACKED else kinds.ENCODER_DECODER_EACH)
    assert can.encoder.start == (model(name).generation_config.decoder_start_token_id,)
    declared = can.trees, can.early_exit is not None, can.head_host is not None
    assert declared == (kind.trees, kind.early_exit, kind.heads)
    assert can.memory is None
    assert target(name).sources.together


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    """Plainly, and with drafts of which about two thirds are right. Each source is encoded once."""
    llm = LLM(target(name), draft_tokens=4, max_batch=5)
    recorded = dict(zip(map(tuple, SOURCES), texts(name), strict=True))
    for drafter in (None, ScriptedDrafter(recorded, VOCAB, replay(0.7))):
        llm.use(drafter)
        with passes_of(model(name).get_encoder()) as read, passes_of(model(name).get_decoder(), dim=1) as steps:
            done = llm.generate(SOURCES, SamplingParams(max_tokens=TOKENS))
        assert [c.token_ids for c in done] == texts(name)
        assert [c.prompt_token_ids for c in done] == SOURCES
        assert read == [5]
        if drafter is None and name in PACKED:
            assert steps == [5] * TOKENS, "a step of a batch is one forward"
    assert all(c.stats.accepted for c in done)
    assert any(c.stats.proposed > c.stats.accepted for c in done)
    assert keeps_nothing(target(name))


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "m2m-100"])
def test_eight_requests_of_different_lengths_that_join_one_after_another_get_their_own_texts(name: str) -> None:
    """A new one joins in each step; each draft is a tree, whose right branch is not the first."""
    sources = [*SOURCES, [4, 44, 14, 24, 34], [50, 3], [6] * 11]
    lengths = [9, 3, 12, 6, 10, 1, 8, 11]
    wanted = [generated(model(name), [s], n)[0] for s, n in zip(sources, lengths, strict=True)]
    start = list(target(name).encoder.start)
    llm = LLM(target(name), WrongSiblings([[*start, *text] for text in wanted], VOCAB), draft_tokens=3, max_batch=8)
    engine = llm.engine()
    seqs = [llm.sequence(s, SamplingParams(max_tokens=n)) for s, n in zip(sources, lengths, strict=True)]
    for seq in seqs:
        engine.add(seq)
        engine.step()
    while engine.unfinished:
        engine.step()
    assert [seq.output for seq in seqs] == wanted
    assert sum(seq.stats.accepted for seq in seqs) > 10
    assert all(seq.stats.drafter_faults == 0 for seq in seqs)
    assert keeps_nothing(target(name))


def llama() -> Any:
    return random_llama(vocab_size=VOCAB).double()


def test_texts_of_these_models_differ_between_sources_and_do_not_stand_still() -> None:
    """Or the tests of this file would say little."""
    for name in ENCODER_DECODERS:
        assert len({tuple(text) for text in texts(name)}) >= 4
        assert sum(len(set(text)) for text in texts(name)) >= 12


class SourceCase(Case):
    """Sequences answer different sources, each the one that its first token says. Without padding, which is read in
    another way where it is alone."""

    padding: int | None = None

    def ids(self, n: int) -> list[int]:
        return self.random.choices([token for token in range(VOCAB) if token != self.padding], k=n)

    def sequence(self, n: int) -> Sequence:
        seq = SourcedSequence(ids := self.ids(n), source=source_of(ids))
        self.born.append(seq)
        return seq


def source_of(text: Seq[int]) -> list[int]:
    return SOURCES[text[0] % len(SOURCES)]


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[SourceCase]:
    name, of = request.param, target(request.param)
    rules, of.sources.rules = of.sources.rules, None  # raw logits
    with Wide():
        conformance_case = SourceCase(of, lambda texts: [logits(name, source_of(ids), ids) for ids in texts], CLOSE)
        conformance_case.padding = model(name).config.pad_token_id
        yield conformance_case
        conformance_case.close()
    of.sources.rules = rules


@pytest.mark.parametrize("case", ENCODER_DECODERS, indirect=True)
def test_after_rollbacks_of_differing_depth_the_caches_are_those_of_a_fresh_prefill(case: SourceCase) -> None:
    seq = case.sequence(1)
    case.roll_back(seq)
    case.check_held(seq)


@pytest.mark.parametrize("case", ["mt5", "bart", "mvp"], indirect=True)
class TestConformance(Conformance):
    """What every target promises."""


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, -1, 2]], ids=["chain", "two chains"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_draft_token_that_overflows_spoils_no_row_that_does_not_see_it(name: str, parents: list[int]) -> None:
    module = random_encoder_decoder(name)
    of, spoilt = of_module(module), 8
    with torch.no_grad():
        module.get_decoder().get_input_embeddings().weight[spoilt] = torch.inf
    texts = [([11, 9, 33, 5], SOURCES[0]), ([12, 4], SOURCES[2])]
    assert_spoils_only_what_sees_it(of, spoilt, parents, texts)


def test_a_source_on_which_the_encoder_overflows_ends_its_request_alone() -> None:
    module = random_encoder_decoder("pegasus")
    of, spoilt = of_module(module), SOURCES[3][0]
    with torch.no_grad():
        module.get_encoder().get_input_embeddings().weight[spoilt] = torch.inf
    llm = LLM(of, "ngram", draft_tokens=2, max_batch=5)
    engine, seqs = llm.engine(), [llm.sequence(s, SamplingParams(max_tokens=TOKENS)) for s in SOURCES]
    for seq in seqs:
        engine.add(seq)
    while engine.unfinished:
        engine.step()
    assert [seq.finish == "error" for seq in seqs] == [False, False, False, True, False]
    assert [seq.output for i, seq in enumerate(seqs) if i != 3] == [t for i, t in enumerate(texts("pegasus")) if i != 3]


@pytest.mark.parametrize("name", ["t5", "bart", "m2m-100"])
def test_a_padding_token_in_a_draft_is_read_as_in_plain_decoding(name: str) -> None:
    """M2M100 numbers the positions after one otherwise if it reads several tokens at once. Here a branch lies between
    the tokens of the chain."""
    of, pad = target(name), model(name).config.pad_token_id
    chain = [9, pad, 30, pad, 12]
    one, alone = start_sequence(of, SOURCES[0]), start_sequence(of, SOURCES[0])
    tree = Draft.trees([([9, pad, pad, 30, 8, pad, 12], [-1, -1, 0, 2, 1, 3, 5])])
    together = of.run([one], tree).logits[[0, 1, 3, 4, 6, 7]].clone()
    apart = []
    for token in [None, *chain]:
        if token is not None:
            alone.kv_len = len(alone.tokens)
            alone.tokens.append(token)
        apart.append(of.run([alone], Draft.empty(1)).logits[0].clone())
    assert_close(together, torch.stack(apart))
    for seq in (one, alone):
        of.release(seq.id)


@pytest.mark.parametrize(("name", "temperature"), [("t5", 0.05), ("bart", 0.3)])
def test_every_text_is_exactly_as_probable_as_in_plain_decoding(name: str, temperature: float) -> None:
    """With a draft model."""
    of, draft, source = target(name), of_module(random_encoder_decoder(name, noise=0.1)), SOURCES[2]

    class Plain(Oracle):
        def logits(self, tokens: Seq[int]) -> torch.Tensor:
            return logits(name, source, [*of.encoder.start, *tokens])[-1]

    params, after = SamplingParams(temperature, top_k=3, max_tokens=6), 1 + len(of.encoder.start) - len(source)
    (texts,) = enumerate_texts(lambda: LLM(of, draft, draft_tokens=2), source, params, after=after, steps=1)
    texts.check(Plain(of), (), params)
    assert 0 < texts.accepted < texts.proposed


def test_sources_that_are_encoded_together_are_those_of_similar_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.targets.huggingface.encoded_sources.MOST_ENCODED", 10)
    with passes_of(model("bart").get_encoder()) as counted:
        done = LLM(target("bart")).generate(SOURCES, SamplingParams(max_tokens=TOKENS))
    assert counted == [2, 2, 1]  # lengths 1 and 3, 4 and 5, 8
    assert [c.token_ids for c in done] == texts("bart")


class Crowded(torch.nn.Module):
    """An encoder that makes something else of sources where others are beside them. nan: with at least so much padding,
    as T5Gemma in float64 where padding sees nothing in its window; 0: always, a little."""

    def __init__(self, inner: Any, nan: int):
        super().__init__()
        self.inner, self.nan = inner, nan

    def forward(self, **given: Any) -> Any:
        out = self.inner(**given)
        padded = (given["attention_mask"] == 0).sum(1)  # [B]
        if self.nan:
            out.last_hidden_state = out.last_hidden_state.masked_fill((padded >= self.nan)[:, None, None], torch.nan)
        elif len(padded) > 1:
            out.last_hidden_state = out.last_hidden_state * 1.1
        return out


@pytest.mark.parametrize(("nan", "together"), [(0, False), (4, True)])
def test_where_padding_changes_what_the_encoder_makes_each_source_is_encoded_alone(nan: int, together: bool) -> None:
    module = random_encoder_decoder("t5")
    crowded = Crowded(module.encoder, nan)
    module.get_encoder = lambda: crowded
    runner = of_module(module)
    assert isinstance(runner, EncoderDecoder)
    assert isinstance(runner.runner, Decoder)
    assert runner.sources.together == together
    assert [c.token_ids for c in LLM(runner).generate(SOURCES, SamplingParams(max_tokens=TOKENS))] == texts("t5")


def test_the_first_step_does_not_teach_what_a_plain_step_costs() -> None:
    """It reads the source, too."""
    llm = LLM(target("t5"), "ngram", max_batch=2)
    learned = []
    llm.lengths.learn = lambda step: learned.append(step)  # type: ignore[method-assign, union-attr]
    llm.generate(SOURCES[:1], SamplingParams(max_tokens=3))
    assert sum(1 for _ in learned) < 3


def test_a_fault_within_a_pass_leaves_no_half_filled_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    of, module = target("t5"), model("t5")
    seq = start_sequence(of, SOURCES[0])
    layer = module.decoder.block[1].layer[1]
    hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        of.run([seq], Draft.empty(1))
    hook.remove()
    assert_close(of.run([seq], Draft.empty(1)).logits, logits("t5", SOURCES[0], seq.tokens))
    of.release(seq.id)


def test_two_threads_share_a_target() -> None:
    """One reads a source while the other is within a pass, in which the model has another attention."""
    of, module, faults = target("bart"), model("bart"), list[BaseException]()
    one, other = start_sequence(of, SOURCES[0]), start_sequence(of, SOURCES[1])

    def run_other() -> None:
        try:
            of.run([other], Draft.empty(1))
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run_other)

    def meanwhile(*_: Any) -> None:
        hook.remove()
        thread.start()
        thread.join(0.2)  # it waits for this pass

    hook = module.model.decoder.layers[0].register_forward_pre_hook(meanwhile)
    of.run([one], Draft.empty(1))
    thread.join()
    assert not faults
    for seq in (one, other):
        of.release(seq.id)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_beams_are_those_of_transformers_and_share_what_was_encoded(name: str) -> None:
    """BART's last token is forced."""
    llm = LLM(target(name))
    params = BeamParams(beams=3, n=3, max_tokens=6)
    with passes_of(model(name).get_encoder()) as counted:
        found = llm.beam_search(SOURCES[:2], params)
    assert counted == [2]
    assert keeps_nothing(target(name))
    for source, beams in zip(SOURCES, found, strict=False):
        ids = torch.tensor([source])
        wanted = model(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=3, num_return_sequences=3,
            max_new_tokens=6,
        )  # fmt: skip
        assert [beam.token_ids for beam in beams] == [row[1:].tolist() for row in wanted]


@pytest.mark.parametrize(("name", "length"), [("mt5", 1), ("bart", 4), ("m2m-100", 7)])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, length: int) -> None:
    """So its caches never miss or keep a token; it encodes each source once, too."""
    module = random_encoder_decoder(name)
    module.generation_config.forced_eos_token_id = None  # a draft model does not know where the text ends
    wanted = generated(module, SOURCES, 9)
    with passes_of(module.get_encoder()) as counted:
        llm = LLM(of_module(module), of_module(module), draft_tokens=length, max_batch=5)
        before = sum(counted)
        done = llm.generate(SOURCES, SamplingParams(max_tokens=9))
    assert [c.token_ids for c in done] == wanted
    assert sum(counted) - before == 10
    for one in done:
        assert one.stats.accepted == one.stats.proposed > 0
    drafter = llm.drafter
    assert keeps_nothing(drafter.model)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_lookups_copy_from_the_source(drafter: str) -> None:
    """A text that repeats its source is drafted from its first token on."""
    source = [20, 31, 42, 53, 14, 25, 36, 47, 58, 9]
    llm = LLM(target("t5"), drafter, draft_tokens=4)
    seq = llm.sequence(source, SamplingParams(max_tokens=30))
    seq.kv_len = len(seq.tokens)
    seq.tokens.append(source[0])
    assert llm.drafter.propose([seq], [Budget(4)]).ids[:3] == source[1:4]
    seq.tokens += [source[1], 7, 8, source[5], source[6]]
    assert llm.drafter.propose([seq], [Budget(4)]).ids[:3] == source[7:10]


def test_a_draft_model_of_another_kind_is_refused() -> None:
    for of, draft, says in (
        (target("t5"), llama(), "the target is an encoder-decoder, but the draft model is a decoder"),
        (llama(), model("t5"), "the target is a decoder, but the draft model is an encoder-decoder"),
        (target("t5"), target("mbart"), r"begin with the ids \(0,\), those of the draft model with \(2,\)"),
    ):
        with pytest.raises(PairError, match=says):
            LLM(of, draft)
    with pytest.raises(PairError, match="draft_tokenizer='string' does not work with an encoder-decoder"):
        LLM(target("t5"), llama(), draft_tokenizer="string")


def test_a_source_that_is_too_long_for_the_draft_model_is_decoded_without_it(caplog: pytest.LogCaptureFixture) -> None:
    draft = of_module(random_encoder_decoder("pegasus"))
    long = [[(3 * i + 5) % VOCAB for i in range(70)], SOURCES[0]]
    unbounded = of_module(random_encoder_decoder("t5"))  # its sources have no bound
    done = LLM(unbounded, draft, draft_tokens=3).generate(long, SamplingParams(max_tokens=6))
    assert [c.token_ids for c in done] == generated(model("t5"), long, 6)
    assert done[0].stats.proposed == 0 < done[1].stats.proposed
    assert all(c.stats.drafter_faults == 0 for c in done)
    assert sum("a source has 70" in r.getMessage() for r in caplog.records) == 1


def test_a_source_that_is_too_long_or_empty_and_a_request_of_the_other_kind_are_refused() -> None:
    llm = LLM(target("bart"))
    with pytest.raises(PromptError, match="the source has 65 tokens, but the context of the target's encoder holds 64"):
        llm.generate([[5] * 65])
    with pytest.raises(PromptError, match="empty"):
        llm.generate([[]])
    assert len(llm.generate([[5] * 64], SamplingParams(max_tokens=100))[0].token_ids) == 63  # the decoder's context
    engine = LLM(target("t5")).engine()
    with pytest.raises(TargetError, match="without a source cannot run on an encoder-decoder"):
        engine.add(Sequence([0]))
    other = LLM(llama()).engine()
    with pytest.raises(TargetError, match="with a source cannot run on a target without an encoder"):
        other.add(SourcedSequence([0], source=[5]))
    with pytest.raises(TargetError, match="has no source"):
        target("t5").run([Sequence([0])], Draft.empty(1))


def test_experts_that_take_a_limited_number_of_tokens_get_those_of_one_request_at_a_time() -> None:
    """In one forward for all, a request could take the places of another."""
    module = random_encoder_decoder("t5")
    module.decoder.block[1].expert_capacity = 4
    of = of_module(module)
    assert not isinstance(of.runner, Decoder)


def test_a_fixed_kv_cache_custom_generate_and_a_model_without_a_first_token_are_refused() -> None:
    with pytest.raises(ParameterError, match="leave kv_tokens out"):
        LLM(model("t5"), kv_tokens=100)
    with pytest.raises(ParameterError, match="a T5ForConditionalGeneration is not supported by custom_generate"):
        model("t5").generate(torch.tensor([SOURCES[0]]), custom_generate=slipstream.custom_generate(), max_new_tokens=3)
    module = random_encoder_decoder("t5")
    module.config.decoder_start_token_id = module.generation_config.decoder_start_token_id = None
    with pytest.raises(UnsupportedModelError, match="decoder_start_token_id"):
        LLM(module)


def test_the_model_is_left_as_it_was() -> None:
    module = random_encoder_decoder("pegasus")
    ids = torch.tensor([SOURCES[2]])
    with torch.no_grad():
        wanted = module(input_ids=ids, decoder_input_ids=ids).logits
        LLM(module).generate([SOURCES[0]], SamplingParams(max_tokens=3))
        assert torch.equal(module(input_ids=ids, decoder_input_ids=ids).logits, wanted)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
