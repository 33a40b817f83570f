"""The output has the target's distribution, end to end: every drafter, every sampling parameter, every rule.

Every text of a request to an `LLM` is enumerated with its probability (`tests/enumeration.py`): of the first token and
one or two steps with draft tokens of depth two, so every draft, resampled and bonus token is proven given the tokens
before it. Covered are

    every drafter below x every parameter, under `rejection`: one request, EVERYTHING, sets all parameters at once, and
        `test_power_parameters` proves that dropping any one of them would be noticed; FILTERS sets those that need no
        history, for which whole batches are warped at once;
    `block` with point masses, a draft model and sampled chains; `coupled` with point masses, trees and a draft model,
        by comparing texts with those of plain decoding;
    real random numbers, in G-tests of 8000 texts on the joint frequencies of their first three tokens, which fail at
        p < 1e-6. By the power of that test, a temperature that is 20 % too high after the first token is found with a
        probability of 0.999 or more (PLAIN, FILTERS);
    a drafter with a known fault, which must be found; wrong rules are in `tests/test_enumeration.py`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.core.declaration import DISTRIBUTION, Effect, declared
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT as DRAWN
from slipstream.core.sequence import Sequence
from slipstream.core.structured import Structured
from slipstream.core.warp import distributions_after
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.llm import LLM
from tests.core.fake_drafters import depths
from tests.core.letter_tokenizer import letter_tokenizer
from tests.drafters.fakes import MaskedToy
from tests.drafters.scripted_drafters import RandomDrafter, ScriptedDrafter, wrong_at
from tests.end_to_end.sampling import sample
from tests.enumeration import cut, enumerate_texts
from tests.oracle import Oracle, joint_distribution
from tests.significance import assert_distribution, beginnings, needed
from tests.targets.toy import ToyTarget

N = 8_000
V, EOS = 5, 4
PROMPT = [0, 1, 2, 0, 1, 3, 2, 1, 0, 3, 0, 1, 2, 3]  # repeats itself, so that every n-gram length can match

PLAIN = SamplingParams(temperature=1.0, max_tokens=4)
FILTERS = SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.12, logit_bias={1: 1.0, 3: -1.0}, max_tokens=4)
EVERYTHING = replace(
    FILTERS, temperature=1.3, top_p=0.95, min_p=0.08, repetition_penalty=1.4, frequency_penalty=0.6,
    presence_penalty=-0.7, bad_words=((2, 3), (1, 2)), structured=Structured(regex="(a[abc]|b[a-d]|[cd])+"),
    min_tokens=2,
)  # fmt: skip


def toy_target() -> ToyTarget:
    return ToyTarget(V, order=3, seed=36, sharpness=1.6, eos_ids=(EOS,))


def toy_draft() -> ToyTarget:
    """Another distribution over the same vocabulary, which depends on fewer tokens."""
    return ToyTarget(V, order=1, seed=6, sharpness=0.8)


TARGET = Oracle(toy_target())
DRAFT = Oracle(toy_draft())

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter, "ngram chain": NgramDrafter, "draft model": lambda: ModelDrafter(toy_draft(), V),
    "parallel draft model": lambda: ModelDrafter(MaskedToy(V + 1, order=2, seed=6, sharpness=0.8), V),
    "sampled chain": lambda: ToyDrafter(DRAFT, (1, 1, 1)), "sampled tree": lambda: ToyDrafter(DRAFT, (2, 2)),
    "sampled tree, with replacement": lambda: ToyDrafter(DRAFT, (2, 2), replacement=True),
    "narrow tree": lambda: ToyDrafter(DRAFT, (2, 1)),
    "narrow tree, with replacement": lambda: ToyDrafter(DRAFT, (2, 1), replacement=True),
    "scripted": lambda: ScriptedDrafter({tuple(PROMPT): TARGET.greedy(PROMPT, 4)}, V, wrong_at(1)),
    "random": lambda: RandomDrafter(V, sampled=False),
}  # fmt: skip


class ToyDrafter(RandomDrafter):
    """Samples trees from the distribution of another small model.

    widths       siblings at each depth: (1, 1, 1) is a chain of three, (3, 2) a tree of 3 + 6 nodes.
    replacement  siblings are drawn independently from one distribution (SpecInfer, 2304.09781, section 4.3); otherwise
                 each without the earlier siblings (Sequoia, 2402.12374, section 3.2).
    argmax       wrong on purpose: proposes the most probable token, but reports the distribution as if it had been
    sampled.
    """

    def __init__(self, oracle: Oracle, widths: Seq[int], replacement: bool = False, argmax: bool = False):
        self.oracle, self.widths, self.replacement, self.argmax = oracle, widths, replacement, argmax
        self._known: dict[object, tuple[int, list[float]]] = {}
        self._table: list[np.ndarray] = []  # distributions
        self._params: list[SamplingParams] = []  # kept alive, so that ids are not reused

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        rows: list[int] = []  # of the table
        trees = [self._tree(seq, depth, rows) for seq, depth in zip(seqs, depths(budgets), strict=True)]
        return Draft.trees(trees, q=torch.from_numpy(np.stack(self._table)[rows]) if rows else None)  # [N, V]

    def _tree(self, seq: Sequence, depth: int, rows: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents; rows of the table that tokens are drawn from are added to `rows`."""
        ids, parents, text = list[int](), list[int](), tuple(seq.tokens)
        uniforms = iter(seq.random.uniforms(DRAWN, len(seq.tokens), 32).tolist())
        ends: list[tuple[int, tuple[int, ...]]] = [(-1, ())]  # (node, draft tokens down to it)
        for width in self.widths[:depth]:
            below = []
            for node, path in ends:
                gone: tuple[int, ...] = ()
                for _ in range(width):
                    row, cumulative = self._siblings(seq, text, path, gone)
                    if not cumulative:
                        break  # fewer possible tokens than siblings
                    u = cut(next(uniforms), cumulative)
                    token = int(self._table[row].argmax()) if self.argmax else bisect_right(cumulative, u)
                    below.append((len(ids), (*path, token)))
                    ids.append(token)
                    parents.append(node)
                    rows.append(row)
                    gone = () if self.replacement else (*gone, token)
            ends = below
        return ids, parents

    def _siblings(
        self, seq: Sequence, text: tuple[int, ...], path: tuple[int, ...], gone: tuple[int, ...]
    ) -> tuple[int, list[float]]:
        """What the child of a node after the siblings `gone` is drawn from, by the request's own parameters: a row of
        the table, and its cumulative probabilities; none if no token is possible."""
        key = id(seq.params), seq.prompt, text, path, gone
        if key not in self._known:
            if gone:
                probs = self._table[self._siblings(seq, text, path, gone[:-1])[0]].copy()
                probs[gone[-1]] = 0.0
                probs /= probs.sum() or 1.0
            else:
                self._params.append(seq.params)
                logits = self.oracle.logits([*text, *path])[None]
                probs = distributions_after(logits, [seq], [path])[0].numpy()
            self._table.append(probs)
            total = probs.cumsum()
            self._known[key] = len(self._table) - 1, (total / total[-1]).tolist() if total[-1] else []
        return self._known[key]


