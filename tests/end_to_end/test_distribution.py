"""The output has the target's distribution, end to end: every drafter, every sampling parameter, every lossless rule.

Each cell draws n = 8000 texts through `LLM` and compares the joint frequencies of their first three tokens with the
exact distribution, by enumeration, in a G-test; it fails at p < 1e-6. By the power of that test, a temperature that is
20 % too high after the first token is found with a probability of 0.999 or more (PLAIN, FILTERS). Three tokens take the
prefill and at least one step with draft tokens of depth two, so every draft, resampled and bonus token is tested given
the tokens before it.
Seeds are fixed. Covered are

    every drafter below x every parameter, under `rejection`: one request, EVERYTHING, sets all parameters at once, and
        `test_power_parameters` proves that dropping any one of them would be noticed; FILTERS sets those that need no
        history, for which whole batches are warped at once;
    `block` with point masses, a draft model and sampled chains; `coupled` with point masses, trees and a draft model;
    controls: rules and a drafter with known faults must fail, and their correct version must pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.drafter import Drafter
from slipstream.core.parameter_declaration import DISTRIBUTION, Effect, declared
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT as DRAWN
from slipstream.core.rules import RULES, Rule
from slipstream.core.sequence import Sequence
from slipstream.core.structured import Structured
from slipstream.core.warp import distributions_after
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.llm import LLM
from tests.core import wrong
from tests.core.letter_tokenizer import letter_tokenizer
from tests.drafters.fakes import MaskedToy
from tests.drafters.scripted_drafters import RandomDrafter, ScriptedDrafter, wrong_at
from tests.end_to_end.sampling import sample
from tests.oracle import Oracle, joint_distribution
from tests.significance import LEVEL, beginnings, g_test, needed
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

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        rows: list[int] = []  # of the table
        trees = [self._tree(seq, depth, rows) for seq, depth in zip(seqs, budget, strict=True)]
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
                    token = int(self._table[row].argmax()) if self.argmax else bisect_right(cumulative, next(uniforms))
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


def cell(drafter: Drafter, params: SamplingParams, rule: str = "rejection") -> tuple[float, list[Sequence]]:
    """p-value, and the sequences."""
    llm = LLM(toy_target(), drafter, draft_tokens=3, rule=rule, max_batch=N, tokenizer=letter_tokenizer(V))
    seqs = sample(llm, PROMPT, params, N, seed=2026, share_form=True)
    probs = joint_distribution(TARGET, PROMPT, params, frozenset({EOS}))
    return g_test(beginnings(seq.output for seq in seqs), probs), seqs


def passes(drafter: Drafter, params: SamplingParams, rule: str = "rejection") -> None:
    p, seqs = cell(drafter, params, rule)
    accepted, proposed = sum(s.stats.accepted for s in seqs), sum(s.stats.proposed for s in seqs)
    assert not any(seq.stats.drafter_faults for seq in seqs)
    if not isinstance(drafter, NoDrafter):
        assert 0.03 * proposed < accepted < 0.97 * proposed, (
            f"too one-sided: {accepted} of {proposed} draft tokens accepted"
        )
    assert p >= LEVEL, f"p = {p:.1e}"


@pytest.mark.parametrize(
    ("drafter", "params"),
    [(name, EVERYTHING) for name in DRAFTERS]
    + [(name, FILTERS) for name in ("none", "ngram chain", "draft model", "sampled tree")],
    ids=lambda value: value if isinstance(value, str) else "everything" if value is EVERYTHING else "filters",
)
def test_rejection_keeps_the_targets_distribution(drafter: str, params: SamplingParams) -> None:
    passes(DRAFTERS[drafter](), params)


@pytest.mark.parametrize(
    ("rule", "drafter", "params"),
    [
        ("block", "ngram chain", EVERYTHING), ("block", "draft model", FILTERS), ("block", "sampled chain", PLAIN),
        ("coupled", "ngram chain", FILTERS), ("coupled", "draft model", EVERYTHING),
        ("coupled", "sampled tree, with replacement", PLAIN),
    ],
)  # fmt: skip
def test_other_rules_keep_the_targets_distribution(rule: str, drafter: str, params: SamplingParams) -> None:
    passes(DRAFTERS[drafter](), params, rule)


ALL = [name for name, known in declared(SamplingParams).items() if known.effect in DISTRIBUTION]
WITHOUT_HISTORY = [name for name in ALL if declared(SamplingParams)[name].effect is not Effect.NEEDS_HISTORY]


@pytest.mark.parametrize(
    ("params", "name"), [(EVERYTHING, name) for name in ALL] + [(FILTERS, name) for name in WITHOUT_HISTORY]
)
def test_power_parameters(params: SamplingParams, name: str) -> None:
    """If this parameter were ignored after the first token, where drafting begins, or everywhere, the test would fail
    with a twelfth of the samples that it draws."""
    default = 1.0 if name == "temperature" else getattr(SamplingParams(), name)
    without = replace(params, **{name: default})
    probs = joint_distribution(TARGET, PROMPT, params, frozenset({EOS}))
    for other in ([params, without, without], [without] * 3):
        assert needed(probs, joint_distribution(TARGET, PROMPT, other, frozenset({EOS}))) < N / 12


def control(monkeypatch: pytest.MonkeyPatch, drafter: Drafter, rule: Rule) -> float:
    monkeypatch.setitem(RULES, rule.name, rule)
    return cell(drafter, PLAIN, rule.name)[0]


@pytest.mark.parametrize("rule", [wrong.A, wrong.C], ids=lambda rule: rule.name)
def test_control_wrong_rule_fails(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    assert control(monkeypatch, ToyDrafter(DRAFT, (1, 1, 1)), rule) < LEVEL


def test_control_correct_version_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert control(monkeypatch, ToyDrafter(DRAFT, (1, 1, 1)), wrong.chain_rule("right")) >= LEVEL


def test_control_argmax_reported_as_sampled_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule E: the draft takes the argmax and reports its softmax as q. The rule is correct, the drafter is wrong."""
    assert control(monkeypatch, ToyDrafter(DRAFT, (1, 1, 1), argmax=True), RULES["rejection"]) < LEVEL
