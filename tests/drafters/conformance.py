"""Tests of the promises that every `Drafter` makes. `test_conformance.py` runs them on every drafter of the registry. A
new drafter is found in the registry, and needs a line in `makers.MAKERS` only if it cannot be made from a target alone.
Further promises of drafters without a model are in `lookup_conformance.py`.

To run these tests on a drafter outside the registry, subclass `Conformance` and provide the fixture `case`.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.guard import MAX_NODES, Guard
from slipstream.drafters.none import NoDrafter
from slipstream.llm import LLM
from tests.core.fake_drafters import depths
from tests.end_to_end.sampling import sample
from tests.enumeration import enumerate_texts
from tests.oracle import Oracle, joint_distribution
from tests.significance import assert_distribution, beginnings

LENGTH = 20


@dataclass
class Case:
    """A drafter under test. target: function that makes the target, in float64 and with a small vocabulary. make:
    function that makes the drafter for a target. enumerated: numbers of drafting steps to enumerate, and their sampling
    parameters. how: arguments of `Branch`."""

    target: Callable[[], Target]
    make: Callable[[Target], Drafter]
    enumerated: Seq[tuple[int, dict[str, Any]]] = ((1, {}), (2, {"top_k": 3}))
    how: Mapping[str, Any] = field(default_factory=dict)

    def llm(self, **how: Any) -> LLM:
        target = self.target()
        return LLM(target, self.make(target), draft_tokens=2, **how)

    def prompts(self, n: int) -> list[list[int]]:
        """Return n prompts of different lengths. Some of them repeat themselves."""
        rng = random.Random(n)
        vocab = self.target().vocab_size
        words = [[rng.randrange(vocab) for _ in range(3)] for _ in range(3)]
        return [[rng.randrange(vocab), *(t for _ in range(i % 5) for t in rng.choice(words))] for i in range(n)]


class Proposal(NamedTuple):
    """A draft for one sequence, and the tokens before the draft."""

    text: list[int]
    ids: list[int]
    parents: list[int]
    q: list[list[float]]


class Recorder:
    """Wraps a drafter: checks every draft, and records the proposals for each sequence in each step."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.name, self.vocab_size = drafter, drafter.name, vocab_size
        self.traits = DrafterTraits(taps=drafter.traits.taps)
        self.proposed: dict[int, list[Proposal]] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        draft = self.drafter.propose(seqs, budgets)
        draft.check(depths(budgets), self.vocab_size, MAX_NODES)
        check_distributions(draft, [seq.params.greedy for seq in seqs])
        check_siblings(draft)
        for b, seq in enumerate(seqs):
            nodes = slice(draft.splits[b], draft.splits[b + 1])
            q = [] if draft.q is None else draft.q[nodes].tolist()
            proposal = Proposal(list(seq.tokens), draft.ids[nodes], list(draft.parents[nodes]), q)
            self.proposed.setdefault(seq.id, []).append(proposal)
        return draft

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self.drafter.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
        self.drafter.release(seq_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)


def check_distributions(draft: Draft, greedy: Seq[bool]) -> None:
    """Assert that each row of q is a distribution in which its draft token has a positive probability."""
    if draft.q is None or not len(draft):
        return
    assert draft.q.dtype == torch.float64, "q in another dtype than the target's distribution biases the ratio"
    assert bool((draft.q >= 0).all())
    assert float((draft.q.sum(-1) - 1).abs().max()) < 1e-7
    drawn = draft.q.gather(1, draft.tokens[:, None])
    assert bool((drawn > 0).all()), "a draft token with probability 0 in its own distribution"


def check_siblings(draft: Draft) -> None:
    """Assert that equal tokens are not children of the same node if draft tokens are point masses. The second of them
    could never be accepted."""
    if draft.q is not None:
        return
    for b in range(draft.batch):
        start = draft.splits[b]
        for below in draft.children(b).values():
            tokens = [draft.ids[start + i] for i in below if draft.acceptable is None or draft.acceptable[start + i]]
            assert len(set(tokens)) == len(tokens), f"equal siblings {tokens}"


def size(thing: object, seen: dict[int, object] | None = None) -> int:
    """Count the values in `thing` recursively. Tensors and arrays count by elements."""
    if isinstance(thing, (str, bytes, int, float, type(None))):
        return 1  # even if counted before: equal small integers are one object
    seen = {} if seen is None else seen  # keeps counted objects alive, so that no id is reused
    if id(thing) in seen:
        return 0
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        return thing.numel()
    if isinstance(thing, np.ndarray):
        return thing.size
    if callable(thing):
        return 1
    if isinstance(thing, Mapping):
        return 1 + sum(size(k, seen) + size(v, seen) for k, v in thing.items())
    if isinstance(thing, Collection):
        return 1 + sum(size(x, seen) for x in thing)
    members = dict(getattr(thing, "__dict__", {}))
    if is_dataclass(thing):
        members |= {f.name: getattr(thing, f.name) for f in fields(thing)}
    return 1 + sum(size(x, seen) for x in members.values())


