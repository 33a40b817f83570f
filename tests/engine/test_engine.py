"""`Engine`: whatever joins, leaves, is preempted or fails, each request decodes what it would decode alone."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream.core import step as steps
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.core.target import TargetOut
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.draft_trials import State
from slipstream.engine.engine import Engine
from slipstream.engine.timed_step import Step
from slipstream.errors import RuleError, TargetError
from slipstream.verify.seeded_lengths import SeededLengths
from tests.drafters.fakes import MultiStepToy
from tests.drafters.makers import maker
from tests.drafters.scripted_drafters import ScriptedDrafter
from tests.end_to_end.sampling import Sampled, hurry
from tests.engine.paged_toy import PagedToy
from tests.oracle import Oracle, joint_distribution
from tests.significance import assert_distribution, beginnings
from tests.spying import spied
from tests.targets.toy import ToyTarget

V = 5
DRAFTERS = ("model", "ngram", "suffix", "lookahead", "eagle3", "dflash", "medusa", "hybrid")


def toy(**how: object) -> PagedToy:
    return PagedToy(V, order=3, seed=21, sharpness=1.5, **how)


def engine(target: ToyTarget, drafter: Drafter | None = None, **how: object) -> Engine:
    options = {"rule": RULES["rejection"], "draft_tokens": 4, "max_batch": 4} | how
    return Engine(target, drafter or NoDrafter(), **options)  # type: ignore[arg-type]


def drain(toy_engine: Engine, *seqs: Sequence) -> None:
    """Add sequences, and step until nothing is left to do."""
    for seq in seqs:
        toy_engine.add(seq)
    while toy_engine.unfinished:
        toy_engine.step()


def taps_asked(target: ToyTarget) -> list[bool]:
    """Whether each run from now on asks for hidden states."""
    asked, run = list[bool](), target.run
    target.run = lambda seqs, draft, taps=(): asked.append(bool(taps)) or run(seqs, draft, taps)  # type: ignore
    return asked


def alone(seq: Sequence) -> list[int]:
    """What the same request decodes without others, drafts, chunks or a prefix cache."""
    target = ToyTarget(V, order=3, seed=21, sharpness=1.5)
    copy = Sequence(seq.tokens[: seq.prompt], seq.params, stop_ids=seq.stop_ids, context=seq.context)
    only = engine(target, rule=seq.rule)
    drain(only, copy)
    return copy.output


def prompt(draw: random.Random, most: int = 90) -> list[int]:
    """Texts with common beginnings, of any length."""
    base = random.Random(draw.randrange(3))
    shared = [base.randrange(V) for _ in range(most)][: draw.randint(1, most)]
    return shared + [draw.randrange(V) for _ in range(draw.randint(0, 3))]


def request(draw: random.Random) -> Sequence:
    """A request whose text does not depend on drafts: greedy, or under the rule `coupled`."""
    coupled = draw.random() < 0.5
    params = SamplingParams(
        temperature=draw.choice((0.7, 1.3)) if coupled else 0.0, seed=draw.randrange(100),
        max_tokens=draw.randint(1, 20), frequency_penalty=draw.choice((0.0, 0.0, 1.5)),
        draft_tokens=draw.choice((None, None, 0, 1, 3)),
    )  # fmt: skip
    seq = Sequence(prompt(draw), params, stop_ids=frozenset({draw.randrange(V)} if draw.random() < 0.5 else ()))
    seq.rule = RULES["coupled" if coupled else draw.choice(("rejection", "block", "greedy"))]
    return seq


class ErraticLengths(DraftLengths):
    """Draft lengths that change, and rest, at random: what `DraftLengths` may do, far more often.

    seed: of the choices. They depend on nothing else, so sampled texts keep their distribution."""

    def __init__(self, seed: int, most: int = 4):
        super().__init__(most)
        self._draw = random.Random(seed)
        self.rests = self.plain_steps = self.drafting_steps = 0

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
        if self._draw.random() < (0.5 if self.resting else 0.15):
            self.policy.trials.state = State.DRAFTING if self.resting else State.RESTING
            self.rests += self.resting
        most = 0 if self.resting else self._draw.choice((0, self.most, self.most))
        lengths = [min(limit, self._draw.randint(0, most)) for limit in limits]
        self.plain_steps += not any(lengths)
        self.drafting_steps += any(lengths)
        return list(map(Budget, lengths))

    def learn(self, step: Step) -> None:
        pass

    def note_join(self) -> None:
        pass


class Session:
    """An engine and random calls of it."""

    def __init__(self, seed: int, blocks: int | None, prefix_cache: bool):
        self.draw = random.Random(seed)
        self.target = toy(blocks=blocks)
        self.target.in_one_call = self.draw.random() < 0.5
        drafter = maker(self.draw.choice(DRAFTERS))(self.target)
        self.engine = engine(
            self.target, NoDrafter() if self.draw.random() < 0.1 else drafter, max_batch=self.draw.choice((1, 3, 8)),
            prompt_rows=self.draw.choice((1, 5, 64)), prefix_cache=prefix_cache,
            draft_tokens=ErraticLengths(seed) if self.draw.random() < 0.4 else 4,
        )  # fmt: skip
        self.added: list[Sequence] = []
        self.aborted: set[int] = set()

    def call(self) -> None:
        kind = self.draw.random()
        if kind < 0.3:
            seq = request(self.draw)
            most = 0 if seq.rule is RULES["block"] else self.draw.choice((None, 1, 6))  # trees are not for `block`
            self.engine.add(seq, seq.rule, most, chosen=self.draw.random() < 0.8)
            self.added.append(seq)
        elif kind < 0.35 and self.added:
            seq = self.draw.choice(self.added)
            self.engine.abort(seq)
            if not seq.finish:
                self.aborted.add(seq.id)
        elif self.engine.unfinished:
            before = [len(seq.tokens) for seq in self.added]
            ran = self.engine.step()
            assert len(ran) == len({seq.id for seq in ran}) <= self.engine.max_batch
            for seq, length in zip(self.added, before, strict=True):
                assert len(seq.tokens) == length or seq in ran
            self.target.check()

    def finish(self) -> None:
        drain(self.engine)
        self.target.check()
        assert not self.target.pool.tables
        assert (self.engine.running, self.engine.waiting) == (0, 0)
        for seq in self.added:
            if seq.id not in self.aborted:
                assert seq.finish in ("stop", "length"), seq.error
                assert seq.output == alone(seq)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([None, 64, 80]), st.booleans(), st.integers(20, 60))
def test_through_joins_aborts_chunks_preemption_and_prefixes_each_text_is_that_of_the_request_alone(
    seed: int, blocks: int | None, prefix_cache: bool, calls: int
) -> None:
    session = Session(seed, blocks, prefix_cache)
    for _ in range(calls):
        session.call()
    session.finish()


@pytest.mark.parametrize(
    ("name", "rule"), [("model", "block"), *((name, "rejection") for name in ("model", "eagle3", "dflash", "hybrid"))]
)
def test_sampled_texts_keep_their_distribution_in_any_company_and_whatever_lengths_are_chosen(name, rule):
    """G-test on the first three tokens of 2000 requests that join while others are read, decode and are preempted;
    fails at p < 1e-6."""
    target, lengths = toy(blocks=40), ErraticLengths(7)
    how = {"rule": RULES[rule], "draft_tokens": lengths, "max_batch": 16, "prompt_rows": 16, "prefix_cache": True}
    toy_engine = engine(target, maker(name)(target), **how)
    text, draw = prompt(random.Random(5), 20), random.Random(6)
    params = SamplingParams(temperature=1.0, max_tokens=4)
    seqs = [Sampled(text, params, stream=Stream(seed)) for seed in range(2000)]
    waiting = list[Sequence](seqs)
    with hurry():
        while waiting or toy_engine.unfinished:
            for _ in range(draw.randint(0, 6)):
                if waiting:
                    toy_engine.add(waiting.pop())
            if waiting and draw.random() < 0.1:
                toy_engine.add(Sequence(prompt(draw, 30), SamplingParams(max_tokens=draw.randint(20, 100))))
            toy_engine.step()
    assert toy_engine.stats.preemptions > 20
    assert min(lengths.rests, lengths.plain_steps, lengths.drafting_steps) > 5
    assert sum(seq.stats.proposed for seq in seqs) > 500
    assert_distribution(beginnings(seq.output for seq in seqs), joint_distribution(Oracle(toy()), text, params))


def test_the_youngest_request_is_preempted_and_read_again() -> None:
    """What it finds of itself in the prefix cache is not counted as cached."""
    target = toy(blocks=30)
    toy_engine = engine(target, maker("model")(target), prefix_cache=True)
    seqs = [Sequence([i, 1, 2], SamplingParams(max_tokens=60)) for i in range(3)]
    drain(toy_engine, *seqs)
    assert toy_engine.stats.preemptions
    assert [seq.output for seq in seqs] == [alone(seq) for seq in seqs]
    assert seqs[0].stats.proposed > 0
    assert not target.pool.tables
    assert [seq.cached for seq in seqs] == [0, 0, 0]
    assert (toy_engine.prefixes.queries, toy_engine.prefixes.hits) == (9, 0)


@pytest.mark.parametrize("case", ["last token alone in a chunk", "all but the last token cached"])
def test_a_seeded_text_does_not_depend_on_how_its_prompt_was_read(case: str) -> None:
    """Its first token is never drafted, so fixed draft lengths give the same drafts, however the prompt is divided."""
    text = [random.Random(5).randrange(V) for _ in range(13)]
    cached, texts = case.startswith("all"), []
    for seed in range(30):
        for alone in (True, False):
            target = toy()
            toy_engine = engine(target, maker("model")(target), prefix_cache=cached, prompt_rows=None if cached else 12)
            if not alone:  # another one is decoded while the prompt is read, or has left its prompt
                before, tokens = ([*text, 0], 1) if cached else ([1, 2], 30)
                toy_engine.add(Sequence(before, SamplingParams(max_tokens=tokens)))
                toy_engine.step()
            seq = Sequence(text, SamplingParams(temperature=1.0, seed=seed, max_tokens=8))
            drain(toy_engine, seq)
            texts.append(seq.output)
        assert seq.cached == (12 if cached else 0)
    assert texts[::2] == texts[1::2]


def test_requests_of_which_one_is_refused_leave_nothing_waiting() -> None:
    toy_engine = engine(toy(blocks=10))
    seqs = [Sequence([1], SamplingParams(max_tokens=n)) for n in (5, 50)]
    with pytest.raises(TargetError, match="may grow to 51 tokens, but the KV cache has room for 40"):
        next(toy_engine.decode(seqs))
    assert not toy_engine.unfinished


def test_a_long_prompt_does_not_stall_requests_that_decode() -> None:
    """Every step in which others decode reads at most `prompt_rows` of it, and each of them gains a token."""
    target = toy()
    toy_engine = engine(target, prompt_rows=8)
    running = [Sequence([i, 1], SamplingParams(max_tokens=60)) for i in range(3)]
    for seq in running:
        toy_engine.add(seq)
    toy_engine.step()
    long = Sequence([1, 2, 3, 4] * 25, SamplingParams(max_tokens=5))
    toy_engine.add(long)
    while not long.output:
        before = [len(seq.tokens) for seq in running]
        toy_engine.step()
        assert target.rows <= 8 + 3
        assert [len(seq.tokens) for seq in running] == [n + 1 for n in before]
    assert long.kv_len == 100


@pytest.mark.parametrize(("decoding", "rows"), [(1, 32), (8, 32), (12, 48), (16, 64), (20, 64)])
def test_the_fewer_requests_decode_the_shorter_are_the_chunks_of_prompts(decoding: int, rows: int) -> None:
    target = toy()
    toy_engine = engine(target, max_batch=32)
    for i in range(decoding):
        toy_engine.add(Sequence([i % V, 1], SamplingParams(max_tokens=60)))
    toy_engine.step()
    toy_engine.add(Sequence([1, 2, 3, 4] * 25, SamplingParams(max_tokens=5)))
    toy_engine.step()
    assert target.rows == decoding + rows


def test_a_chunk_of_a_prompt_drafts_nothing_and_gives_no_token() -> None:
    toy_engine = engine(toy(), maker("ngram")(toy()), prompt_rows=8)
    other = Sequence([1, 2], SamplingParams(max_tokens=30))
    toy_engine.add(other)
    toy_engine.step()
    seq = Sequence([1, 2, 3] * 10, SamplingParams(max_tokens=5))
    toy_engine.add(seq)
    for read in (8, 16, 24):
        toy_engine.step()
        assert (seq.kv_len, seq.output, seq.stats.steps) == (read, [], 0)
    toy_engine.step()
    assert len(seq.output) == 1
    assert (seq.stats.steps, seq.stats.proposed) == (1, 0)


@pytest.mark.parametrize("name", ["model", "eagle3", "dflash", "medusa", "ngram", "suffix"])
def test_a_warm_request_has_the_drafts_and_the_acceptance_of_a_cold_one(name: str) -> None:
    text = [random.Random(3).randrange(V) for _ in range(110)]
    counts = []
    for prefix_cache in (False, True):
        target = toy(block=32)
        toy_engine = engine(target, maker(name)(target), prefix_cache=prefix_cache)
        for ending in (3, 4):
            seq = Sequence([*text, ending], SamplingParams(max_tokens=30))
            drain(toy_engine, seq)
        counts.append((seq.output, seq.stats.proposed, seq.stats.accepted, seq.stats.steps))
        assert toy_engine.prefixes.hits == (96 if prefix_cache else 0)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("prompt_rows", [8, None])
@pytest.mark.parametrize("blocks", [None, 40])
def test_requests_with_the_same_prompt_that_come_together_read_it_once(prompt_rows, blocks):
    """n answers to one prompt. 22 tokens, blocks of 4: the first request reads all, each other one the last 2."""
    target = toy(blocks=blocks)
    toy_engine = engine(target, prefix_cache=True, prompt_rows=prompt_rows, max_batch=5)
    text = [random.Random(7).randrange(V) for _ in range(22)]
    params = SamplingParams(max_tokens=6)
    seqs = [Sequence(text, params) for _ in range(4)]
    other = Sequence([1, 2, 3], params)
    for seq in (*seqs, other):
        toy_engine.add(seq)
    rows = 0
    while toy_engine.unfinished:
        ran = toy_engine.step()
        rows += target.rows
        target.check()
        if toy_engine.stats.steps == 1:
            assert other in ran, "who comes after those that wait is not kept waiting"
    assert [seq.cached for seq in (*seqs, other)] == [0, 20, 20, 20, 0]
    assert rows == 22 + 3 * 2 + 3 + 5 * (6 - 1)
    assert [seq.output for seq in (*seqs, other)] == [alone(seq) for seq in (*seqs, other)]


def test_requests_wait_for_nothing_that_they_could_not_take_over() -> None:
    """Texts that are shorter than a block, differ in the first one, or have what they share in the cache already."""
    text = [random.Random(7).randrange(V) for _ in range(22)]
    different = [(token + 1) % V for token in text]
    for known, first, second in (
        ([], text, text[:4]),
        ([], text, different),
        (text[:12], text[:12] + different, text[:12] + text),
    ):
        target = toy()
        toy_engine = engine(target, prefix_cache=True, prompt_rows=8)
        if known:
            drain(toy_engine, Sequence([*known, 0], SamplingParams(max_tokens=1)))
        for seq in (Sequence(first), Sequence(second)):
            toy_engine.add(seq)
        toy_engine.step()
        assert toy_engine.running == 2


@pytest.mark.parametrize("tokens", range(1, 6))
def test_a_text_that_continues_another_takes_over_what_was_computed_of_it_and_no_more(tokens: int) -> None:
    """The last token of the first text was never read. It may be the last of a block of four."""
    toy_engine = engine(toy(), prefix_cache=True)
    first = Sequence([3, 1, 2], SamplingParams(max_tokens=tokens))
    drain(toy_engine, first)
    second = Sequence([*first.tokens, 4], SamplingParams(max_tokens=4))
    drain(toy_engine, second)
    assert second.cached == (len(first.tokens) - 1) // 4 * 4
    assert second.output == alone(second)


def test_the_prefix_cache_gives_way_to_requests() -> None:
    """Blocks that are only kept are taken before a request is preempted."""
    target = toy(blocks=40)
    toy_engine = engine(target, prefix_cache=True)
    for i in range(6):
        drain(toy_engine, Sequence([i % V, 2, 1] * 30, SamplingParams(max_tokens=8)))
    assert toy_engine.stats.preemptions == 0
    assert target.pool.allocated > 20


def test_one_faulty_request_ends_with_an_error_and_the_others_go_on() -> None:
    target = toy(faulty=4)
    toy_engine = engine(target, maker("model")(target))
    seqs = [Sequence([i, 2, 1], SamplingParams(max_tokens=12, bad_words=((4,),))) for i in range(3)]
    bad = Sequence([1, 4, 2], SamplingParams(max_tokens=12))
    drain(toy_engine, *seqs[:2], bad, seqs[2])
    assert bad.finish == "error"
    assert isinstance(bad.error, TargetError)
    for seq in seqs:
        assert seq.output == alone(seq)
    assert toy_engine.stats.errors == 1
    target.check()
    assert not target.pool.tables


@pytest.mark.parametrize("first", [2, 3, 4])
def test_steps_that_share_a_call_take_no_block_that_another_request_needs(first: int) -> None:
    """Of three blocks of four cells, the second request needs the last one; the first would fill it in later steps."""
    target = toy(blocks=3)
    target.in_one_call = True
    toy_engine = engine(target)
    seqs = [Sequence([i % V for i in range(n)], SamplingParams(max_tokens=6)) for n in (first, 4)]
    drain(toy_engine, *seqs)
    assert [seq.error for seq in seqs] == [None, None]
    assert [seq.output for seq in seqs] == list(map(alone, seqs))
    assert max(target.asked) > 1


@pytest.mark.parametrize(("lengths", "blocks", "steps"), [((1, 1), 3, 1), ((5, 4), 5, 2), ((1, 5), 4, 2)])
def test_after_a_fault_no_request_takes_blocks_that_another_one_needs(lengths, blocks, steps):
    target = toy(blocks=blocks, faulty=4)
    toy_engine = engine(target, maker("model")(toy()))
    params = SamplingParams(max_tokens=6, logit_bias={4: -100})
    seqs, bad = [Sequence([0, 1, 2, 3, 0][:n], params) for n in lengths], Sequence([1, 4, 2], params)
    for seq in seqs:
        toy_engine.add(seq)
    for _ in range(steps):
        toy_engine.step()
    drain(toy_engine, bad)
    assert bad.finish == "error"
    assert [seq.error for seq in seqs] == [None, None]
    assert [seq.output for seq in seqs] == list(map(alone, seqs))


def test_a_sampled_request_is_refused_under_the_rule_greedy_before_it_runs() -> None:
    toy_engine = engine(toy(), rule=RULES["greedy"])
    with pytest.raises(RuleError, match="over more than one token"):
        toy_engine.add(Sequence([1], SamplingParams(temperature=1.0)))
    assert not toy_engine.unfinished


@pytest.mark.parametrize("make", [lambda: NoDrafter(), lambda: maker("model")(toy())], ids=["plain", "drafts"])
def test_greedy_requests_keep_the_argmax_path_beside_sampled_ones(make, monkeypatch):
    warped = spied(monkeypatch, steps, "distributions", lambda logits, seqs, draft: [seq.id for seq in seqs])
    toy_engine = engine(toy(), make())
    greedy = Sequence([1, 2], SamplingParams(max_tokens=9))
    sampled = Sequence([1, 3], SamplingParams(max_tokens=9, temperature=1.0, seed=1))
    drain(toy_engine, greedy, sampled)
    assert {seq_id for ids in warped for seq_id in ids} == {sampled.id}


@pytest.mark.parametrize(
    ("name", "in_one_call", "has_states"),
    [(name, False, True) for name in ("model", "ngram", "eagle3", "dflash", "medusa", "lookahead", "hybrid")]
    + [(name, True, has) for name in ("eagle3", "dflash", "medusa") for has in (True, False)],
)
def test_a_drafter_that_rests_and_is_tried_again_leaves_every_text_as_it_is(
    name: str, in_one_call: bool, has_states: bool
) -> None:
    """Steps go on without it, several in one call where the target can. A drafter that reads hidden states gets those
    of plain steps, with the next step if the call does not return them, and after a rest with the next requests."""
    target = toy()
    target.in_one_call, target.has_states = in_one_call, has_states
    lengths = ErraticLengths(3)
    toy_engine = engine(target, maker(name)(target), draft_tokens=lengths)
    seqs = [Sequence(prompt(random.Random(i), 20), SamplingParams(max_tokens=50)) for i in range(20)]
    drain(toy_engine, *seqs)
    assert min(lengths.rests, lengths.plain_steps, lengths.drafting_steps) > 2
    assert [seq.output for seq in seqs] == [alone(seq) for seq in seqs]
    assert not sum(seq.stats.drafter_faults for seq in seqs)


@pytest.mark.parametrize("kind", [ToyTarget, MultiStepToy])
def test_a_draft_model_equal_to_the_target_is_right_after_rests_too(kind: type[ToyTarget]) -> None:
    target, lengths = ToyTarget(V, seed=21), ErraticLengths(5)
    toy_engine = engine(target, ModelDrafter(kind(V, seed=21), V), draft_tokens=lengths)
    seqs = [Sequence(prompt(random.Random(i), 20), SamplingParams(max_tokens=80)) for i in range(8)]
    drain(toy_engine, *seqs)
    assert min(lengths.rests, lengths.plain_steps, lengths.drafting_steps) > 2
    total = sum((seq.stats for seq in seqs), SpecStats())
    assert total.acceptance_rate == 1
    assert not total.drafter_faults


def test_a_drafter_that_reads_hidden_states_rests_without_them_and_is_tried_with_new_requests() -> None:
    target, lengths = toy(), DraftLengths(4)
    toy_engine = engine(target, maker("eagle3")(target), draft_tokens=lengths)
    asked = taps_asked(target)
    first, second = (Sequence([1, 2, 3], SamplingParams(max_tokens=30)) for _ in range(2))
    toy_engine.add(first)
    toy_engine.step()
    assert asked == [True]
    trials = lengths.policy.trials
    trials.state, trials.rest = State.RESTING, 5
    while len(first.output) < 10:
        toy_engine.step()
    assert not lengths.resting
    assert not any(asked[1:])
    drain(toy_engine, second)
    assert second.stats.proposed
    assert not first.stats.proposed
    assert [first.output, second.output] == [alone(first)] * 2


@pytest.mark.parametrize("name", ["model", "eagle3"])
def test_draft_lengths_learn_from_steps_that_read_prompts_too(name: str) -> None:
    """A prompt of 30 tokens is read beside a request that decodes, 8 rows a step."""

    class Told(DraftLengths):
        def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
            budgets = super().choose(ids, limits, prompt_rows, forced)
            chosen.append((list(ids), prompt_rows))
            return budgets

        def learn(self, step: Step) -> None:
            learned.append((list(step.ids), step.prompt_rows))
            assert step.draft >= 0 < step.rest
            assert len(step.ids) == len(step.lengths) == len(step.nodes) == len(step.accepted)
            super().learn(step)

    chosen: list[tuple[list[int], int]] = []
    learned: list[tuple[list[int], int]] = []
    target = toy()
    toy_engine = engine(target, maker(name)(target), draft_tokens=Told(4), prompt_rows=8)
    first = Sequence([1, 2, 3], SamplingParams(max_tokens=60))
    second = Sequence([random.Random(7).randrange(V) for _ in range(30)], SamplingParams(max_tokens=6))
    toy_engine.add(first)
    toy_engine.step()
    assert not chosen, "nobody decodes yet"
    assert not learned
    drain(toy_engine, second)
    assert chosen == learned
    assert chosen[:4] == [([first.id], 8)] * 3 + [([first.id], 6)]
    assert chosen[4] == ([first.id, second.id], 0) or chosen[4] == ([second.id, first.id], 0)
    assert [first.output, second.output] == [alone(first), alone(second)]


def test_lengths_are_told_of_all_time_that_a_drafter_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the drafter moves: it reads prompts beside others and alone, drafts, and leaves requests."""
    now, learned = [0.0], list[Step]()
    for module in ("slipstream.drafters.guard", "slipstream.engine.engine"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now[0])

    class Slow(NoDrafter):
        traits = DrafterTraits(reads_prompts=True)

        def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
            now[0] += 1
            return super().propose(seqs, budgets)

        def observe(self, seqs: Seq[Sequence], *rest: Any) -> None:
            now[0] += 10

        def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
            now[0] += 100

        def release(self, seq_id: int) -> None:
            now[0] += 1000

    class Told(DraftLengths):
        def learn(self, step: Step) -> None:
            learned.append(step)
            assert step.rest == 0
            super().learn(step)

    toy_engine = engine(toy(), Slow(), draft_tokens=Told(4), prompt_rows=8, max_batch=1)
    for _ in range(2):
        drain(toy_engine, Sequence(list(range(1, 5)) * 200, SamplingParams(max_tokens=6)))
    assert sum(step.draft + step.aside for step in learned) + toy_engine.drafter.seconds == now[0]
    assert [step.aside for step in learned if step.aside] == [110, 1000 + 110]
    assert toy_engine.drafter.seconds == 1000


