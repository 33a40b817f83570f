"""Proof by enumeration: the exact distribution of the tokens that the production code emits.

`ExactDice` replaces `Dice`. When production draws a random number, `ExactDice` returns *one* possible answer, records
the other answers as branches to run later, and multiplies the weight of the run by the answer's probability. When no
branch is left, every outcome of `verify` is known with its probability. A branch is run from the beginning with its
tape, the list of answers to give, so the code under test needs no hook.

Production computes probabilities in float64. `rational` converts them back to the fractions that they represent. This
conversion is correct for the following reason. Two different fractions with denominators up to D are at least 1/D^2 =
1e-10 apart, float64 arithmetic on numbers of about 1 has an error of 1e-13 here, and `rational` accepts an error of at
most 1e-12. So if the true value has a denominator of at most D, `rational` finds it. The denominators are small enough:
p and q have a denominator n <= 12. The largest denominators come from h = Z / (Z + 1 - w) in block verification, where
w is a product of at most 3 ratios a/b with b <= n, so that Z and w are multiples of 1/n^4 and h has a denominator of at
most 2 n^4 = 41472; and from a fourth sibling drawn without replacement, with at most n^4. If this argument does not
hold for a future rule, a test fails, because distributions do not sum to 1 exactly or the final distribution is not
exactly p.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.random import Stream
from slipstream.core.rules import Rule, verify
from tests.core.worlds import Shape, Text, WeightedDraft, World, every_draft

D = 10**5


@cache
def rational(x: float) -> Fraction:
    """Return the fraction with a denominator of at most D that the float64 `x` represents."""
    fraction = Fraction(x).limit_denominator(D)
    assert abs(fraction - Fraction(x)) < Fraction(1, 10**12), f"{x!r} is no fraction with a denominator up to {D}"
    return fraction


def chance(x: float) -> Fraction:
    """Return the probability that `Dice.accept` returns True: x, but 1 above 1, and 0 for NaN and below 0."""
    return Fraction(0) if not x > 0 else Fraction(1) if x >= 1 else rational(x)


Options = list[tuple[Any, Fraction]]
"""The possible answers, each with its probability."""


def possible(options: Options) -> Options:
    assert sum(w for _, w in options) == 1, f"not a distribution: {options}"
    return [(value, w) for value, w in options if w > 0]


@cache
def acceptance(x: float) -> Options:
    """Return the possible answers of `Dice.accept`."""
    return possible([(True, chance(x)), (False, 1 - chance(x))])


@cache
def choices(row: tuple[float, ...]) -> Options:
    """Return the possible answers of `Dice.choose` and `Dice.pick`."""
    return possible([(token, rational(x)) for token, x in enumerate(row)])


class Walk:
    """One run of one sequence: answers given, its probability so far, and the branches not taken."""

    def __init__(self, tape: tuple[int, ...]):
        self.tape, self.taken, self.weight = tape, list[int](), Fraction(1)
        self.answers, self.open = list[bool](), list[tuple[int, ...]]()

    def take(self, options: Options) -> Any:
        index = len(self.taken)
        choice = self.tape[index] if index < len(self.tape) else 0
        if index >= len(self.tape):
            self.open += [(*self.taken, other) for other in range(1, len(options))]
        self.taken.append(choice)
        self.weight *= options[choice][1]
        return options[choice][0]


class ExactDice(Dice):
    """Dice whose answers are enumerated. rule, rows: tell for which sequences the next answer has an effect (see
    `on_trial`)."""

    def __init__(self, rule: Rule, rows: Seq[WeightedDraft], tapes: Seq[tuple[int, ...]]):
        self.rule, self.rows = rule, rows
        self.walks = [Walk(tape) for tape in tapes]

    def accept(self, probability: Seq[float]) -> list[bool]:
        assert len(probability) == len(self.rows)
        return [self._accept(b, x) for b, x in enumerate(probability)]

    def _accept(self, b: int, x: float) -> bool:
        walk = self.walks[b]
        if not on_trial(self.rule, self.rows[b].shape, tuple(walk.answers)):
            return True  # the answer must have no effect; if it had, True would do most harm
        walk.answers.append(walk.take(acceptance(x)))
        return walk.answers[-1]

    def choose(self, probs: Tensor) -> Tensor:
        assert probs.shape[0] == len(self.rows)
        rows = zip(self.walks, probs.tolist(), strict=True)
        return torch.tensor([walk.take(choices(tuple(row))) for walk, row in rows])

    def pick(self, probs: Tensor, owner: Seq[int], depth: Seq[int]) -> Tensor:
        rows = zip(owner, probs.tolist(), strict=True)
        return torch.tensor([self.walks[b].take(choices(tuple(row))) for b, row in rows])


def rows_of(*distributions: list[float]) -> Tensor:
    """Return distributions as a tensor [R, V] in float64."""
    return torch.tensor(distributions, dtype=torch.float64)


class FixedDice(Dice):
    """The production dice, with `u` in place of every random number."""

    def __init__(self, u: float, batch: int = 1):
        super().__init__([Stream(0)] * batch, [0] * batch, [0] * batch)
        self.u = u

    def _uniforms(self, column: int) -> np.ndarray:
        return np.full(len(self._streams), self.u)


@cache
def on_trial(rule: Rule, shape: Shape, answers: tuple[bool, ...]) -> bool:
    """Return whether the next answer can have an effect for a sequence that has received `answers`. In a batch, the
    rules also draw numbers for sequences that are finished; branching there would change nothing and take much time."""
    if rule.name == "block":
        return len(answers) < len(shape.parents)
    if rule.name != "rejection":
        return True
    voters = [i for i, kind in enumerate(shape.kinds) if kind != "n"]
    below = iter([i for i in voters if shape.parents[i] == -1])
    node = next(below, None)
    for yes in answers:
        if yes:
            below = iter([i for i in voters if shape.parents[i] == node])
        node = next(below, None)
    return node is not None


@dataclass(frozen=True)
class Outcome:
    """The result of one run: the emitted tokens, the number of draft tokens among them, and the run's probability."""

    tokens: Text
    accepted: int
    weight: Fraction


