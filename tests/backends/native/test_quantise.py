"""`quantise_blocks`: small errors, weights that it holds exactly, and the same integers on every processor."""

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.backends.native.quantise import GROUP, LEVELS, RANGES, quantise_blocks


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Rounded between the least and the greatest value of each group."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / LEVELS
    return (((groups - low) / scale).round() * scale + low).reshape(weight.shape)


def test_errors_are_smaller_than_those_of_rounding_between_the_ends() -> None:
    rng = torch.Generator().manual_seed(1)
    for weight in (torch.randn(64, 256, generator=rng), torch.randn(64, 256, generator=rng) ** 3):
        error = (torch.from_numpy(quantise_blocks(weight, 4).floats()) - weight).square().mean()
        assert error < 0.9 * (plain(weight) - weight).square().mean()


def test_sixteen_levels_are_held_exactly_and_groups_of_one_or_tiny_values_are_close() -> None:
    rng = np.random.default_rng(0)
    integers = rng.integers(0, 16, (8, 4, GROUP))
    integers[..., 0], integers[..., 1] = 0, 15
    weight = torch.from_numpy((integers * 0.25 - 1.5).reshape(8, -1)).float()
    assert torch.equal(torch.from_numpy(quantise_blocks(weight, 4).floats()), weight)
    weight = torch.zeros(3, 2 * GROUP)
    weight[1], weight[2, GROUP:] = 0.75, 1e-9
    floats = quantise_blocks(weight, 4).floats()
    assert np.isfinite(floats).all()
    assert np.abs(floats - weight.numpy()).max() < 1e-6


def test_chunks_are_quantised_like_their_rows_and_eight_bits_hold_whole_multiples_of_a_scale() -> None:
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(2))
    whole = quantise_blocks(weight, 4).floats()
    assert np.array_equal(whole[33:34], quantise_blocks(weight[33:34], 4).floats())
    integers = np.random.default_rng(3).integers(-127, 128, (8, 4, GROUP))
    integers[..., 0] = 127
    weight = torch.from_numpy(integers.reshape(8, -1) * 0.25).float()
    blocks = quantise_blocks(weight, 8)
    assert blocks.minima is None
    assert torch.equal(torch.from_numpy(blocks.floats()), weight)


def total(x: Tensor) -> Tensor:
    """Sums over groups in the order of torch on x86 processors: 8 lanes, then their sums one after another."""
    lanes = x.unflatten(-1, (4, 8)).unbind(-2)
    return sum((((lanes[0] + lanes[1]) + lanes[2]) + lanes[3]).unbind(-1), torch.zeros(x.shape[:-1]))[..., None]


def in_4_bits(x: Tensor) -> Tensor:
    """The docstring of `quantise_blocks`, one operation after another."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    best, scale, minimum = torch.full(low.shape, torch.inf), torch.zeros_like(low), low
    for share in RANGES.tolist():
        unit = (2 * share / LEVELS) * half.clamp(min=1e-12)
        whole = ((x - (middle - share * half)) / unit).round().clamp(0, LEVELS)
        spread = whole - total(whole) / GROUP
        slope = total(spread * x) / total(spread.square()).clamp(min=1e-12)
        start = total(x) / GROUP - slope * (total(whole) / GROUP)
        error = total((x - whole * slope - start).square())
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, slope, scale), torch.where(better, start, minimum)
    scale, minimum = scale.half().float(), minimum.half().float()
    return ((x - minimum) / scale.clamp(min=1e-12)).round().clamp(0, LEVELS) * scale + minimum


@pytest.mark.parametrize("groups", [1, 5, 16, 35])
def test_four_bits_are_those_of_the_formula_to_the_last_bit(groups: int) -> None:
    x = torch.randn(30, groups * GROUP, generator=torch.Generator().manual_seed(groups))
    x[0], x[1], x[2], x[3] = 0, -1.5, x[2] * 1e-9, x[3] * 1e9  # the last in float16: infinite
    x[4:20] **= 5
    x[5, 3], x[6, 4], x[7, ::5] = torch.nan, torch.inf, 0
    wanted = in_4_bits(x.view(30, groups, GROUP)).view(x.shape)
    for weight, same in ((x, wanted), (torch.cat([x, x], 1)[:, : x.shape[1]], wanted), (x[3:4], wanted[3:4])):
        assert np.array_equal(quantise_blocks(weight, 4).floats(), same.numpy(), equal_nan=True)
    assert np.isnan(quantise_blocks(x, 4).floats()[5, :GROUP]).all(), "a weight that is no number must not be hidden"
    narrow = x[8:].bfloat16()
    assert np.array_equal(quantise_blocks(narrow, 4).floats(), quantise_blocks(narrow.float(), 4).floats())