def llm_of(drafter: str, rule: str = "rejection") -> LLM:
    return LLM(toy_target(), DRAFTERS[drafter](), draft_tokens=3, rule=rule, max_batch=N, tokenizer=letter_tokenizer(V))


def error(drafter: str, params: SamplingParams, rule: str = "rejection", steps: int = 2) -> float:
    """The largest of a text's probability."""
    (texts,) = enumerate_texts(lambda: llm_of(drafter, rule), PROMPT, params, steps=steps)
    assert drafter == "none" or 0.03 * texts.proposed < texts.accepted < 0.97 * texts.proposed, "too one-sided"
    return texts.error(TARGET, PROMPT, params, frozenset({EOS}))


LARGE = ("random", "sampled tree", "sampled tree, with replacement", "narrow tree", "narrow tree, with replacement")
"""Drafters with thousands of drafts already in one step."""


@pytest.mark.parametrize(
    ("drafter", "params", "steps"),
    [
        (name, params, 2 + (name not in LARGE))
        for name in DRAFTERS
        for params in (EVERYTHING, FILTERS)
        if (name, params) not in [("sampled tree", EVERYTHING), ("sampled tree, with replacement", EVERYTHING)]
    ],
    ids=lambda value: "everything" if value is EVERYTHING else "filters" if value is FILTERS else str(value),
)
def test_rejection_keeps_the_targets_distribution(drafter: str, params: SamplingParams, steps: int) -> None:
    assert error(drafter, params, steps=steps) < 1e-9