def pack(rows: Seq[WeightedDraft]) -> tuple[Draft, Tensor]:
    """Return the arguments of `verify`, a draft and distributions [B + N, V], with one sequence for each entry of
    `rows`."""
    kinds = "".join(row.shape.kinds for row in rows)
    q = [probs for row in rows for probs in row.q_rows]
    draft = Draft.trees(
        [(row.tokens, row.shape.parents) for row in rows],
        q=torch.tensor(q, dtype=torch.float64) if set(kinds) & set("sw") else None,
    )
    if "n" in kinds:
        draft = replace(draft, acceptable=[kind != "n" for kind in kinds])
    replace(draft, q=None).check([row.shape.height for row in rows], rows[0].world.vocab, 16)
    distributions = [probs for row in rows for probs in row.rows]
    return draft, torch.tensor(distributions, dtype=torch.float64)


def explore(rule: Rule, drafts: Seq[WeightedDraft], at_once: int = 4096) -> list[list[Outcome]]:
    """Return for each draft all outcomes of its verification, with their probabilities given this draft. Drafts are
    verified in batches of `at_once`, so a batch mixes runs of several drafts and shapes."""
    outcomes: list[list[Outcome]] = [[] for _ in drafts]
    todo: list[tuple[int, tuple[int, ...]]] = [(i, ()) for i in range(len(drafts))]
    while todo:
        now, todo = todo[:at_once], todo[at_once:]
        rows = [drafts[i] for i, _ in now]
        draft, distributions = pack(rows)
        dice = ExactDice(rule, rows, [tape for _, tape in now])
        verdict = verify(draft, distributions, rule, dice)
        for b, (i, _) in enumerate(now):
            walk = dice.walks[b]
            outcomes[i].append(Outcome(tuple(verdict.run(draft, b)), verdict.count_accepted(b), walk.weight))
            todo += [(i, tape) for tape in walk.open]
    return outcomes


def weighed(rule: Rule, drafts: Seq[WeightedDraft], at_once: int = 4096) -> list[Outcome]:
    """Return the outcomes of all `drafts`, each with the probability of its draft times the probability of its run."""
    return [
        Outcome(outcome.tokens, outcome.accepted, draft.weight * outcome.weight)
        for draft, outcomes in zip(drafts, explore(rule, drafts, at_once), strict=True)
        for outcome in outcomes
    ]


def outcomes_of(rule: Rule, world: World, shape: Shape, at_once: int = 4096) -> list[Outcome]:
    """Return every outcome of drafting *and* verifying, with its probability."""
    return weighed(rule, list(every_draft(world, shape)), at_once)


def completed(world: World, outcomes: Iterable[Outcome], length: int) -> dict[Text, Fraction]:
    """Return the distribution of the first `length` tokens, if each outcome is continued by plain decoding."""
    mass: dict[Text, Fraction] = defaultdict(Fraction)
    for outcome in outcomes:
        assert 1 <= len(outcome.tokens) <= length
        mass[outcome.tokens] += outcome.weight
    for _ in range(length):
        longer: dict[Text, Fraction] = defaultdict(Fraction)
        for text, weight in mass.items():
            if len(text) == length:
                longer[text] += weight
            else:
                for token, p in enumerate(world.p(text)):
                    if p:
                        longer[(*text, token)] += weight * p
        mass = longer
    return {text: weight for text, weight in mass.items() if weight}


def target_distribution(world: World, length: int) -> dict[Text, Fraction]:
    """Return the distribution of the first `length` tokens of plain decoding."""
    return completed(world, [Outcome((t,), 0, p) for t, p in enumerate(world.p(())) if p], length)


def emitted_distribution(rule: Rule, world: World, shape: Shape, at_once: int = 4096) -> dict[Text, Fraction]:
    """Return the distribution of the first height + 1 tokens, if the first step uses this rule and a draft of this
    shape."""
    return completed(world, outcomes_of(rule, world, shape, at_once), shape.height + 1)


def distance(a: dict[Text, Fraction], b: dict[Text, Fraction]) -> Fraction:
    """Return the total variation distance of two distributions."""
    return sum((abs(a.get(t, Fraction(0)) - b.get(t, Fraction(0))) for t in {*a, *b}), Fraction(0)) / 2


def mean_accepted(rule: Rule, world: World, shape: Shape) -> Fraction:
    """Return the expected number of accepted draft tokens of one step."""
    return sum((o.accepted * o.weight for o in outcomes_of(rule, world, shape)), Fraction(0))
