"""`quantise_blocks`: small errors, and weights that it holds exactly."""

import numpy as np
import torch

from slipstream.backends.native.quantise import GROUP, LEVELS, quantise_blocks


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
