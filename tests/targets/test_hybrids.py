"""Decoders with recurrent layers, through an `LLM`: nothing but the accepted tokens decides a text."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream import LLM, BeamParams, SamplingParams
from slipstream.core.decode_steps import DecodedSteps
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.engine.engine import Engine
from slipstream.errors import PairError, TargetError
from slipstream.executor.executor import Batch
from slipstream.targets.decoder import Decoder
from slipstream.targets.describe import as_target
from slipstream.targets.target_costs import measure_costs
from tests.checkpoints.tiny_hybrids import FILES
from tests.enumeration import enumerate_texts
from tests.oracle import Oracle

if TYPE_CHECKING:
    from slipstream.drafters.draft_plan import DraftArgument

HYBRIDS = ("lfm2", "qwen3.5", "granite-hybrid", "falcon-h1")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Callable[[str], Decoder]:
    return cache(lambda family, **how: Decoder.load(checkpoint(family), "native", torch.float32, **how))


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(i * i * 7 + i * seed + seed) % 61 + 3 for i in range(count)]


def drain(engine: Engine, *texts: list[int]) -> list[Sequence]:
    """Requests for these prompts, which run together until all have ended."""
    seqs = [Sequence(list(text), GREEDY) for text in texts]
    for seq in seqs:
        engine.add(seq)
    while engine.unfinished:
        engine.step()
    return seqs


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_what_is_sampled_has_the_distribution_of_the_target(
    family: str, rule: str, load: Callable[..., Decoder]
) -> None:
    """All outputs of a request with a draft model and with a lookup, enumerated."""
    of, draft_model, params = (
        load(family),
        load(family, role="draft"),
        SamplingParams(0.7, top_k=3, max_tokens=4, ignore_eos=True),
    )
    for draft in (draft_model, "ngram"):
        make = lambda draft=draft: LLM(of, draft, draft_tokens=2, rule=rule)  # type: ignore[misc]  # noqa: E731
        (texts,) = enumerate_texts(make, [5, 9, 33, 5, 9], params, after=1, steps=1, rounding=1e-5)
        texts.check(Oracle(of), [5, 9, 33, 5, 9], params)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_sampled_with_an_mtp_layer_has_the_distribution_of_the_target(rule: str) -> None:
    of, params = as_target(FILES / "qwen35.gguf"), SamplingParams(0.7, top_k=3, max_tokens=4, ignore_eos=True)
    for draft in ("mtp", ("mtp", {"draft_vocab": 16})):
        make = lambda draft=draft: LLM(of, draft, draft_tokens=2, rule=rule)  # type: ignore[misc]  # noqa: E731
        (texts,) = enumerate_texts(make, [5, 9, 13, 5, 9], params, after=1, steps=1, rounding=1e-5)
        texts.check(Oracle(of), [5, 9, 13, 5, 9], params)


@pytest.mark.parametrize("draft", ["suffix", "mtp", ["ngram", ("mtp", {"draft_vocab": 16})], FILES / "lfm2.gguf"])
def test_coupled_texts_of_a_hybrid_are_those_of_plain_decoding(draft: "DraftArgument") -> None:
    llm, texts = LLM(FILES / "qwen35.gguf", draft, rule="coupled"), [[5, 9, 13, 5, 9], [7], [3] * 40]
    params = SamplingParams(1.0, max_tokens=24, ignore_eos=True, seed=5)
    drafted = llm.generate(texts, params)
    llm.use(None)
    assert [one.token_ids for one in llm.generate(texts, params)] == [one.token_ids for one in drafted]


def read_one_by_one(target: Decoder, tokens: list[int]) -> dict[tuple[int, ...], bytes]:
    """Each beginning of a text -> the states after it."""
    states, after = target.executor._states, dict[tuple[int, ...], bytes]()  # type: ignore[attr-defined]
    for i, token in enumerate(tokens):
        target.executor.forward(Batch((1 << 40,), torch.tensor([token]), (i,), (0, 1), (i,), (None,), (0,), (1,)))
        held = states._held[1 << 40]
        after[tuple(tokens[: held.committed[0]])] = held.cells.tobytes()
    target.executor.release(1 << 40)
    return after


@pytest.mark.parametrize("draft", ["suffix", ["ngram", "mtp"], FILES / "lfm2.gguf"])
@pytest.mark.parametrize("kv_dtype", ["float32", "q8_0"])
def test_states_after_every_step_are_bitwise_those_of_the_text_read_one_by_one(
    draft: "DraftArgument", kv_dtype: str
) -> None:
    """In a batch with drafts of many lengths, a preemption, a prefix hit and a request that is aborted."""
    llm = LLM(FILES / "qwen35.gguf", draft, max_batch=3, kv_tokens=160, kv_dtype=kv_dtype, threads=2, draft_tokens=5)
    engine, states = llm.engine(), llm.target.executor._states  # type: ignore[attr-defined]
    shared = [(i * i * 7) % 29 + 3 for i in range(64)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    seqs = [
        Sequence([*shared[:cut], *range(3, 3 + more)], params)
        for cut, more in ((0, 29), (64, 3), (0, 25), (64, 9), (64, 5))
    ]
    seen, steps = dict[tuple[int, ...], bytes](), 0
    for seq in seqs[:-1]:
        engine.add(seq)
    while engine.unfinished:
        engine.step()
        steps += 1
        if steps == 12:
            engine.abort(seqs[1])
        if not engine.unfinished and not seqs[-1].finish:
            engine.add(seqs[-1])
        for seq in (seq for seq in seqs if seq.id in states._held):
            held = states._held[seq.id]
            seen[tuple(seq.tokens[: held.committed[0]])] = held.cells.tobytes()
    assert engine.stats.preemptions
    assert seqs[-1].cached
    assert sum(seq.stats.proposed for seq in seqs)
    expected = {key: cells for seq in seqs for key, cells in read_one_by_one(llm.target, seq.tokens).items()}
    assert len(seen) > 30
    assert all(cells == expected[key] for key, cells in seen.items())


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_text_that_begins_like_an_earlier_one_is_that_of_the_request_alone(
    family: str, load: Callable[..., Decoder]
) -> None:
    """The states of a prompt are kept at its end, and where another prompt has parted from it."""
    llm, shared = LLM(load(family), "suffix"), prompt(70)
    texts = [shared + prompt(60, seed) for seed in (1, 2, 3)]
    alone = [llm.generate([text], GREEDY)[0].token_ids for text in texts]
    engine = llm.engine()
    for i, (text, wanted) in enumerate(zip([*texts, *texts], [*alone, *alone], strict=True)):
        (seq,) = drain(engine, text)
        assert seq.tokens[len(text) :] == wanted
        assert seq.cached == (0, 0, 64, 128, 128, 128)[i]


@pytest.mark.parametrize("family", HYBRIDS)
def test_requests_that_are_preempted_decode_what_they_decode_alone(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    llm = LLM(checkpoint(family), "ngram", executor="native", kv_tokens=128, max_batch=4)
    texts = [prompt(30, seed) for seed in range(4)]
    alone = [llm.generate([text], SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids for text in texts]
    together = llm.generate(texts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [one.token_ids for one in together] == alone


@pytest.mark.parametrize("kv_tokens", [None, 2048])
def test_requests_without_room_for_their_states_wait_and_lose_nothing(
    kv_tokens: int | None, checkpoint: Callable[[str], Path]
) -> None:
    """Snapshots of earlier texts make way; beams, which cannot wait, are refused, and requests go on."""
    llm = LLM(checkpoint("qwen3.5"), "ngram", executor="native", max_batch=4, kv_tokens=kv_tokens)
    params, texts = SamplingParams(max_tokens=8, ignore_eos=True), [prompt(40, seed) for seed in range(6)]
    alone = [llm.generate([text], params)[0].token_ids for text in texts]
    states = llm.target.executor._states  # type: ignore[attr-defined]
    states.room = 2 * states.bytes_each + states.snapshot_bytes
    engine = llm.engine()
    seqs = [Sequence(list(text), params) for text in texts]
    for seq in seqs:
        engine.add(seq)
    while engine.unfinished:
        assert 1 <= len({seq.id for seq in engine.step()}) <= 2
        assert states.nbytes <= states.room
    assert [seq.tokens[len(text) :] for seq, text in zip(seqs, texts, strict=True)] == alone
    llm.use(None)
    with pytest.raises(
        TargetError, match=r"no memory for the recurrent states of sequence \d+: a sequence needs \S+ kB.* max_batch"
    ):
        llm.beam_search([texts[0]], BeamParams(beams=3, max_tokens=8))
    assert llm.generate(texts[:1], params)[0].token_ids == alone[0]
    states.room = states.bytes_each - 1
    (refused,) = drain(llm.engine(), texts[0])
    assert (refused.finish, type(refused.error)) == ("error", TargetError)


def test_a_preempted_request_waits_for_room_for_its_state(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("lfm2"), executor="native", max_batch=3)
    texts = [prompt(40, seed) for seed in range(3)]
    alone = [llm.generate([text], GREEDY)[0].token_ids for text in texts]
    engine, states = llm.engine(), llm.target.executor._states  # type: ignore[attr-defined]
    seqs = [Sequence(list(text), GREEDY) for text in texts]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    states.room = 2 * states.bytes_each  # others took what the third one had
    while engine.unfinished:
        assert len(engine.step()) <= 2
    assert engine.stats.preemptions == 1
    assert [seq.tokens[len(text) :] for seq, text in zip(seqs, texts, strict=True)] == alone


@pytest.mark.parametrize("family", HYBRIDS)
def test_beams_fork_the_states(family: str, load: Callable[..., Decoder], checkpoint: Callable[[str], Path]) -> None:
    params = BeamParams(beams=3, max_tokens=8, ignore_eos=True)
    other = LLM(checkpoint(family), executor="transformers", dtype="float64")
    (ours,), (theirs,) = (llm.beam_search([prompt(9)], params) for llm in (LLM(load(family)), other))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_draft_model_with_recurrent_layers_takes_back_what_is_rejected(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Drafts of nine tokens of a model with other weights, most of which are rejected."""
    target, draft = checkpoint(family), checkpoint("granite-hybrid" if family == "lfm2" else "lfm2")
    llm, plain = (LLM(target, each, executor="native", draft_tokens=9) for each in (draft, None))
    texts, params = [prompt(20, seed) for seed in range(3)], SamplingParams(0.0, max_tokens=20, ignore_eos=True)
    done = llm.generate(texts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain.generate(texts, params)]
    assert all(one.stats.proposed > one.stats.accepted and not one.stats.drafter_faults for one in done)


