"""A constrained text has exactly the constrained distribution: the target's, restricted to what the form allows and
renormalised, token by token. Proven by enumeration with fractions, for every rule, through `prune` and `verify`.

The control cuts drawn draft tokens, too, and must be found wrong.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

import slipstream.core.step
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import prune
from slipstream.core.structured import Structured
from tests.core.exact import completed, distance, pack, target_distribution, weighed
from tests.core.letter_tokenizer import constraint_of
from tests.core.worlds import Shape, Text, WeightedDraft, World, every_draft, probs, random_world, steady

ONE = SamplingParams(structured=Structured(regex="a"))


@dataclass
class OneOf:
    """The form of the texts whose beginnings are `prefixes`: a constraint that is written in one line."""

    vocab: int
    prefixes: set[Text]

    def find_allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> np.ndarray:
        return np.array([[self.may_follow((*output, *tail), t) for t in range(self.vocab)] for tail in tails])

    def may_follow(self, text: Text, token: int) -> bool:
        return text not in self.prefixes or (*text, token) in self.prefixes

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        return False


def form(seed: int, world: World, length: int) -> OneOf:
    """A random form: some of the tokens that are possible after each text, at least one of them."""
    rng, prefixes = np.random.default_rng(seed), {()}
    for n in range(length):
        for text in [text for text in prefixes if len(text) == n]:
            possible = [t for t, p in enumerate(world.p(text)) if p]
            kept = rng.permutation(possible)[: rng.integers(1, len(possible) + 1)]
            prefixes |= {(*text, int(t)) for t in kept}
    return OneOf(world.vocab, prefixes)


def constrained(world: World, form: OneOf) -> World:
    """The world whose target is restricted to the form, and whose drafter is not."""

    def p(text: Text) -> tuple[Fraction, ...]:
        allowed = [x if form.may_follow(text, t) else Fraction(0) for t, x in enumerate(world.p(text))]
        return tuple(x / sum(allowed) for x in allowed)

    return World(world.vocab, p, world.q, world.fixed)


def pruned(world: World, drawn: WeightedDraft, form: OneOf) -> WeightedDraft:
    """The draft that production's `prune` leaves of `made`."""
    draft, _ = pack([drawn])
    seq = Sequence([0], ONE, constraint=form)
    left = prune([seq], draft)
    nodes = {drawn.text(i): i for i in range(len(drawn.tokens))}
    texts = [tuple(left.ids[j] for j in left.ancestors(0, i)) for i in range(len(left))]
    kept = [nodes[text] for text in texts]
    kinds = "".join(drawn.shape.kinds[i] for i in kept)
    return WeightedDraft(world, Shape(tuple(left.parents), kinds), left.ids, [drawn.q[i] for i in kept], drawn.weight)


def emitted(rule: str, world: World, shape: Shape, form: OneOf) -> dict[Text, Fraction]:
    limited = constrained(world, form)
    drafts = [pruned(limited, draft, form) for draft in every_draft(limited, shape)]
    return completed(limited, weighed(RULES[rule], drafts), shape.height + 1)


SHAPES = [Shape.chain(kinds) for kinds in ("s", "p", "ss", "sp", "ps", "pp", "sps")] + [
    Shape((-1, -1), "pp"), Shape((-1, -1), "ww"), Shape((-1, -1, 0), "ppp"), Shape((-1, -1, 0), "wwp"),
    Shape((-1, -1, 0, 1), "ppss"), Shape((-1, 0, 0), "sww"),
]  # fmt: skip


def unlike(shape: Shape, world: World) -> bool:
    """Whether two nodes of each draft have different texts, so that nodes can be named by them."""
    return all(len({m.text(i) for i in range(len(m.tokens))}) == len(m.tokens) for m in every_draft(world, shape))


CHAINS = [shape for shape in SHAPES if shape == Shape.chain(shape.kinds)]
CASES = [*product(("rejection", "coupled"), SHAPES), *product(("block",), CHAINS)]