def test_chosen_lengths_bound_a_request_that_allows_more() -> None:
    toy_engine, seq = (
        engine(toy(), maker("model")(toy()), draft_tokens=SeededLengths(2, 0)),
        Sequence([1, 2, 3], SamplingParams(max_tokens=60)),
    )
    toy_engine.add(seq, draft_tokens=9)
    drain(toy_engine)
    assert set(seq.stats.drafted_at) == {1, 2}


def test_requests_that_ask_for_no_drafts_do_not_shorten_the_rest_of_a_drafter() -> None:
    lengths = DraftLengths(4)
    toy_engine = engine(toy(), ScriptedDrafter({}, V), draft_tokens=lengths)
    trials = lengths.policy.trials
    trials.state, trials.rest, trials.saved = State.RESTING, 25, -0.5
    for most, left in ((0, 25), (None, 5)):
        drain(toy_engine, Sequence([1, 2, 3], SamplingParams(max_tokens=20, draft_tokens=most)))
        assert abs(trials.rest - left) <= 1, most


def test_a_request_without_draft_tokens_is_decoded_plainly_beside_others() -> None:
    """Nothing is proposed for it, and no hidden states are read when it runs alone."""
    target = toy()
    toy_engine = engine(target, maker("eagle3")(target))
    asked = taps_asked(target)
    off = Sequence([1, 2, 3], SamplingParams(max_tokens=30, draft_tokens=0))
    drain(toy_engine, off)
    assert not any(asked)
    off, on = (Sequence([1, 2, 3], SamplingParams(max_tokens=30, draft_tokens=n)) for n in (0, 3))
    drain(toy_engine, off, on)
    assert on.stats.proposed
    assert not off.stats.proposed
    assert off.output == on.output == alone(on)