def alone(case: Case, prompt: Seq[int], params: SamplingParams, draft_tokens: int) -> tuple[list, list[int]]:
    """Run one sequence alone. Returns the proposals for it, and its output."""
    target = case.target()
    recorder = Recorder(case.make(target), target.vocab_size)
    seq = Sequence(list(prompt), params)
    while not seq.finish:
        step([seq], target, recorder, RULES["rejection"], draft_tokens)
    return recorder.proposed[seq.id], seq.output


@cache
def oracle_of(make: Callable[[], Target]) -> Oracle:
    """Return the oracle of a target. All tests share it, because it caches its results."""
    return Oracle(make())


@cache
def coupled_texts(make: Callable[[], Target], prompts: tuple[tuple[int, ...], ...], params: tuple[SamplingParams, ...]):
    """Return the outputs of plain decoding under the rule `coupled`."""
    done = LLM(make(), rule="coupled", draft_tokens=4).generate(list(map(list, prompts)), list(params))
    return [each.token_ids for each in done]


class Conformance:
    """The tests. A subclass provides a fixture `case: Case`. A drafter that does not make some of these promises
    declares them with the reason: `class TestMine(Conformance, exempt={"test_...": "why"})`."""

    def __init_subclass__(cls, exempt: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, reason in (exempt or {}).items():
            assert callable(getattr(Conformance, name)), reason
            setattr(cls, name, None)  # pytest then finds no test of that name

    def test_drafts_are_well_formed_and_within_every_budget(self, case: Case) -> None:
        """`Recorder` checks the drafts. Budgets differ between sequences and steps, and some are 0."""
        rng = random.Random(1)
        for temperature in (0.0, 1.0):
            target = case.target()
            recorder = Recorder(case.make(target), target.vocab_size)
            params = SamplingParams(temperature=temperature, max_tokens=200, seed=1)
            seqs = [Sequence(prompt, params) for prompt in case.prompts(4)]
            for _ in range(12):
                budgets = [Budget(rng.randrange(9) if seq.kv_len else 0) for seq in seqs]
                draft = recorder.propose(seqs, budgets)
                for b, budget in enumerate(budgets):
                    assert budget.depth > 0 or draft.splits[b] == draft.splits[b + 1]
                _settle(target, recorder, seqs, draft, rng)

    def test_a_draft_that_is_not_used_does_no_harm(self, case: Case) -> None:
        """A step may run without the proposed draft. `observe` of the drafter then gets an empty draft."""
        target, rng = case.target(), random.Random(2)
        recorder = Recorder(case.make(target), target.vocab_size)
        seqs = [Sequence(prompt, SamplingParams(temperature=1.0, max_tokens=200, seed=2)) for prompt in case.prompts(3)]
        for index in range(10):
            draft = recorder.propose(seqs, [Budget(4 if seq.kv_len else 0) for seq in seqs])
            _settle(target, recorder, seqs, Draft.empty(3) if index % 2 else draft, rng)

    def test_does_not_depend_on_other_sequences_of_the_batch(self, case: Case) -> None:
        """Sequences join and leave a batch one by one. Each sequence gets exactly the drafts that it gets alone."""
        for temperature in (0.0, 1.0):
            target = case.target()
            recorder = Recorder(case.make(target), target.vocab_size)
            prompts = case.prompts(7)
            params = [SamplingParams(temperature=temperature, max_tokens=6 + 3 * i, seed=i) for i in range(7)]
            waiting = [Sequence(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
            seqs, active, index = list(waiting), list[Sequence](), 0
            while waiting or active:
                if waiting and index % 2 == 0:
                    active.insert(index % (len(active) + 1), waiting.pop())
                step(active, target, recorder, RULES["rejection"], 4)
                for seq in [s for s in active if s.finish]:
                    active.remove(seq)
                    recorder.release(seq.id)
                    target.release(seq.id)
                index += 1
            for seq, prompt, p in zip(seqs, prompts, params, strict=True):
                steps, text = alone(case, prompt, p, 4)
                assert seq.output == text
                for together, alone_step in zip(recorder.proposed[seq.id], steps, strict=True):
                    assert together[:3] == alone_step[:3]

    def test_releases_everything(self, case: Case) -> None:
        """After a second pass over the same requests, the drafter is not larger than after the first pass."""
        target = case.target()
        drafter = case.make(target)
        llm = LLM(target, drafter, max_batch=3, draft_tokens=4)
        sizes = []
        for _ in range(3):
            llm.generate(case.prompts(6), SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=4))
            sizes.append(size(drafter))
        assert sizes[1] == sizes[2]
        drafter.release(10**9)  # unknown ids are ignored

    def test_can_start_in_the_middle_of_a_sequence(self, case: Case) -> None:
        """After `release` (because of preemption or a fault), the sequence continues and gets drafts again."""
        target = case.target()
        recorder = Recorder(case.make(target), target.vocab_size)
        truth = oracle_of(case.target)
        for prompt in case.prompts(3):
            seq = Sequence(prompt, SamplingParams(max_tokens=LENGTH))
            while not seq.finish:
                step([seq], target, recorder, RULES["rejection"], 3)
                if len(seq.output) > LENGTH // 2:
                    recorder.release(seq.id)
            assert seq.output == truth.greedy(prompt, LENGTH)

    def test_greedy_text_is_the_targets(self, case: Case) -> None:
        target = case.target()
        truth, prompts = oracle_of(case.target), case.prompts(5)
        for draft_tokens in (1, 4, 8):
            guard = Guard(case.make(target), target)
            llm = LLM(target, guard, draft_tokens=draft_tokens, max_batch=2)
            done = llm.generate(prompts, SamplingParams(max_tokens=LENGTH))
            assert [d.token_ids for d in done] == [truth.greedy(prompt, LENGTH) for prompt in prompts]
            assert guard.faults == 0

    def test_every_output_length_up_to_two_more_than_the_draft_length(self, case: Case) -> None:
        """Outputs are exactly max_tokens long, for 1 to two more than the draft length. (In transformers issue 46993,
        prompt lookup exceeded max_new_tokens.)"""
        target, prompt = case.target(), [0, 1, 2, 0, 1, 2, 0]
        llm, text = LLM(target, case.make(target), draft_tokens=7), oracle_of(case.target).greedy(prompt, 9)
        for n in range(1, 10):
            done = llm.generate([prompt] * 2, SamplingParams(max_tokens=n))
            assert [d.token_ids for d in done] == [text[:n]] * 2

    def test_a_request_can_switch_it_off(self, case: Case) -> None:
        target = case.target()
        prompts = case.prompts(3)
        params = [SamplingParams(max_tokens=LENGTH, draft_tokens=0 if i == 1 else None) for i in range(3)]
        done = LLM(target, case.make(target), draft_tokens=4).generate(prompts, params)
        plain = LLM(target, NoDrafter(), draft_tokens=4).generate(prompts, params)
        assert done[1].stats.proposed == 0
        assert [d.token_ids for d in done] == [d.token_ids for d in plain]

    def test_coupled_text_depends_on_target_and_seed_alone(self, case: Case) -> None:
        """The output is the output of plain decoding, for every draft length and batch."""
        target, prompts = case.target(), case.prompts(4)
        how = [{"temperature": 1.0 + 0.1 * seed, "frequency_penalty": 0.3 * (seed % 2)} for seed in range(4)]
        params = [SamplingParams(max_tokens=LENGTH, seed=seed, **each) for seed, each in enumerate(how)]
        plain = coupled_texts(case.target, tuple(map(tuple, prompts)), tuple(params))
        for draft_tokens, most in ((1, 1), (4, 3), (8, 4)):
            llm = LLM(target, case.make(target), draft_tokens=draft_tokens, rule="coupled", max_batch=most)
            done = llm.generate(prompts, params)
            assert [d.token_ids for d in done] == plain
            assert not any(d.stats.drafter_faults for d in done)

    def test_every_text_is_exactly_as_probable_as_in_plain_decoding(self, case: Case) -> None:
        """Enumerates the outputs after the first token of two seeds: for one drafting step, and, with fewer tokens to
        choose from, for two steps, of which the second follows a rejection."""
        oracle, prompt, accepted, proposed = oracle_of(case.target), [0, 1, 2, 0, 1, 2, 0], 0.0, 0.0
        for steps, changes in case.enumerated:
            params = SamplingParams(temperature=1.0, max_tokens=4, **changes)
            for texts in enumerate_texts(case.llm, prompt, params, (0, 1), after=1, steps=steps, **case.how):
                texts.check(oracle, prompt, params)
                accepted += texts.accepted
                proposed += texts.proposed
        assert 0 < accepted < proposed or not case.llm().drafter.traits.drafts

    def test_sampled_text_has_the_targets_distribution(self, case: Case) -> None:
        """Uses real random numbers: a G-test of the joint distribution of the first three tokens with n = 8000, which
        fails at p < 1e-6. If the temperature were 1.1 instead of 1, the test would fail with a probability of 0.997."""
        prompt, params, n = [0, 1, 2, 0, 1, 2, 0], SamplingParams(temperature=1.0, max_tokens=4), 8_000
        seqs = sample(case.llm(max_batch=n), prompt, params, n, seed=6)
        truth = joint_distribution(oracle_of(case.target), prompt, params)
        assert_distribution(beginnings(seq.output for seq in seqs), truth)


def _settle(target: Target, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, rng: random.Random) -> None:
    """Run one step with a random verdict: a random path of the draft, then a random token."""
    out = target.run(seqs, draft, drafter.traits.taps)
    paths = []
    for b in range(len(seqs)):
        children, node, path = draft.children(b), -1, list[int]()
        while node in children and rng.random() < 0.7:
            node = rng.choice(children[node])
            path.append(node)
        paths.append(path)
    follow = [rng.randrange(target.vocab_size) for _ in seqs]
    verdict = Verdict(paths, follow, [None] * len(seqs), [False] * len(seqs))
    target.commit(seqs, paths)
    for b, seq in enumerate(seqs):
        seq.advance(verdict, draft, b)
    drafter.observe(seqs, draft, out, verdict)