@pytest.mark.parametrize(
    ("drafter", "params"), [("ngram chain", EVERYTHING), ("draft model", FILTERS), ("sampled chain", PLAIN)]
)
def test_block_keeps_the_targets_distribution(drafter: str, params: SamplingParams) -> None:
    assert error(drafter, params, "block") < 1e-9


@pytest.mark.parametrize(
    ("drafter", "params"),
    [("ngram chain", FILTERS), ("draft model", EVERYTHING), ("sampled tree, with replacement", PLAIN)],
)
def test_coupled_texts_are_those_of_plain_decoding(drafter: str, params: SamplingParams) -> None:
    params = replace(params, max_tokens=12)
    each = [replace(params, seed=seed) for seed in range(60)]
    plain, drafted = (llm_of(name, "coupled").generate([PROMPT] * 60, each) for name in ("none", drafter))
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert 0 < sum(done.stats.accepted for done in drafted) < sum(done.stats.proposed for done in drafted)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_texts_of_real_random_numbers_fit_the_targets_distribution(rule: str) -> None:
    """Drawn token by token, and with the noise that the target uses, too."""
    seqs = sample(llm_of("draft model", rule), PROMPT, EVERYTHING, N, seed=2026, share_form=True)
    accepted, proposed = sum(s.stats.accepted for s in seqs), sum(s.stats.proposed for s in seqs)
    assert 0.03 * proposed < accepted < 0.97 * proposed, "too one-sided"
    assert not any(seq.stats.drafter_faults for seq in seqs)
    probs = joint_distribution(TARGET, PROMPT, EVERYTHING, frozenset({EOS}))
    assert_distribution(beginnings(seq.output for seq in seqs), probs)


ALL = [name for name, known in declared(SamplingParams).items() if known.effect in DISTRIBUTION]
WITHOUT_HISTORY = [name for name in ALL if declared(SamplingParams)[name].effect is not Effect.NEEDS_HISTORY]


@pytest.mark.parametrize(
    ("params", "name"), [(EVERYTHING, name) for name in ALL] + [(FILTERS, name) for name in WITHOUT_HISTORY]
)
def test_power_parameters(params: SamplingParams, name: str) -> None:
    """If this parameter were ignored after the first token, where drafting begins, or everywhere, a twelfth of the
    samples of a G-test would show it, and so does every enumeration."""
    default = 1.0 if name == "temperature" else getattr(SamplingParams(), name)
    without = replace(params, **{name: default})
    probs = joint_distribution(TARGET, PROMPT, params, frozenset({EOS}))
    for other in ([params, without, without], [without] * 3):
        assert needed(probs, joint_distribution(TARGET, PROMPT, other, frozenset({EOS}))) < N / 12


def test_control_argmax_reported_as_sampled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft takes the argmax and reports its softmax as q. The rule is correct, the drafter is wrong."""
    monkeypatch.setitem(DRAFTERS, "argmax", lambda: ToyDrafter(DRAFT, (1, 1, 1), argmax=True))
    assert error("argmax", PLAIN) > 0.01
