"""Operations on rows, and how tokens are picked, against float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from slipstream.backends.native.kernels import arithmetic, records
from slipstream.backends.native.kernels.arithmetic import MAXIMUM, NOISE, UNIFORMS, Picks, pick
from slipstream.backends.native.kernels.memory import address_of
from slipstream.core.dice import invert

rng = np.random.default_rng(0)

N = np.int64


@njit
def exps(x, out, wide, wide_out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = arithmetic.exp(x[i])
    for i in range(wide.shape[0]):
        wide_out[i] = arithmetic.exp_double(wide[i])


@njit
def activated(kind, x, out):  # type: ignore[no-untyped-def]
    arithmetic.activate(kind, x, out)


@njit
def normed(layer, x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    if layer:
        arithmetic.layer_norm(x, weight, bias, eps, out)
    else:
        arithmetic.rms_norm(x, weight, eps, out)


@njit
def extremes(x, n):  # type: ignore[no-untyped-def]
    place = arithmetic.argmax(x, n)
    return arithmetic.maximum(x, n), arithmetic.max_abs(x[:n]), place, arithmetic.is_finite(x[:n])


@njit
def sums(x):  # type: ignore[no-untyped-def]
    return arithmetic.sum_of(address_of(x), x.shape[0]), arithmetic.sum_of_squares(address_of(x), x.shape[0])


@njit
def distribution(logits, heat, probs):  # type: ignore[no-untyped-def]
    arithmetic.softmax(logits, heat, probs)


@njit
def drawn_by(probs, u, logits, heat, noise):  # type: ignore[no-untyped-def]
    return arithmetic.first_above(probs, u), arithmetic.first_maximum(logits, heat, noise)


@njit
def picked(picks, j, logits, probs, drawn):  # type: ignore[no-untyped-def]
    pick(picks, j, logits, probs, drawn)


def test_exponentials() -> None:
    x = np.concatenate([(rng.random(4000).astype(np.float32) - np.float32(0.5)) * 174, [0, -87, 88]]).astype(np.float32)
    wide = np.concatenate([-rng.random(4000) * 708, [0.0]])
    out, wide_out = np.empty_like(x), np.empty_like(wide)
    exps(x, out, wide, wide_out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert np.abs(wide_out / np.exp(wide) - 1).max() < 3e-16 * 2
    assert (out[4000], wide_out[-1]) == (1, 1)
    edges, far = np.array([-1e30, -88, 89, np.inf, -np.inf], np.float32), np.array([-709.0, -1e300, -np.inf])
    clamped, gone = np.empty_like(edges), np.empty_like(far)
    exps(edges, clamped, far, gone)
    low, high = math.exp(-87), math.exp(88)
    assert np.allclose(clamped, [low, low, high, high, low], rtol=1e-6)
    assert not gone.any()


ACTIVATIONS = {
    "silu": (records.SILU, F.silu, 1e-6),
    "gelu": (records.GELU, F.gelu, 5e-7),
    "gelu_tanh": (records.GELU_TANH, lambda x: F.gelu(x, approximate="tanh"), 1e-6),
    "relu": (records.RELU, F.relu, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_functions(name: str) -> None:
    """Within a few 1e-7, relative to the larger of 1 and the value."""
    kind, exact, tolerance = ACTIVATIONS[name]
    x = np.concatenate([np.linspace(-12, 12, 4001), [0, -1e4, 1e4, -1e-20, 1e-20, 1e15]]).astype(np.float32)
    out = np.empty_like(x)
    activated(N(kind), x, out)
    want = exact(torch.from_numpy(x).double()).numpy()
    assert (np.abs(out - want) / np.maximum(1, np.abs(want))).max() <= tolerance


def test_a_value_that_is_not_finite_stays_not_finite() -> None:
    x, out = np.array([np.nan, 1, np.inf, 2], np.float32), np.empty(4, np.float32)
    for kind, _, _ in ACTIVATIONS.values():
        activated(N(kind), x, out)
        assert np.isnan(out[0]) or kind == records.RELU
        assert np.isinf(out[2])
        assert np.isfinite(out[[1, 3]]).all()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 96, 1001])
def test_norms(n: int) -> None:
    x, weight, bias = ((rng.standard_normal(n) * s).astype(np.float32) for s in (3, 1, 1))
    x += np.float32(0.5)
    out, wide, eps = np.empty(n, np.float32), x.astype(np.float64), 1e-5
    normed(False, x, weight, bias, np.float32(eps), out)
    assert np.abs(out - weight * wide / np.sqrt((wide**2).mean() + eps)).max() < 3e-6
    normed(True, x, weight, bias, np.float32(eps), out)
    centred = wide - wide.mean()
    if n > 1:  # LayerNorm of a single value is 0
        assert np.abs(out - (weight * centred / np.sqrt((centred**2).mean() + eps) + bias)).max() < 2e-5
    for strange in (np.nan, np.inf, -np.inf):
        x[n // 2] = strange
        for layer in (False, True):
            normed(layer, x, weight, bias, np.float32(eps), out)
            assert not extremes(out, n)[3]


def test_sums_have_one_order_for_any_length() -> None:
    """Lane i sums values i, i + 16, ...; lanes are then added pairwise."""
    for n in (0, 1, 5, 16, 31, 32, 100, 1000):
        x = rng.standard_normal(n).astype(np.float32)
        for values, total in zip((x, x * x), sums(x), strict=True):
            lanes = np.zeros(16, np.float32)
            for i, value in enumerate(values):
                lanes[i % 16] += value
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            assert total == lanes[0]


@pytest.mark.parametrize("n", [1, 7, 16, 250])
def test_maximum_and_largest_absolute_value(n: int) -> None:
    x = (rng.standard_normal(300) * 10).astype(np.float32)
    strange = np.where(x > 9, np.inf, x)
    largest = np.full(300, np.finfo(np.float32).max)
    for values in (x, -np.abs(x), np.abs(x), np.full(300, -0.0), strange, np.where(x < 0, -np.inf, x), largest):
        values = values.astype(np.float32)
        top, far, first, finite = extremes(values, n)
        assert (top, far, first) == (values[:n].max(), np.abs(values[:n]).max(), values[:n].argmax())
        assert finite == np.isfinite(values[:n]).all()
    x[n - 1] = np.nan
    assert np.isnan(extremes(x, n)[1])
    assert not extremes(x, n)[3]


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_of_equal_maxima_the_first_wins_and_a_row_of_NaN_has_the_first_id(n: int) -> None:
    for places in ([n - 1], [n // 2, n - 1], [0, n // 3, n - 1]):
        x = np.full(n + 5, -3, np.float32)
        x[places] = 7
        x[n:] = 9  # outside the vocabulary
        assert extremes(x, n)[2] == places[0]
    assert extremes(np.full(n, -np.inf, np.float32), n)[2] == 0
    assert extremes(np.full(n, np.nan, np.float32), n)[2] == 0
    x = np.full(n, 2, np.float32)
    x[n // 2] = np.nan
    assert extremes(x, n)[2] == 0


@pytest.mark.parametrize("heat", [1e-3, 1.0, 1.25, 1e30])
def test_a_distribution_is_the_softmax_in_float64(heat: float) -> None:
    logits, probs = (rng.standard_normal(96) * 5).astype(np.float32), np.empty(90)
    distribution(logits, heat, probs)
    want = torch.softmax((torch.from_numpy(logits[:90]).double() - float(logits[:90].max())) * heat, -1)
    assert torch.allclose(torch.from_numpy(probs), want, rtol=1e-13, atol=1e-300)
    logits[3] = -np.inf
    distribution(logits, heat, probs)
    assert probs[3] == 0
    assert abs(probs.sum() - 1) < 1e-12


NOTHING: Any = np.zeros(1, np.float32)


def test_the_first_id_above_u_is_the_hosts_and_of_equal_scores_the_first_wins() -> None:
    for _ in range(200):
        probs = rng.random(50) * (rng.random(50) < 0.4)
        probs[7] += 0.1
        probs /= probs.sum()
        for u in (0.0, rng.random(), 1 - 2.0**-53):
            token = drawn_by(probs, u, NOTHING, 1.0, np.zeros(1))[0]
            assert probs[token] > 0
            assert token == int(invert(torch.from_numpy(probs)[None], torch.tensor([u], dtype=torch.float64)))
    logits, noise = np.zeros(6, np.float32), np.array([-np.inf, 0.0, 3.0, 3.0, 2.0, -1.0])
    assert drawn_by(np.ones(1), 0.5, logits, 1.0, noise)[1] == 2


def test_picks_are_those_of_the_host() -> None:
    """Each sequence has its own temperature; ids outside the vocabulary are never picked and have probability 0."""
    count, vocab, padded = 3, 50, 64
    logits = (rng.standard_normal((count, padded)) * 3).astype(np.float32)
    logits[:, vocab:] = 99
    heat, u, gumbel = np.array([0.3, 1.0, 4.0]), rng.random((2, count)), rng.gumbel(size=(2, count, vocab))
    expected = torch.softmax(torch.from_numpy(logits[:, :vocab]).double() * torch.from_numpy(heat)[:, None], -1)
    without_worth = np.empty((0, 0)), np.empty((0, 0)), np.empty((2, 0)), np.empty(0)
    for kind in (MAXIMUM, UNIFORMS, NOISE):
        for j in (0, 1):
            probs, drawn = np.full((count, vocab + 4), 7.0), np.empty(count, np.int64)
            picked(Picks(kind, vocab, heat, u, gumbel, *without_worth), j, logits, probs, drawn)
            if kind == MAXIMUM:
                assert drawn.tolist() == logits[:, :vocab].argmax(-1).tolist()
                assert (probs == 7).all()
                continue
            assert torch.allclose(torch.from_numpy(probs[:, :vocab]), expected, rtol=1e-12)
            assert not probs[:, vocab:].any()
            want = invert(expected, torch.from_numpy(u[j])).tolist()
            if kind == NOISE:
                want = (logits[:, :vocab] * heat[:, None] + gumbel[j]).argmax(-1).tolist()
            assert drawn.tolist() == want


def test_scores_that_are_no_numbers_have_the_lowest_confidence() -> None:
    rates, reach = np.array([[0.25, 0.5], [9.0, 9.0]]), np.ones(1)
    worth = rates[:1], np.zeros((1, 1)), np.zeros((1, 1)), reach
    logits = np.full((1, 4), np.nan, np.float32)
    picks = Picks(MAXIMUM, 4, np.ones(1), np.empty((1, 0)), np.empty((1, 0, 0)), *worth)
    picked(picks, 0, logits, np.empty((1, 0)), np.empty(1, np.int64))
    assert reach.tolist() == [0.25]
