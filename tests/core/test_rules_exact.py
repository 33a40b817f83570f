"""The promise: every rule emits exactly the distribution of the target. Proven by enumeration with fractions.

Each test draws tiny random languages, enumerates every draft and every random choice of the production `verify`, and
compares the distribution of the first gamma + 1 tokens with the target's own: `==` on fractions, no tolerance.
"""

from itertools import product

import pytest
import torch

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.random import Stream
from slipstream.core.rules import RULES, verify
from tests.core.exact import Outcome, completed, emitted_distribution, explore, outcomes_of, pack, target_distribution
from tests.core.worlds import Shape, World, every_draft, probs, random_world, steady

SAMPLED = [name for name in RULES if name != "greedy"]  # greedy is a rule for temperature 0 only

CHAINS = [(vocab, gamma) for vocab in (2, 3, 4) for gamma in (1, 2, 3, 4)]

#   parents            kinds of draft tokens
TREES = [
    ((-1, -1), ["ss", "ww", "pp", "sp", "ps", "sw", "ws", "ns", "np"]),
    ((-1, -1, -1), ["sss", "www", "ppp", "spw", "wpw", "wnw"]),
    ((-1, -1, 0), ["sss", "wws", "ppp", "wwp", "nsp"]),
    ((-1, -1, 0, 1), ["ssss", "wwss", "pppp", "wwpp", "wwsn"]),
    ((-1, 0, 0), ["sss", "sww", "spp", "pww", "nww"]),
    ((-1, 0, 0, 1), ["ssss", "swws", "pppp", "swwn"]),
    ((-1, -1, 0, 0), ["wwww", "ppww", "wwpp"]),
    ((-1, 0, -1, 1), ["wswp", "ssss"]),  # the nodes of one branch need not be adjacent
    ((-1, -1, -1, -1), ["wwww", "ssss", "pppp"]),
]
TREE_CASES = [(parents, kinds) for parents, several in TREES for kinds in several]


def chain_kinds(gamma: int) -> list[str]:
    return sorted({"s" * gamma, "p" * gamma, "sp" * gamma, "ps" * gamma, "ssp" * gamma}, key=len)


def cost(rule: str, vocab: int, nodes: int) -> int:
    """`coupled` picks at every node before it looks at the draft tokens, so its branches multiply."""
    return vocab ** (nodes + 1) * vocab**nodes if rule == "coupled" else 0


def assert_lossless(rule: str, world: World, shape: Shape) -> None:
    assert emitted_distribution(RULES[rule], world, shape) == target_distribution(world, shape.height + 1)


CHAIN_CASES = [(rule, *sizes) for rule in SAMPLED for sizes in CHAINS if cost(rule, *sizes) <= 10**4]
"""Without those of too many picks to enumerate, which the test of every pick table covers."""


@pytest.mark.parametrize(("rule", "vocab", "gamma"), CHAIN_CASES)
def test_a_chain_keeps_the_targets_distribution(rule: str, vocab: int, gamma: int) -> None:
    for seed in range(12 if vocab < 4 or gamma < 4 else 4):
        for kinds in {kinds[:gamma] for kinds in chain_kinds(gamma)}:
            assert_lossless(rule, random_world(1000 * gamma + seed, vocab), Shape.chain(kinds))


@pytest.mark.parametrize("rule", [name for name in SAMPLED if name != "block"])
@pytest.mark.parametrize(("parents", "kinds"), TREE_CASES)
def test_a_tree_keeps_the_targets_distribution(rule: str, parents: tuple[int, ...], kinds: str) -> None:
    for vocab in (2, 3, 4):
        for seed in range(6 if vocab < 4 else 2):
            if cost(rule, vocab, len(kinds)) <= 2000:
                assert_lossless(rule, random_world(seed, vocab), Shape(parents, kinds))


@pytest.mark.parametrize("rule", RULES)
def test_at_temperature_zero_every_rule_emits_the_argmax(rule: str) -> None:
    for vocab, seed in product((2, 3, 4), range(6)):
        world = random_world(seed, vocab, greedy=True)
        for shape in (Shape.chain("ssss"), Shape.chain("spp"), Shape((-1, -1, 0, 1), "wwsp"), Shape((-1, -1), "np")):
            is_tree = shape != Shape.chain(shape.kinds)
            if not (rule == "block" and is_tree):
                assert_lossless(rule, world, shape)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("at_once", [1, 5, 4096])
