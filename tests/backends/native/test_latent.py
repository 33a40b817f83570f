"""Latent attention in its absorbed form: its rows in batches, trees and long contexts, in every format, and what its
cache holds. The families in `tiny_families` are compared with transformers."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.backends.native.kernels.matrices import MIN_SPLIT_SLOTS
from slipstream.backends.native.native_backend import refusal
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.layers import Latent, LayerDescription
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.checkpoints.weights import Weights
from tests.backends.native.models import (
    ALONE,
    EVERY_FORMAT,
    FORMATS,
    TOGETHER,
    begin,
    chain,
    check,
    config,
    executor_of,
    forest,
    ids,
    in_float64,
    on_threads,
    one_by_one,
    random_tree,
    same,
    tree,
    weights,
)
from tests.targets.reference import assert_close

PART = Latent(rank=128, query_rank=96, plain=32, rotated=16, value=64)
_LAYER: dict[str, Any] = {"heads": 12, "kv_heads": 1, "head_dim": 144, "growing": True}
LATENT = config(
    3, heads=12, kv_heads=1, head_dim=144, growth=(0.3, 4, 0), qkv_bias=True,
    rope_parameters={"rope_theta": 10000.0, "dimensions": 16},
    each=(
        LayerDescription(**_LAYER, latent=PART, intermediate_size=160),
        LayerDescription(**_LAYER, latent=replace(PART, value=128), window=9, sparse=True),
        LayerDescription(**_LAYER, latent=PART, sparse=True),
    ),
    experts=Experts(8, 2, 64, True, (False, True, True), sigmoid=True, groups=4, top_groups=2, shared=64),
)  # fmt: skip
WITHOUT = replace(
    LATENT, qkv_bias=False, each=tuple(replace(x, latent=replace(x.latent, query_rank=0)) for x in LATENT.described)
)
"""Queries are computed from the input."""
SHAPES = {"queries of a vector": LATENT, "queries of the input": WITHOUT}


@functools.cache
def make(shape: str, form: str = "float32") -> NativeExecutor:
    return executor_of(SHAPES[shape], weights(SHAPES[shape], FORMATS[form][0], spread=0), form)


@pytest.mark.parametrize("form", EVERY_FORMAT)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_the_same_alone_and_in_batches_of_trees_and_chains(shape: str, form: str) -> None:
    draw = random.Random(f"{shape} {form}")
    for seed in range(2):
        members = []
        for _ in range(3):
            parents = random_tree(draw, 12) if draw.random() < 0.7 else []
            known = draw.choice([1, 2, draw.randint(1, 20)])
            members.append((draw.randint(0, 60), ids(known + len(parents), draw.randrange(999)), parents))
        check(make(shape, form), members, seed)


@pytest.mark.parametrize("form", ["float32", "w8a8", "float16 with a cache in float16"])
def test_a_long_context_is_split_among_threads(form: str) -> None:
    model, past = make("queries of a vector", form), MIN_SPLIT_SLOTS + 150
    check(model, [(past, ids(3, past), [])], seed=1)
    check(model, [(past, ids(6, past), [-1, -1, 0, 1, 1])], seed=2)


def test_a_prompt_in_pieces_on_any_number_of_threads_equals_its_rows_alone() -> None:
    model, text = on_threads(make("queries of a vector"), 1), ids(60, 1)
    alone, kept = one_by_one(model, ALONE, 0, text)
    for threads in range(1, 9):
        for piece in (60, 7, 25):
            on_threads(model, threads).release(TOGETHER)
            for start in range(0, 60, piece):
                batch = chain(TOGETHER, start, text[start : start + piece])
                same(model.forward(batch).logits, alone[start : start + piece])
            same(model.kv(TOGETHER, 60).permute(3, 0, 1, 2, 4), kept)


def test_fewer_logits_and_slices_of_layers_change_no_row() -> None:
    model, text, parents = make("queries of a vector"), ids(9, 9), [-1, -1, 0, 0, 2]
    begin(model, TOGETHER, [])
    batch = tree(TOGETHER, 0, text, parents)
    whole = model.forward(batch).logits.clone()
    for select in ([8], [0, 3, 4]):
        same(model.forward(replace(batch, select=select)).logits, whole[select])
    below = model.forward(batch, layers=(0, 2)).hidden
    same(model.forward(batch, layers=(2, 3), hidden=below).logits, whole)


@pytest.mark.parametrize(
    ("quantize", "cache", "tolerance"),
    [("w8a16", None, 3e-3), ("w8a8", None, 0.1), ("int4", None, 0.1), (None, "float16", 2e-3), (None, "q8_0", 0.05)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_weights_are_dequantised_ones_but_for_the_rounding_of_activations_and_of_the_cache(
    shape: str, quantize: str | None, cache: str | None, tolerance: float
) -> None:
    """The products of heads are quantised, too."""
    dense = tuple(replace(x, sparse=False, intermediate_size=160) for x in SHAPES[shape].described)
    config = replace(SHAPES[shape], each=dense, experts=None)  # rounding chooses other experts
    given = weights(config, torch.float16, spread=0)
    rounded = in_float64(config, given, quantize)
    model = NativeExecutor(config, given, LoadSettings(quantize=quantize, kv_dtype=cache))
    exact = executor_of(config, Weights(rounded._readers, config, torch.float32))
    for batch in (chain(3, 0, ids(40)), forest([(3, 40, ids(7), [-1, 0, -1, 2, 2])])):
        assert_close(model.forward(batch).logits, exact.forward(batch).logits, tolerance)


def test_a_draft_token_that_overflows_spoils_no_row_that_does_not_see_it() -> None:
    given = weights(LATENT, spread=0)
    read = given.part

    def part(name: str, rows: slice, as_stored: bool = False) -> torch.Tensor:
        tensor = read(name, rows, as_stored).clone()
        if name == "embed_tokens.weight":
            tensor[7, 0] = torch.inf
        return tensor

    given.part = part  # type: ignore[method-assign]
    model, text = executor_of(LATENT, given), [t for t in ids(50) if t != 7]
    parents = [-1, -1, 0, 1]
    begin(model, ALONE, text[:29])
    wanted = model.forward(tree(ALONE, 29, text[29:34], parents)).logits.clone()
    spoilt = [*text[29:31], 7, *text[32:34]]
    logits = model.forward(tree(ALONE, 29, spoilt, parents)).logits
    assert torch.equal(logits[[0, 1, 3]], wanted[[0, 1, 3]])
    assert not logits[[2, 4]].isfinite().any()


def test_the_cache_holds_one_head_of_latent_vectors() -> None:
    model = make("queries of a vector")
    begin(model, ALONE, ids(5))
    assert model.kv(ALONE, 5).shape == (3, 2, 1, 5, 144)
    assert LATENT.kv_bytes() == 3 * 2 * 144 * 4
    keys, values = model.kv(ALONE, 5)[0, :, 0]
    assert torch.equal(keys[:, 16:], values[:, 16:])  # the latent vector
    assert not torch.equal(keys[1:, :16], values[1:, :16])  # rotated or not


@pytest.mark.parametrize("sizes", [{"rank": 96}, {"value": 48}, {"plain": 24}])
def test_sizes_that_its_products_do_not_run_are_refused_by_name(sizes: dict[str, int]) -> None:
    part = replace(PART, **sizes)
    each = tuple(replace(x, latent=part, head_dim=16 + part.rank) for x in LATENT.described)
    refused: DecoderConfig = replace(LATENT, each=each, head_dim=16 + part.rank)
    assert "latent vectors and values must be multiples of 64" in str(refusal(refused))
    assert refusal(LATENT, QUANTISED["w8a8"]) is None
