"""What each rule accepts, to the published figure, and the wrong rules, which must be caught.

Figures are those of the papers or computed by hand with fractions; the enumeration must reproduce them exactly.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.rules import RULES, Rule, find_rule, verify
from slipstream.errors import RuleError
from slipstream.theory.closed_forms import expect_tokens
from tests.core import wrong
from tests.core.exact import (
    FixedDice,
    Outcome,
    distance,
    emitted_distribution,
    explore,
    mean_accepted,
    outcomes_of,
    rows_of,
    target_distribution,
    weighed,
)
from tests.core.worlds import Distribution, Shape, WeightedDraft, every_draft, probs, random_world, steady

REJECTION, BLOCK, COUPLED = RULES["rejection"], RULES["block"], RULES["coupled"]
P, Q = probs(7, 2, 1), probs(5, 3, 2)
ONE = Shape.chain("s")


def first_token(outcomes: list[Outcome], vocab: int) -> Distribution:
    """The distribution of the first token emitted."""
    return tuple(sum((o.weight for o in outcomes if o.tokens[0] == t), Fraction(0)) for t in range(vocab))


def accepted(outcomes: list[Outcome]) -> Fraction:
    return sum((o.accepted * o.weight for o in outcomes), Fraction(0))


def thousandths(*values: int) -> Distribution:
    return tuple(Fraction(v, 1000) for v in values)


# --- one draft token: p = (.7, .2, .1), q = (.5, .3, .2) --------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "output", "error", "accept"),
    [
        (REJECTION, (700, 200, 100), 0, 800),
        (BLOCK, (700, 200, 100), 0, 800),
        (COUPLED, (700, 200, 100), 0, 430),  # sample and compare: sum p q, with independent noise on either side
        (wrong.A, (749, 174, 77), 49, 430),
        (wrong.B, (920, 60, 20), 220, 430),
        (wrong.C, (640, 240, 120), 60, 800),
        (wrong.D, (1000, 0, 0), 300, 500),
    ],
    ids=lambda x: x.name if isinstance(x, Rule) else "",
)
def test_one_sampled_draft_token_gives_the_table(rule: Rule, output: tuple[int, ...], error: int, accept: int) -> None:
    outcomes = outcomes_of(rule, steady(P, Q), ONE, at_once=1)
    assert first_token(outcomes, 3) == thousandths(*output)
    assert distance(dict(enumerate(first_token(outcomes, 3))), dict(enumerate(P))) == Fraction(error, 1000)
    assert accepted(outcomes) == Fraction(accept, 1000)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["rejection", "block"])
def test_an_argmax_draft_token_must_not_carry_its_softmax_as_q(rule: Rule) -> None:
    """The same production rule, fed a q that the draft token was not drawn from: output 1 0 0."""
    bad = WeightedDraft(steady(P, Q), ONE, [0], [Q])
    outcomes = explore(rule, [bad])[0]
    assert first_token(outcomes, 3) == thousandths(1000, 0, 0)
    assert accepted(outcomes) == 1
    honest = outcomes_of(rule, steady(P, Q), Shape.chain("p"))
    assert first_token(honest, 3) == P
    assert accepted(honest) == P[0]


def test_accepting_with_p_and_removing_the_draft_token_is_exact_for_any_drafter() -> None:
    """Draft tokens without q: accept with p(x), on rejection sample p without x. Exact although the draft token was
    sampled."""
    world = steady(P, Q)
    drafts = [WeightedDraft(world, Shape.chain("p"), d.tokens, d.q, d.weight) for d in every_draft(world, ONE)]
    outcomes = weighed(REJECTION, drafts)
    assert first_token(outcomes, 3) == P
    assert accepted(outcomes) == Fraction(430, 1000)


@pytest.mark.parametrize("rule", [wrong.A, wrong.B, wrong.C, wrong.D], ids=lambda rule: rule.name)
def test_wrong_rules_are_caught_on_random_languages(rule: Rule) -> None:
    caught = 0
    for seed in range(12):
        world = random_world(seed, 3)
        caught += emitted_distribution(rule, world, Shape.chain("ss"), at_once=1) != target_distribution(world, 3)
    assert caught >= 10  # p == q in some places, where most faults have no effect


# --- siblings: p = (.4, .3, .2, .1), q reversed, two draft tokens -----------------------------------------------------

SLOPE = probs(4, 3, 2, 1)
PAIR = Shape((-1, -1), "ww")


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        (Shape.chain("s"), Fraction(60, 100)),
        (Shape((-1, -1), "ss"), Fraction(72, 100)),  # SpecInfer: independent siblings
        (PAIR, Fraction(7643, 10000)),  # without replacement, q renormalised
        (Shape((-1, -1), "pp"), Fraction(10, 100)),  # the same point mass twice: the second adds nothing
    ],
    ids=["chain", "specinfer", "without replacement", "duplicate point mass"],
)
def test_siblings_are_accepted_at_the_published_rate(shape: Shape, share: Fraction) -> None:
    outcomes = outcomes_of(REJECTION, steady(SLOPE, SLOPE[::-1]), shape)
    assert first_token(outcomes, 4) == SLOPE
    assert round(accepted(outcomes), 4) == share


def test_deterministic_siblings_are_accepted_with_the_mass_they_cover() -> None:
    """EAGLE's and Medusa's top-k children: one of them is accepted with probability sum p(children)."""
    world = replace(steady(SLOPE, SLOPE), fixed=lambda text, node: node)
    outcomes = outcomes_of(REJECTION, world, Shape((-1, -1, -1), "ppp"))
    assert first_token(outcomes, 4) == SLOPE
    assert accepted(outcomes) == sum(SLOPE[:3])


def test_p_must_be_updated_between_siblings() -> None:
    outcomes = outcomes_of(wrong.FROZEN_P, steady(SLOPE, SLOPE[::-1]), PAIR, at_once=1)
    assert distance(dict(enumerate(first_token(outcomes, 4))), dict(enumerate(SLOPE))) == Fraction(14, 100)


@pytest.mark.parametrize(
    ("gamma", "token", "block"),
    [
        (1, Fraction(2, 3), Fraction(2, 3)),
        (2, Fraction(10, 9), Fraction(11, 9)),  # the figures of 2403.10444
        (3, Fraction(38, 27), Fraction(5, 3)),
        (4, Fraction(130, 81), Fraction(166, 81)),
    ],
)
def test_block_verification_accepts_the_published_number(gamma: int, token: Fraction, block: Fraction) -> None:
    p, q = probs(1, 2), probs(2, 1)
    shape = Shape.chain("s" * gamma)
    assert mean_accepted(REJECTION, steady(p, q), shape) == token == expect_tokens(sum(map(min, p, q)), gamma) - 1
    assert mean_accepted(BLOCK, steady(p, q), shape) == block


def test_block_accepts_no_fewer_than_rejection_and_drafts_of_the_target_are_always_accepted() -> None:
    more = 0
    for seed in range(40):
        world, shape = random_world(seed, 2 + seed % 3), Shape.chain("sps" if seed % 4 == 0 else "sss")
        block, token = mean_accepted(BLOCK, world, shape), mean_accepted(REJECTION, world, shape)
        assert block >= token
        more += block > token
    assert more >= 10
    for rule in (REJECTION, BLOCK):
        for seed in range(5):
            world = random_world(seed, 3)
            assert mean_accepted(rule, replace(world, q=world.p), Shape.chain("sss")) == 3


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_an_impossible_token_is_never_accepted(rule: str, u: float) -> None:
    """`u <= p/q` with u = 0 accepts a token of probability zero; the strict test does not."""
    for q in (None, rows_of([0.5, 0.5, 0.0])):
        draft = Draft.chains([[1]], q)
        verdict = verify(draft, rows_of([0.6, 0.0, 0.4], [1, 0, 0]), RULES[rule], FixedDice(u))
        assert verdict.path == [[]]
        assert verdict.next[0] in (0, 2)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("u", [0.0, 0.999999])
def test_a_certain_draft_token_is_always_accepted(rule: str, u: float) -> None:
    for q in (None, rows_of([0.0, 1.0])):
        verdict = verify(Draft.chains([[1]], q), rows_of([0.0, 1.0], [1.0, 0.0]), RULES[rule], FixedDice(u))
        assert verdict.path == [[0]]
        assert verdict.next == [0]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_equal_distributions_leave_no_empty_residual(rule: str) -> None:
    """p == q up to rounding: the residual has no mass, and the arithmetic must stay finite."""
    p = [0.1, 0.2, 0.7]
    q = [x * (1 + 1e-16) for x in p]
    for u in (0.0, 0.3, 1 - 2**-53):
        draft = Draft.chains([[2, 2]], rows_of(q, q))
        verdict = verify(draft, rows_of(p, p, p), RULES[rule], FixedDice(u))
        assert 0 <= verdict.next[0] < 3


def test_what_a_rule_cannot_verify_and_an_unknown_rule_are_refused() -> None:
    with pytest.raises(RuleError, match="over more than one token"):
        verify(Draft.chains([[0]]), rows_of([0.5, 0.5], [1.0, 0.0]), RULES["greedy"], FixedDice(0.5))
    tree = Draft(torch.tensor([0, 1]), (-1, -1), (0, 2))
    with pytest.raises(RuleError, match="tree"):
        verify(tree, rows_of([0.5, 0.5], [1, 0], [1, 0]), BLOCK, FixedDice(0.5))
    with pytest.raises(RuleError, match="rejection"):
        find_rule("rejections")
