"""Latent attention in its absorbed form: the rounding of its formats, and what its cache holds. `test_invariance` has
its rows in batches, trees and long contexts; the families in `tiny_families` are compared with transformers."""

from dataclasses import replace

import pytest
import torch

from slipstream.backends.native.native_backend import refusal
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.checkpoints.weights import Weights
from tests.backends.native.models import (
    ALONE,
    UNLIKE_LLAMA,
    begin,
    chain,
    config,
    executor,
    executor_of,
    forest,
    ids,
    in_float64,
    weights,
)
from tests.targets.reference import assert_close

LATENTS = {shape: config(**UNLIKE_LLAMA[shape]) for shape in ("latent", "latent, queries of the input")}
LATENT = LATENTS["latent"]


@pytest.mark.parametrize(
    ("quantize", "cache", "tolerance"),
    [("w8a16", None, 3e-3), ("w8a8", None, 0.1), ("int4", None, 0.1), (None, "float16", 2e-3), (None, "q8_0", 0.05)],
)
@pytest.mark.parametrize("shape", LATENTS)
def test_quantised_weights_are_dequantised_ones_but_for_the_rounding_of_activations_and_of_the_cache(
    shape: str, quantize: str | None, cache: str | None, tolerance: float
) -> None:
    """The products of heads are quantised, too."""
    dense = tuple(replace(x, sparse=False, intermediate_size=160) for x in LATENTS[shape].described)
    config = replace(LATENTS[shape], each=dense, experts=None)  # rounding chooses other experts
    given = weights(config, torch.float16, spread=0)
    rounded = in_float64(config, given, quantize)
    model = NativeExecutor(config, given, LoadSettings(quantize=quantize, kv_dtype=cache))
    exact = executor_of(config, Weights(rounded._readers, config, torch.float32))
    for batch in (chain(3, 0, ids(40)), forest([(3, 40, ids(7), [-1, 0, -1, 2, 2])])):
        assert_close(model.forward(batch).logits, exact.forward(batch).logits, tolerance)


def test_the_cache_holds_one_head_of_latent_vectors() -> None:
    model = executor("latent")
    begin(model, ALONE, ids(5))
    assert model.kv(ALONE, 5).shape == (3, 2, 1, 5, 144)
    assert LATENT.kv_bytes() == 3 * 2 * 144 * 4
    keys, values = model.kv(ALONE, 5)[0, :, 0]
    assert torch.equal(keys[:, 16:], values[:, 16:])  # the latent vector
    assert not torch.equal(keys[1:, :16], values[1:, :16])  # rotated or not


@pytest.mark.parametrize("sizes", [{"rank": 96}, {"value": 48}, {"plain": 24}])
def test_sizes_that_its_products_do_not_run_are_refused_by_name(sizes: dict[str, int]) -> None:
    part = replace(LATENT.described[0].latent, **sizes)
    each = tuple(replace(x, latent=part, head_dim=16 + part.rank) for x in LATENT.described)
    refused: DecoderConfig = replace(LATENT, each=each, head_dim=16 + part.rank)
    assert "latent vectors and values need widths divisible by 64" in str(refusal(refused))
    assert refusal(LATENT, QUANTISED["w8a8"]) is None