def test_other_sequences_of_a_ragged_batch_change_nothing(rule: str, at_once: int) -> None:
    """Sequences with different shapes, different distributions and no draft at all share the batches; each one's
    outcomes, given its own random choices, are those that it has alone."""
    chains = [Shape.chain(kinds) for kinds in ("", "s", "sss", "p", "psp")]
    trees = [Shape((-1, -1, 0), "wws"), Shape((-1, -1, 0, 1), "ssnp"), Shape((-1, -1), "pp")]
    shapes = chains if rule == "block" else chains + trees
    worlds = [random_world(40 + i, 3) for i in range(len(shapes))]
    owners, drafts = [], []
    for i, (world, shape) in enumerate(zip(worlds, shapes, strict=True)):
        for draft in every_draft(world, shape):
            owners.append(i)
            drafts.append(draft)
    order = sorted(range(len(drafts)), key=lambda i: (i * 7919) % len(drafts))  # batches mix all kinds
    explored = explore(RULES[rule], [drafts[i] for i in order], at_once)
    for i, (world, shape) in enumerate(zip(worlds, shapes, strict=True)):
        pairs = [(drafts[j], explored[k]) for k, j in enumerate(order) if owners[j] == i]
        outcomes = [Outcome(o.tokens, o.accepted, draft.weight * o.weight) for draft, results in pairs for o in results]
        assert completed(world, outcomes, shape.height + 1) == target_distribution(world, shape.height + 1)


@pytest.mark.parametrize("rule", RULES)
def test_with_production_dice_a_sequence_gets_the_same_result_alone_and_in_a_batch(rule: str) -> None:
    """Production random numbers are addressed by (seed, position) alone."""
    shapes = [Shape.chain("ss"), Shape.chain(""), Shape.chain("s"), Shape.chain("ssss")]
    if rule != "block":
        shapes += [Shape((-1, -1, 0, 1), "wwss"), Shape((-1, -1, -1), "wwp")]
    for seed in range(8):
        rows = []
        for i, shape in enumerate(shapes):
            drafts = list(every_draft(random_world(seed + 50 * i, 4, greedy=rule == "greedy"), shape))
            rows.append(drafts[(seed * 31 + i) % len(drafts)])

        def decide(some: list[int], rows=rows, seed=seed) -> list[list[int]]:
            draft, distributions = pack([rows[i] for i in some])
            counts = [len(rows[i].tokens) for i in some]
            dice = Dice([Stream(100 * seed + i) for i in some], [17 + i for i in some], counts)
            verdict = verify(draft, distributions, RULES[rule], dice)
            return [verdict.run(draft, b) for b in range(len(some))]

        everyone = list(range(len(rows)))
        together = decide(everyone)
        assert [decide([i])[0] for i in everyone] == together
        assert decide(everyone[::-1])[::-1] == together


def test_an_empty_draft_is_plain_decoding() -> None:
    for rule in SAMPLED:
        world = random_world(3, 4)
        outcomes = outcomes_of(RULES[rule], world, Shape.chain(""))
        assert {o.tokens: o.weight for o in outcomes} == target_distribution(world, 1)


class Picks(Dice):
    """Replaces the shared noise: a table with the token that the target picks after each text."""

    def __init__(self, table: dict[tuple[int, ...], int], texts: list[tuple[int, ...]]):
        self.table, self.texts = table, texts

    def pick(self, probs, owner, depth):
        assert list(depth) == [len(text) for text in self.texts], "noise belongs to the position of the token"
        assert list(owner) == [0] * len(depth)
        return torch.tensor([self.table[text] for text in self.texts])


@pytest.mark.parametrize(
    ("vocab", "shape"),
    [
        (2, Shape.chain("pp")), (2, Shape((-1, -1, 0, 1), "pppp")), (2, Shape((-1, -1, 0), "pnp")),
        (3, Shape.chain("p")), (3, Shape((-1, -1), "pp")),
    ],
    ids=str,
)  # fmt: skip
def test_coupled_emits_the_targets_picks_for_any_draft(vocab: int, shape: Shape) -> None:
    """For every table of picks and every draft, the output is a prefix of what the target would have picked alone.
    *Every* pair is tried, so drafts that depend on the noise are included. If the picks have distribution p and are
    independent between positions (Gumbel-max, tested in test_dice), losslessness follows."""
    texts = [text for n in range(shape.height + 1) for text in product(range(vocab), repeat=n)]
    uniform = steady(probs(*[1] * vocab), probs(*[1] * vocab))
    for values in product(range(vocab), repeat=len(texts)):
        table = dict(zip(texts, values, strict=True))
        plain: tuple[int, ...] = ()
        for _ in range(shape.height + 1):
            plain += (table[plain],)
        for tokens in product(range(vocab), repeat=len(shape.parents)):
            acceptable = [kind != "n" for kind in shape.kinds]
            draft = Draft.of(list(tokens), shape.parents, (0, len(tokens)), acceptable=acceptable)
            paths = [()] + [tuple(tokens[j] for j in draft.ancestors(0, i)) for i in range(len(tokens))]
            distributions = torch.full((len(paths), vocab), float(uniform.p(())[0]), dtype=torch.float64)
            verdict = verify(draft, distributions, RULES["coupled"], Picks(table, paths))
            run = tuple(verdict.run(draft, 0))
            assert run == plain[: len(run)]
            assert verdict.count_accepted(0) == len(run) - 1
