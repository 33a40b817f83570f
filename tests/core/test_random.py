"""Streams: addressed by (seed, purpose, position, index), uniform, independent, without global state."""

import math
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.core.dice import Dice, invert
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT, NOISE, VERIFY, Stream
from slipstream.core.rules import RULES, verify
from slipstream.core.sequence import Sequence
from slipstream.drafters.chains import sample_draft_tokens
from tests.core.exact import FixedDice
from tests.significance import LEVEL, assert_distribution, g_test


def test_a_number_depends_on_seed_purpose_position_and_index_alone() -> None:
    """Not on earlier requests for numbers, their order, or how many were drawn at once."""
    stream = Stream(7)
    wanted = {(purpose, i): stream.uniforms(purpose, i, 6) for purpose in (VERIFY, DRAFT, NOISE) for i in range(9)}
    again = Stream(7)
    for key in random.Random(0).sample(sorted(wanted), len(wanted)):
        for n in (6, 1, 3):
            assert again.uniforms(*key, n).tolist() == wanted[key][:n].tolist()


def test_streams_of_other_seeds_purposes_and_positions_share_no_number() -> None:
    seeds = (0, 1, 2, -1, 2**63, 2**64 - 2)
    keys = [(s, purpose, i) for s in seeds for purpose in (VERIFY, DRAFT, NOISE) for i in (0, 1, 2, 4095)]
    drawn = [Stream(s).uniforms(purpose, i, 8).tolist() for s, purpose, i in keys]
    for a, b in combinations(drawn, 2):
        assert not {*a} & {*b}


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**63), 2**64 - 1, 10**30])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert Stream(seed).uniforms(VERIFY, 3, 2).tolist() == Stream(seed).uniforms(VERIFY, 3, 2).tolist()


def test_unseeded_streams_differ_and_no_global_random_state_is_changed() -> None:
    assert len({Stream().seed for _ in range(50)}) == 50

    def states() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = states()
    Stream(3).uniforms(DRAFT, 0, 100)
    Stream().gumbel(0, 100)
    assert states() == before


def test_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    along_index = Stream(11).uniforms(VERIFY, 0, 4000)
    along_position = [Stream(11).uniforms(VERIFY, i, 1)[0] for i in range(4000)]
    along_seed = [Stream(i).uniforms(VERIFY, 5, 1)[0] for i in range(4000)]
    for numbers in (along_index, along_position, along_seed):
        assert stats.kstest(numbers, "uniform").pvalue >= LEVEL
        assert min(numbers) >= 0
        assert max(numbers) < 1


def test_numbers_of_a_step_are_independent_of_each_other_and_of_the_draft() -> None:
    """Pairs (choice, acceptance), (position, next position) and (draft, verification) fill the square evenly."""
    stream = Stream(5)
    pairs = {
        "within a position": [tuple(stream.uniforms(VERIFY, i, 2)) for i in range(4000)],
        "next position": [
            (stream.uniforms(VERIFY, i, 1)[0], stream.uniforms(VERIFY, i + 1, 1)[0]) for i in range(4000)
        ],
        "draft and verify": [(stream.uniforms(DRAFT, i, 1)[0], stream.uniforms(VERIFY, i, 1)[0]) for i in range(4000)],
    }
    even = {(a, b): 1 / 16 for a in range(4) for b in range(4)}
    for several in pairs.values():
        assert_distribution([(int(4 * a), int(4 * b)) for a, b in several], even)


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    assert stats.kstest(Stream(2).gumbel(9, 5000), "gumbel_r").pvalue >= LEVEL
    assert np.isfinite(Stream(2).gumbel(9, 5000)).all()


def test_gumbel_noise_stays_finite_at_a_uniform_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    for u in (0.0, 1 - 2**-53):
        monkeypatch.setattr(Stream, "uniforms", lambda self, purpose, position, n, u=u: np.full(n, u))
        assert np.isfinite(Stream(0).gumbel(0, 3)).all()


def test_python_threads_that_draw_at_once_get_the_numbers_of_one() -> None:
    """The streams of a thread share a generator."""

    def draw(seed: int) -> list[list[float]]:
        return [Stream(seed).uniforms(VERIFY, i, 3).tolist() for i in range(200)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(draw, range(40))) == [draw(seed) for seed in range(40)]


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


def test_choose_and_pick_sample_the_distribution_and_picks_of_different_positions_are_independent() -> None:
    assert_distribution(many().choose(probs(N)).tolist(), WANTED)
    # Gumbel-max: argmax(log p + noise) is a sample of p.
    picks = many().pick(probs(N), range(N), [0] * N)
    assert_distribution(picks.tolist(), WANTED)
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
    seqs = [Sequence([0] * 9, rule=RULES["coupled"], stream=stream) for stream in streams]
    assert torch.equal(sample_draft_tokens(probs(50), seqs, 0), later)
    seqs = [Sequence([0] * 7, rule=RULES["coupled"], stream=stream) for stream in streams]
    assert torch.equal(sample_draft_tokens(probs(50), seqs, 2), later)


def test_accept_and_choose_use_different_numbers() -> None:
    """Sampling after a rejection must not depend on the number that rejected."""
    dice = many(count=1)
    accepted = dice.accept([0.5] * N)
    chosen = dice.choose(probs(N))
    assert_distribution([t for t, yes in zip(chosen.tolist(), accepted, strict=True) if not yes], WANTED)


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


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_draft_token_has_the_distribution_it_is_drawn_from(coupled: bool, depth: int) -> None:
    seqs = [
        Sequence([0, 0], stream=Stream(seed), rule=RULES["coupled" if coupled else "rejection"]) for seed in range(N)
    ]
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