@pytest.mark.parametrize(("rule", "shape"), CASES, ids=str)
def test_a_constrained_step_has_the_constrained_distribution(rule: str, shape: Shape) -> None:
    tested = 0
    for vocab, seed in product((2, 3), range(12)):
        world = random_world(seed, vocab)
        if (rule == "coupled" and vocab ** (2 * len(shape.kinds) + 1) > 1000) or not unlike(shape, world):
            continue
        constraint = form(seed, world, shape.height + 1)
        wanted = target_distribution(constrained(world, constraint), shape.height + 1)
        assert emitted(rule, world, shape, constraint) == wanted
        tested += 1
    assert tested >= 3


def test_at_temperature_zero_the_text_is_the_constrained_argmax() -> None:
    for seed in range(12):
        world = random_world(seed, 3, greedy=True)
        constraint = form(seed, world, 3)
        for shape in (Shape.chain("ss"), Shape.chain("pp"), Shape((-1, -1, 0), "wwp")):
            wanted = target_distribution(constrained(world, constraint), shape.height + 1)
            if unlike(shape, world):
                assert emitted("greedy", world, shape, constraint) == wanted


P, Q = probs(1, 1, 0), probs(3, 1, 1)
FORBIDS_LAST = OneOf(3, {(), (0,), (1,), *product((0, 1), range(3))})


def test_control_cutting_drawn_draft_tokens_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (.5, .5, 0), q = (.6, .2, .2): the first token is then (.6, .4), a distance of .1."""
    world = steady(P, Q)
    wanted = target_distribution(constrained(world, FORBIDS_LAST), 2)
    assert emitted("rejection", world, Shape.chain("s"), FORBIDS_LAST) == wanted
    monkeypatch.setattr(slipstream.core.step, "_certain", lambda draft, i: True)
    outcomes = emitted("rejection", world, Shape.chain("s"), FORBIDS_LAST)
    assert distance(outcomes, wanted) == Fraction(1, 10)


AB = Structured(regex="ab(c|d)e*")  # letters a.. are the tokens 0..


def seq_of(params: SamplingParams) -> Sequence:
    return Sequence([0], params, constraint=constraint_of(params, 8))


def test_forbidden_point_masses_and_all_below_them_are_cut_of_constrained_sequences_only() -> None:
    #             a  f  b  c  d  e  a     b under f; e under c; a under e
    draft = Draft.of([0, 5, 1, 2, 3, 4, 0, 1], [-1, -1, 0, 2, 2, 3, 5, 1], (0, 8))
    left = prune([seq_of(SamplingParams(structured=AB))], draft)
    assert left.ids == [0, 1, 2, 3, 4]
    assert list(left.parents) == [-1, 0, 1, 1, 2]
    assert list(left.splits) == [0, 5]
    draft = Draft.chains([[5, 1], [0, 5, 1], [], [5]])
    free, restricted = SamplingParams(), SamplingParams(structured=AB)
    left = prune([seq_of(free), seq_of(restricted), seq_of(restricted), seq_of(free)], draft)
    assert left.ids == [5, 1, 0, 5]
    assert list(left.splits) == [0, 2, 3, 3, 4]


def test_a_node_with_a_one_hot_q_counts_as_a_point_mass_and_others_as_drawn() -> None:
    q = torch.zeros(3, 8, dtype=torch.float64)
    q[0, 0] = q[1, 5] = 1.0
    q[2, [1, 5]] = 0.5
    draft = Draft.of([0, 5, 5], [-1, 0, 0], (0, 3), q)
    left = prune([seq_of(SamplingParams(structured=AB))], draft)
    assert left.ids == [0, 5]
    assert torch.equal(left.q, q[[0, 2]])


def test_a_draft_without_forbidden_nodes_or_with_a_window_of_any_sequence_stays_as_it_is() -> None:
    seq = seq_of(SamplingParams(structured=AB))
    for draft in (Draft.chains([[0, 1, 2]]), Draft.of([5, 6], [-1, -1], (0, 2), acceptable=[True, False])):
        assert prune([seq], draft) is draft
    seqs = [seq_of(SamplingParams(structured=AB)) for _ in range(2)]
    draft = Draft.of([5, 6, 0, 5], [-1, -1, -1, 0], (0, 2, 4), acceptable=[True, False, True, True])
    left = prune(seqs, draft)
    assert left.ids == [5, 6, 0]
    assert left.acceptable == [True, False, True]
    assert list(left.splits) == [0, 2, 3]
