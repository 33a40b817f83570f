"""Several steps of plain decoding in one call: text, counters, stream and KV are those of one step at a time."""

import random
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import replace

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.decode_steps import best_steps_per_call
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits
from slipstream.core.plain import stride
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.none import NoDrafter
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.timed_step import Step
from slipstream.errors import TargetError
from tests.core.changed_parameters import CHANGED, visible
from tests.core.fake_drafters import depths
from tests.spying import spied
from tests.tiny_checkpoints import CONTEXT, make_model, make_tokenizer

pytest.importorskip("numba")

PROMPTS = ["def add(", "for name in", "café", "x"]
STEPS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With shapes that the native kernels support."""
    folder = tmp_path_factory.mktemp("target")
    make_model(folder, hidden_size=64, intermediate_size=96)
    make_tokenizer(folder)
    llm = LLM(folder, executor="native", threads=1, draft_tokens=4)
    assert llm.target.capabilities.multi_step.steps_per_call > STEPS
    llm.target.capabilities.multi_step.steps_per_call = STEPS
    return llm


@pytest.fixture
def calls(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of each call of `decode_steps`."""
    return spied(monkeypatch, engine.target.capabilities.multi_step, "decode_steps", lambda seqs, steps, *rest: steps)


@pytest.fixture
def one_by_one(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    """`LLM.generate` of the same engine, one step at a time."""

    def generate(prompts, params):
        with monkeypatch.context() as patch:
            patch.setattr(engine.target.capabilities.multi_step, "steps_per_call", 1)
            return engine.generate(prompts, params)

    return generate


def greedy(n: int = 30, **more) -> SamplingParams:
    return SamplingParams(max_tokens=n, **{"ignore_eos": True} | more)


def same(completions: Seq, wanted: Seq) -> None:
    assert list(map(visible, completions)) == list(map(visible, wanted))


@pytest.mark.parametrize("n", [1, 2, 3, STEPS, STEPS + 1, STEPS + 2, 2 * STEPS + 1, 40])
def test_max_tokens_is_met_exactly(engine, calls, one_by_one, n):
    completions = engine.generate(PROMPTS[:1], greedy(n))
    assert len(completions[0].token_ids) == n
    assert sum(calls) == (n - 1 if (n - 1) % STEPS != 1 else n - 2), "nothing is run in vain"
    same(completions, one_by_one(PROMPTS[:1], greedy(n)))


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_sampled_texts_are_those_of_one_step_at_a_time(engine, calls, one_by_one, monkeypatch, rule):
    """Each token is drawn with the number of its own position, so the same seed gives the same text."""
    monkeypatch.setattr(engine, "_rule", RULES[rule])
    for seed in range(6):
        params = [greedy(25 + i, temperature=0.6 + 0.4 * i, seed=seed + i) for i in range(len(PROMPTS))]
        same(engine.generate(PROMPTS, params), one_by_one(PROMPTS, params))
    assert STEPS in calls


def test_whatever_is_asked_texts_and_their_ends_are_those_of_one_step_at_a_time(engine, calls, one_by_one, monkeypatch):
    """Random requests in batches of random size: greedy and sampled ones, some with a parameter changed, with stop ids
    and an EOS at random places of a call, and of different lengths, so that they end at different steps."""
    rng, texts = random.Random(0), [c.token_ids for c in engine.generate(PROMPTS, greedy())]
    several = 0
    for _ in range(30):
        ends = [rng.choice(text) for text in texts]
        monkeypatch.setattr(engine.target, "config", replace(engine.target.config, eos_ids=(ends[0],)))
        monkeypatch.setattr(engine, "max_batch", rng.choice((1, 2, 8)))
        each = []
        for end in ends:
            name = rng.choice([*CHANGED, *[None] * len(CHANGED)])
            params = greedy(rng.randint(1, 30), temperature=rng.choice((0.0, 0.0, 0.8)), seed=rng.randrange(9))
            params = replace(params, ignore_eos=rng.random() < 0.5, logprobs=rng.choice((None, 2)))
            params = params if name is None else replace(params, **{name: CHANGED[name]})
            each.append(replace(params, stop_token_ids=(end,)) if rng.random() < 0.3 else params)
        calls.clear()
        completions = engine.generate(PROMPTS, each)
        several += bool(calls)
        same(completions, one_by_one(PROMPTS, each))
    assert several > 5


@pytest.mark.parametrize("edit", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_requests_that_edit_the_distribution_take_one_step_at_a_time(engine, calls, edit):
    engine.generate(PROMPTS[0], greedy(20, temperature=1.0, seed=1, **edit))
    assert not calls


def test_a_stop_string_ends_text_and_stream_at_every_place_of_a_call(engine, one_by_one):
    whole = engine.generate(PROMPTS[1], greedy(40))[0].text
    for at in range(1, 3 * STEPS):
        params = greedy(40, stop=[whole[at : at + 2]])
        completion = engine.generate(PROMPTS[1], params)
        same(completion, one_by_one(PROMPTS[1], params))
        assert completion[0].finish_reason == "stop"
        assert "".join(chunk.text for chunk in engine.stream(PROMPTS[1], params)) == completion[0].text


def test_the_end_of_the_context_is_reached_and_never_passed(engine, calls, one_by_one):
    prompt = [5] * (CONTEXT - 11)
    completion = engine.generate(prompt, greedy(100))
    assert (len(completion[0].token_ids), completion[0].finish_reason) == (11, "length")
    assert calls == [STEPS, 2]
    same(completion, one_by_one(prompt, greedy(100)))


def test_a_prompt_that_waits_goes_step_by_step(engine):
    seq = engine.sequence(PROMPTS[0], greedy())
    how = (engine.target.capabilities.multi_step, engine.drafter)
    assert stride([seq], *how, RULES["rejection"], [Budget(4)]) == 1, "the prompt is pending"
    seq.kv_len = len(seq.tokens) - 1
    assert stride([seq], *how, RULES["rejection"], [Budget(4)]) == STEPS


class Noting(NoDrafter):
    """Never proposes, but does not declare it; records what it observes."""

    name = "noting"

    def __init__(self, taps: tuple[int, ...] = ()):
        self.traits, self.asked = DrafterTraits(taps=taps), 0
        self.seen: list[tuple[int, int, list[int], int]] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        self.asked += any(depths(budgets))
        return super().propose(seqs, budgets)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        assert len(out.logits) == len(seqs)
        for b, seq in enumerate(seqs):
            assert seq.kv_len == len(seq.tokens) - 1
            assert seq.tokens[-1] == verdict.next[b] == int(out.logits[b].argmax())
        self.seen.append((seqs[0].id, len(seqs[0].tokens), list(verdict.next), len(draft)))


@pytest.mark.parametrize("taps", [(), (1,)])
def test_a_drafter_that_may_propose_or_reads_hidden_states_is_asked_before_every_token(engine, calls, taps):
    engine.use(Noting(taps))
    try:
        engine.generate(PROMPTS[:1], greedy(12))
        assert engine.drafter.asked == 10  # neither for the first token nor for the last
    finally:
        engine.use(None)
    assert not calls


class NoneYet(DraftLengths):
    """Lengths that are always 0, though the drafter may be asked at any time."""

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
        return [Budget(0)] * len(ids)

    def learn(self, step: Step) -> None:
        pass


def test_without_a_budget_a_drafter_observes_each_token_as_in_single_steps(engine, calls, one_by_one, monkeypatch):
    monkeypatch.setattr(engine, "draft_tokens", NoneYet())
    shown = []
    for generate in (engine.generate, one_by_one):
        engine.use(Noting())
        try:
            generate(PROMPTS, [greedy(9 + b) for b in range(4)])
            shown.append([entry[1:] for entry in engine.drafter.seen])
        finally:
            engine.use(None)
    assert shown[0] == shown[1]
    assert calls


class Reading(Noting):
    """Keeps the hidden states of each text that it is shown, by place."""

    def __init__(self) -> None:
        super().__init__((1, -1))
        self.states: dict[tuple[int, ...], dict[int, list[torch.Tensor]]] = {}

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        super().observe(seqs, draft, out, verdict)
        for b, seq in enumerate(seqs):
            rows = range(out.splits[b], out.splits[b + 1])
            text = self.states.setdefault(tuple(seq.tokens[: seq.prompt]), {})
            for place, row in enumerate(rows, seq.kv_len - len(rows)):
                text[place] = [states[row].clone() for states in out.hidden.values()]


def test_several_steps_give_a_drafter_the_hidden_states_of_single_ones(engine, calls, one_by_one, monkeypatch):
    """Bit for bit, of every token that was read, up to the end of each text. Nothing is read twice."""
    monkeypatch.setattr(engine, "draft_tokens", NoneYet())
    shown = []
    for generate in (engine.generate, one_by_one):
        engine.use(Reading())
        try:
            done = generate(PROMPTS, [greedy(9 + b) for b in range(4)])
            shown.append(engine.drafter.states)
            assert len(engine.drafter.seen) <= (5 if generate == engine.generate else 13)
        finally:
            engine.use(None)
        for each in done:
            read = len(each.prompt_token_ids) + len(each.token_ids) - 1
            assert sorted(shown[-1][tuple(each.prompt_token_ids)]) == list(range(read))
    assert calls
    several, single = shown
    assert several.keys() == single.keys()
    for prompt, states in several.items():
        for place, read in states.items():
            assert all(map(torch.equal, read, single[prompt][place])), place


def test_hidden_states_of_several_steps_are_refused_where_several_tokens_are_pending(engine):
    seq = engine.sequence(PROMPTS[0], greedy())
    with pytest.raises(TargetError, match="several tokens are pending"):
        engine.target.capabilities.multi_step.decode_steps([seq], 2, taps=(1,))
    engine.target.release(seq.id)


def test_a_call_with_logits_that_are_not_finite_falls_back_to_single_steps(engine, one_by_one, monkeypatch):
    """Errors name the sequence. Tokens after a stop cause none."""

    def fails(*_):
        raise TargetError("not finite")

    monkeypatch.setattr(engine.target.capabilities.multi_step, "decode_steps", fails)
    same(engine.generate(PROMPTS[:1], greedy()), one_by_one(PROMPTS[:1], greedy()))


def run_steps(engine: LLM, seqs: list[Sequence]) -> Iterator[list[Sequence]]:
    for batch in engine.decode(seqs):
        for seq in batch:
            assert seq.kv_len == len(seq.tokens) - len(seq.pending)
            assert len(seq.pending) == 1
        yield batch


def test_the_kv_is_that_of_a_fresh_prefill(engine, calls):
    seqs = [engine.sequence(prompt, greedy(40)) for prompt in PROMPTS]
    steps = run_steps(engine, seqs)
    for _ in range(4):
        next(steps)
    kept = [engine.target.executor.kv(seq.id, seq.kv_len) for seq in seqs]
    steps.close()
    assert calls == [STEPS] * 3
    for seq, kv in zip(seqs, kept, strict=True):
        fresh = engine.sequence(seq.tokens[:-1], greedy(2))
        engine.target.run([fresh], Draft.empty(1))
        assert torch.equal(kv, engine.target.executor.kv(fresh.id, seq.kv_len))
        engine.target.release(fresh.id)


@pytest.mark.parametrize(("nbytes", "steps"), [(10**6, 12), (28_337_664, 12), (220_000_000, 5), (5 * 10**9, 1)])
def test_a_small_model_takes_more_steps_a_call_than_a_large_one(nbytes, steps):
    assert best_steps_per_call(nbytes) == steps
