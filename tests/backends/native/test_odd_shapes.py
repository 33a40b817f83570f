"""Decoders whose sizes are no multiples of anything, in every format, against the torch executor in float64: prompts,
trees and chains in one batch, and each row bitwise as alone."""

import random
from typing import Any

import pytest

from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.module_shape import Experts
from tests.backends.native.models import (
    EVERY_FORMAT,
    FORMATS,
    chain,
    check,
    config,
    executor_of,
    forest,
    ids,
    in_float64,
    random_tree,
    weights,
)

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip

ODD: list[dict[str, Any]] = [
    {"hidden_size": 72, "heads": 7, "kv_heads": 1, "head_dim": 48, "intermediate_size": 129, "vocab_size": 211},
    {"hidden_size": 33, "heads": 10, "kv_heads": 2, "head_dim": 80, "intermediate_size": 1, "vocab_size": 4097},
    {"hidden_size": 257, "heads": 3, "kv_heads": 3, "head_dim": 112, "intermediate_size": 63, "vocab_size": 4099},
    {"hidden_size": 600, "heads": 25, "kv_heads": 1, "head_dim": 32, "intermediate_size": 501, "vocab_size": 101},
    {"hidden_size": 100, "heads": 16, "kv_heads": 2, "head_dim": 128, "intermediate_size": 255, "vocab_size": 997},
]
KINDS: list[dict[str, Any]] = [
    {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm": "layer", "gated": False, "activation": "gelu"},
    {"qk_norm": True, "windows": (33, None), "activation": "relu"},
    {"tie_embeddings": True, "activation": "gelu_tanh", "windows": (1, 5)},
    {"experts": Experts(5, 3, 65, True, (False, True)), "o_bias": True},
    {"position": "learned", "tie_embeddings": True},
]
NEAR = {"quantize": 0.2, "dtype": 0.2, "kv_dtype": 1e-2}
"""How far logits may be, as a share of their mean square, by the setting that rounds; without one 1e-4."""


@pytest.mark.parametrize("form", EVERY_FORMAT)
@pytest.mark.parametrize("turn", range(2))
def test_rows_of_odd_shapes_are_near_those_in_float64_and_bitwise_as_alone(turn: int, form: str) -> None:
    shape = (list(FORMATS).index(form) + turn) % len(ODD)
    draw = random.Random(f"{shape} {form}")
    dtype, options = FORMATS[form]
    rope = {"rope_theta": draw.choice([1e4, 5e5]), **ROPES.get(draw.choice(["default", *ROPES]), {})}
    of = config(**{"rope_parameters": rope} | ODD[shape] | KINDS[(shape + list(FORMATS).index(form)) % len(KINDS)])
    model = executor_of(of, weights(of, dtype, seed=shape, spread=0), form, threads=3)
    members = []
    for _ in range(3):
        parents = random_tree(draw, 9) if draw.random() < 0.7 else []
        known = draw.choice([1, 2, draw.randint(3, 20)])
        past = draw.choice([0, 31, 32, 40])
        members.append((past, ids(known + len(parents), draw.randrange(99), of.vocab_size), parents))
    check(model, members, seed=shape)
    if "quantize" in options and of.tie_embeddings:
        return  # the head alone is rounded
    exact = TorchExecutor(of, in_float64(of, weights(of, dtype, seed=shape, spread=0), options.get("quantize")))
    batch = forest([(b, *m) for b, m in enumerate(members)])
    for each in (exact, model):
        for b, (past, _, _) in enumerate(members):
            each.release(b)
            if past:
                each.forward(chain(b, 0, ids(past, b, of.vocab_size), []))
    wanted = exact.forward(batch).logits
    error = (model.forward(batch).logits - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < max([1e-4, *(NEAR[name] for name in options)]) * (3 if of.experts and options else 1)
