"""`Dice`, `invert` and `sample_draft_tokens`: random choices in production have the distributions that the proofs
assume."""

import math

import numpy as np
import pytest
import torch

from slipstream.core.dice import Dice, invert
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.rules import RULES, verify
from slipstream.core.sequence import Sequence
from slipstream.drafters.chains import sample_draft_tokens
from tests.core.exact import FixedDice
from tests.significance import assert_distribution, g_test

PROBS = [0.5, 0.0, 0.25, 0.2, 0.05, 0.0]
WANTED = dict(enumerate(PROBS))
N = 3000


def many(count: int = 0, position: int = 0) -> Dice:
    """Dice for N sequences with seeds 0..N-1."""
    return Dice([Stream(seed) for seed in range(N)], [position] * N, [count] * N)


def probs(rows: int = 1) -> torch.Tensor:
    return torch.tensor([PROBS], dtype=torch.float64).repeat(rows, 1)


@pytest.mark.parametrize("probability", [0.0, 0.01, 0.3, 1.0])
def test_accept_returns_true_with_the_given_probability(probability: float) -> None:
    dice = many(count=2)
    for _ in range(2):
        assert_distribution(dice.accept([probability] * N), {True: probability, False: 1 - probability})


def test_accept_is_certain_above_one_and_impossible_at_zero_and_nan() -> None:
    probability = [0.0, math.nan, -1.0, 1e-300, 1.0, math.inf]
    assert FixedDice(0.0, 6).accept(probability) == [False, False, False, True, True, True]


def test_choose_samples_the_distribution() -> None:
    assert_distribution(many().choose(probs(N)).tolist(), WANTED)


def test_pick_samples_the_distribution() -> None:
    """Gumbel-max: argmax(log p + noise) is a sample of p."""
    picks = many().pick(probs(N), range(N), [0] * N)
    assert_distribution(picks.tolist(), WANTED)


def test_picks_of_different_positions_are_independent() -> None:
    rows = torch.cat([probs(N), probs(N)])
    picks = many().pick(rows, [*range(N), *range(N)], [0] * N + [1] * N).tolist()
    pairs = list(zip(picks[:N], picks[N:], strict=True))
    assert_distribution(pairs, {(a, b): PROBS[a] * PROBS[b] for a in WANTED for b in WANTED})


def test_picks_of_one_position_share_their_noise() -> None:
    """Two nodes at one depth, or one position met in two steps, or draft and target: the same pick for one
    distribution."""
    streams = [Stream(seed) for seed in range(50)]
    here = Dice(streams, [7] * 50, [0] * 50).pick(probs(50), range(50), [2] * 50)
    later = Dice(streams, [9] * 50, [0] * 50).pick(probs(50), range(50), [0] * 50)
    assert torch.equal(here, later)
    seqs = [Sequence([0] * 9, coupled=True, stream=stream) for stream in streams]
    assert torch.equal(sample_draft_tokens(probs(50), seqs, 0), later)
    seqs = [Sequence([0] * 7, coupled=True, stream=stream) for stream in streams]
    assert torch.equal(sample_draft_tokens(probs(50), seqs, 2), later)


def test_accept_and_choose_use_different_numbers() -> None:
    """Sampling after a rejection must not depend on the number that rejected."""
    dice = many(count=1)
    accepted = dice.accept([0.5] * N)
    chosen = dice.choose(probs(N))
    assert_distribution([t for t, yes in zip(chosen.tolist(), accepted, strict=True) if not yes], WANTED)


# --- invert ---------------------------------------------------------------------------------------------------------


def test_invert_follows_the_distribution_function() -> None:
    u = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.7499, 0.75, 0.949, 0.951, 0.9999], dtype=torch.float64)
    assert invert(probs(9), u).tolist() == [0, 0, 0, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, 1 - 2**-53])
def test_invert_never_returns_an_impossible_token(u: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.dirichlet([0.05] * 40, 300)  # most entries next to nothing
    rows[rng.random(rows.shape) < 0.5] = 0
    rows[:, 0] = rows[:, -1] = 0
    rows = rows[rows.sum(-1) > 0]
    mass = torch.from_numpy(rows / rows.sum(-1, keepdims=True))
    token = invert(mass, torch.full((len(mass),), u, dtype=torch.float64))
    assert bool((mass.gather(1, token[:, None]) > 0).all())


def test_invert_accepts_rows_that_do_not_quite_sum_to_one() -> None:
    for factor in (1 - 1e-9, 1 + 1e-9):
        tokens = invert(probs() * factor, torch.tensor([1 - 2**-53], dtype=torch.float64))
        assert tokens.tolist() == [4]


# --- sample_draft_tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_draft_token_has_the_distribution_it_is_drawn_from(coupled: bool, depth: int) -> None:
    seqs = [Sequence([0, 0], stream=Stream(seed), coupled=coupled) for seed in range(N)]
    assert_distribution(sample_draft_tokens(probs(N), seqs, depth).tolist(), WANTED)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafting_and_verifying_together_keep_the_distribution(rule: str) -> None:
    """The exact proof assumes that the draft token is independent of the numbers that verify it. Here with production's
    numbers, for the first two tokens, a chain of two, and distributions that differ from position to position."""
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.4, 0.1]], dtype=torch.float64)
    seqs = [Sequence([0], SamplingParams(seed=seed)) for seed in range(N)]
    drafted = torch.stack([sample_draft_tokens(q[i].repeat(N, 1), seqs, i) for i in range(2)], 1)  # [N, 2]
    draft = Draft.chains(drafted.tolist(), q.repeat(N, 1))
    verdict = verify(draft, p.repeat(N, 1), RULES[rule], Dice([s.random for s in seqs], [1] * N, [2] * N))
    runs = [verdict.run(draft, b) for b in range(N)]
    assert_distribution([run[0] for run in runs], dict(enumerate(p[0].tolist())))
    second = [(run[0], run[1]) for run in runs if len(run) > 1]  # the second token's distribution is p, too
    for token in range(3):
        assert_distribution([b for a, b in second if a == token], dict(enumerate(p[1].tolist())))


def test_verifying_a_draft_token_with_the_random_number_that_drew_it_is_caught() -> None:
    """Negative control of the test above, and of the purposes: one uniform used twice."""
    p, q = torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0.7, 0.3]]).double()
    u = torch.from_numpy(np.array([Stream(seed).uniforms(1, 1, 1)[0] for seed in range(N)]))
    x = invert(q.repeat(N, 1), u)
    accepted = u < (p / q)[0][x]
    out = torch.where(accepted, x, 1)
    assert g_test(out.tolist(), {0: 0.5, 1: 0.5}) < 1e-6
