"""Streams: addressed by (seed, purpose, position, index), uniform, independent, without global state."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.core.random import DRAFT, NOISE, VERIFY, Stream
from tests.significance import LEVEL, assert_distribution


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


def test_r16_unseeded_streams_differ() -> None:
    assert len({Stream().seed for _ in range(50)}) == 50


def test_no_global_random_state_is_changed() -> None:
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