def test_a_loaded_target_is_refused_as_draft_model(load: Callable[..., Decoder]) -> None:
    with pytest.raises(PairError, match="loaded as a target, and has recurrent layers"):
        LLM(load("lfm2"), load("lfm2"))


def test_a_step_of_a_hybrid_has_chains_only(load: Callable[..., Decoder]) -> None:
    can = load("qwen3.5").capabilities
    assert not can.trees
    assert can.early_exit is None
    seq = Sequence(prompt(5), GREEDY)
    with pytest.raises(TargetError, match=r"draft is a tree, .* Each branch of the tree would need its own copy"):
        load("qwen3.5").run([seq], Draft.trees([(torch.tensor([3, 4]), [-1, -1])]))
    load("qwen3.5").release(seq.id)


def test_the_same_prompt_of_whole_blocks_reads_its_last_block_only(load: Callable[..., Decoder]) -> None:
    engine, text = LLM(load("qwen3.5")).engine(), prompt(96, seed=9)
    assert [drain(engine, text)[0].cached for _ in range(2)] == [0, 64]


@pytest.mark.parametrize("plain", [False, True])
def test_passes_of_a_hybrid_are_timed_after_a_text_into_which_it_does_not_go_back(
    load: Callable[..., Decoder], plain: bool
) -> None:
    target = load("granite-hybrid")
    assert measure_costs(target, (1, 2, 4), past=60, repeats=1, plain=plain).rows == (1, 2, 4)


