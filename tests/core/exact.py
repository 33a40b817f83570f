"""Proof by enumeration: the exact distribution of what the production code emits.

`ExactDice` replaces `Dice`. Where production draws a number, it returns *one* possible answer, records the others as
branches to run later, and multiplies the weight of the run by the answer's probability. Running until
no branch is left gives every outcome of `verify` with its probability. A run is replayed from its beginning by its
tape, the list of answers to give, so the code under test needs no hook for it.

Probabilities are float64 when production computes them; each is converted back to the fraction it represents by
`rational`. Why that is the right one: two different fractions with denominators up to D lie at least 1/D^2 = 1e-10
apart, float64 arithmetic on numbers of order one is good to 1e-13 here, and `rational` insists on 1e-12. So if the
true value has a denominator of at most D, it is the one found. It has: with p and q in n-ths, n <= 12, the largest
denominators come from block verification's h = Z / (Z + 1 - w), where w is a product of at most 3 ratios a/b with
b <= n, so that Z and w are multiples of 1/n^4 and h has a denominator of at most 2 n^4 = 41472; and from a fourth
sibling drawn without replacement, at most n^4. If the argument fails for a future rule, distributions that do
not sum to 1 exactly, or a final distribution that is not p exactly, show it.
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
    """The fraction with a denominator of at most D that the float64 `x` represents."""
    fraction = Fraction(x).limit_denominator(D)
    assert abs(fraction - Fraction(x)) < Fraction(1, 10**12), f"{x!r} is no fraction with a denominator up to {D}"
    return fraction


def chance(x: float) -> Fraction:
    """Probability that `Dice.accept` returns True: 1 above 1, 0 for NaN and below 0."""
    return Fraction(0) if not x > 0 else Fraction(1) if x >= 1 else rational(x)


Options = list[tuple[Any, Fraction]]
"""The answers that are possible, each with its probability."""


def possible(options: Options) -> Options:
    assert sum(w for _, w in options) == 1, f"not a distribution: {options}"
    return [(value, w) for value, w in options if w > 0]


@cache
def acceptance(x: float) -> Options:
    """Answers of `Dice.accept`."""
    return possible([(True, chance(x)), (False, 1 - chance(x))])


@cache
def choices(row: tuple[float, ...]) -> Options:
    """Answers of `Dice.choose` and `Dice.pick`."""
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
    """rule, rows: to know for which sequences the next answer can matter (see `on_trial`)."""

    def __init__(self, rule: Rule, rows: Seq[WeightedDraft], tapes: Seq[tuple[int, ...]]):
        self.rule, self.rows = rule, rows
        self.walks = [Walk(tape) for tape in tapes]

    def accept(self, probability: Seq[float]) -> list[bool]:
        assert len(probability) == len(self.rows)
        return [self._accept(b, x) for b, x in enumerate(probability)]

    def _accept(self, b: int, x: float) -> bool:
        walk = self.walks[b]
        if not on_trial(self.rule, self.rows[b].shape, tuple(walk.answers)):
            return True  # the answer must not matter; this one would do most harm
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
    """[R, V] in float64."""
    return torch.tensor(distributions, dtype=torch.float64)


class FixedDice(Dice):
    """Dice of production, whose every uniform is `u`."""

    def __init__(self, u: float, batch: int = 1):
        super().__init__([Stream(0)] * batch, [0] * batch, [0] * batch)
        self.u = u

    def _uniforms(self, column: int) -> np.ndarray:
        return np.full(len(self._streams), self.u)


@cache
def on_trial(rule: Rule, shape: Shape, answers: tuple[bool, ...]) -> bool:
    """Whether the next answer can matter to a sequence that has received `answers`. In a batch the rules proceed
    in lockstep and also ask for sequences that are finished; branching there would change nothing and cost a lot."""
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
    """What one run emitted: its tokens, how many of them were draft tokens, and its probability."""

    tokens: Text
    accepted: int
    weight: Fraction


def pack(rows: Seq[WeightedDraft]) -> tuple[Draft, Tensor]:
    """The draft and the distributions [B + N, V] that `verify` takes, for one sequence per entry."""
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
    """Every outcome of verifying each of `drafts`, given that draft. They are verified in batches of `at_once`, so
    a batch mixes runs of several drafts and shapes."""
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
    """The outcomes of all `drafts` together, each with the probability of its draft and of the run after it."""
    return [
        Outcome(outcome.tokens, outcome.accepted, draft.weight * outcome.weight)
        for draft, outcomes in zip(drafts, explore(rule, drafts, at_once), strict=True)
        for outcome in outcomes
    ]


def outcomes_of(rule: Rule, world: World, shape: Shape, at_once: int = 4096) -> list[Outcome]:
    """Every outcome of drafting *and* verifying, with its probability."""
    return weighed(rule, list(every_draft(world, shape)), at_once)


def completed(world: World, outcomes: Iterable[Outcome], length: int) -> dict[Text, Fraction]:
    """The distribution of the first `length` tokens: each outcome is continued by the target alone."""
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
    """The distribution of the first `length` tokens of plain decoding."""
    return completed(world, [Outcome((t,), 0, p) for t, p in enumerate(world.p(())) if p], length)


def emitted_distribution(rule: Rule, world: World, shape: Shape, at_once: int = 4096) -> dict[Text, Fraction]:
    """The distribution of the first height + 1 tokens when a step with that rule and shape comes first."""
    return completed(world, outcomes_of(rule, world, shape, at_once), shape.height + 1)


def distance(a: dict[Text, Fraction], b: dict[Text, Fraction]) -> Fraction:
    """Total variation distance."""
    return sum((abs(a.get(t, Fraction(0)) - b.get(t, Fraction(0))) for t in {*a, *b}), Fraction(0)) / 2


def mean_accepted(rule: Rule, world: World, shape: Shape) -> Fraction:
    """Expected number of accepted draft tokens of one step."""
    return sum((o.accepted * o.weight for o in outcomes_of(rule, world, shape)), Fraction(0))