class TestAStateThatCannotGoBack:
    """Steps that are run again, which a KV cache allows and a state does not: no request is lost."""

    TEXTS = ([5, 9, 13, 5, 9], [7], [3 + i * i % 29 for i in range(80)])
    PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)

    def run(self, llm: LLM, change: Callable[[Engine], object] = lambda engine: None) -> Engine:
        """Decode the texts, which are those of plain decoding."""
        plain = [one.token_ids for one in LLM(llm.target).generate(self.TEXTS, self.PARAMS)]
        engine = llm.engine()
        change(engine)
        seqs = [Sequence(list(text), self.PARAMS) for text in self.TEXTS]
        for seq in seqs[:-1]:
            engine.add(seq)
        engine.step()
        engine.add(seqs[-1])  # which is read in pieces, because others decode
        while engine.unfinished:
            engine.step()
        assert [seq.error for seq in seqs] == [None] * len(seqs)
        assert [seq.output for seq in seqs] == plain
        return engine

    @pytest.mark.parametrize("draft", ["mtp", ["suffix", "mtp"]])
    def test_plain_steps_that_are_timed_beside_a_head(
        self, draft: "DraftArgument", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a head's hidden states these tokens would have to be read again."""
        turns = itertools.count()

        def change(engine: Engine) -> None:
            choose = lambda ids, *_: [Budget(3 * (next(turns) % 9 == 8))] * len(ids)  # noqa: E731
            monkeypatch.setattr(engine.lengths, "choose", choose)
            monkeypatch.setattr(type(engine.lengths), "resting", False)

        self.run(LLM(FILES / "qwen35.gguf", draft), change)

    def test_a_fault_of_one_request_while_another_reads_a_long_prompt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = LLM(FILES / "qwen35.gguf", "ngram", draft_tokens=2)
        run, calls = llm.target.run, itertools.count()

        def fail(seqs: list[Sequence], *args: Any) -> TargetOut:
            out = run(seqs, *args)
            if len(seqs) > 1 and next(calls) in (0, 2, 3, 9):
                raise TargetError("something overflowed")
            return out

        assert self.run(llm, lambda _: monkeypatch.setattr(llm.target, "run", fail)).stats.errors == 0

    def test_several_steps_in_one_call_of_which_a_late_one_overflows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = LLM(FILES / "qwen35.gguf")
        executor, failed = llm.target.executor, itertools.count()  # type: ignore[attr-defined]
        decode = executor.decode_steps

        def overflow(*args: Any) -> DecodedSteps:
            decoded = decode(*args)
            if next(failed) < 2:
                raise TargetError("something overflowed")
            return decoded  # type: ignore[no-any-return]

        self.run(llm, lambda _: monkeypatch.setattr(executor, "decode_steps", overflow))
        assert next(failed) > 2
