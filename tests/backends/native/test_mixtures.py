"""Mixtures of experts: the union of the experts of a pass is computed at once, and rows do not depend on each other."""

import functools
from pathlib import Path

import pytest

from slipstream.backends.native.kernels.mlp import MOST_PAIRS
from slipstream.backends.native.kernels.pool import POSTED
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.native.threads import pool
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.weights import load_weights
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.targets.decoder import Decoder
from tests.backends.native.models import (
    ALONE,
    EVERY_FORMAT,
    TOGETHER,
    UNLIKE_LLAMA,
    VOCAB,
    chain,
    check,
    config,
    executor,
    forest,
    ids,
    on_threads,
    one_by_one,
    same,
    weights,
)
from tests.checkpoints.gguf_files import family_config, gguf_model

make = functools.cache(executor)


@pytest.mark.parametrize("form", EVERY_FORMAT)
def test_a_prompt_with_more_pairs_of_row_and_expert_than_are_computed_at_a_time(form: str) -> None:
    """Experts are then computed some at a time; a row adds them in the same order."""
    model, text = on_threads(make("many experts", form), 1), ids(MOST_PAIRS // 8 + 20, 3)
    model.release(ALONE)
    alone, kept = one_by_one(model, ALONE, 0, text)
    for threads in (1, 2, 3, 8):
        on_threads(model, threads).release(TOGETHER)
        same(model.forward(chain(TOGETHER, 0, text)).logits, alone)
        same(model.kv(TOGETHER, len(text)).permute(3, 0, 1, 2, 4), kept)


@pytest.mark.parametrize("kind", ["MXFP4", "IQ4_NL", "IQ4_XS", "Q4_K", "Q6_K", "Q8_0"])
def test_experts_in_blocks(kind: str, tmp_path: Path) -> None:
    shape = family_config("qwen3_moe", num_local_experts=12, num_experts=12, num_experts_per_tok=3, vocab_size=VOCAB)
    file, _ = gguf_model(tmp_path, shape, (kind,))
    model = NativeExecutor(shape, load_weights(file, shape), LoadSettings(threads=1))
    model._workspace._small = False
    check(model, [(9, ids(7, 1), [-1, -1, 0, 2]), (0, ids(5, 2), []), (30, ids(1, 3), [])], seed=0)
    check(model, [(3, ids(70, 4), [])], seed=1)


def test_threads_meet_as_often_for_eight_experts_of_a_row_as_for_two() -> None:
    def meetings(per_token: int, rows: int) -> int:
        shape = config(1, hidden_size=128, experts=Experts(12, per_token, 256, True, (True,)))
        model = NativeExecutor(shape, weights(shape), LoadSettings(threads=2))
        model._workspace._small = False
        text = chain(ALONE, 0, ids(rows))
        model.forward(text)
        before = int(pool()._counters[POSTED // 8])
        model.release(ALONE)
        model.forward(text)
        return int(pool()._counters[POSTED // 8]) - before

    for rows in (1, 5):
        assert meetings(8, rows) <= meetings(2, rows) + 1  # rows of more numbers are prepared on all threads


def test_a_pass_tells_how_many_experts_it_read_and_the_target_learns_it() -> None:
    model = on_threads(make("few rows an expert"), 2)
    for count in (1, 4):
        rows = forest([(ALONE + b, 0, [7], []) for b in range(count)])
        assert model.forward(rows).experts_read == 2 * UNLIKE_LLAMA["few rows an expert"]["experts"].per_token
        for b in range(count):
            model.release(ALONE + b)
    target = Decoder(model)
    cost = target.capabilities.relative_cost
    assert cost is not None
    prior, seqs = cost(4), [Sequence([7]) for _ in range(4)]
    target.run(seqs, Draft.empty(4))
    assert 1 < cost(4) < prior
    assert Decoder(make("llama", "float32")).capabilities.relative_cost is None
    assert make("llama", "float32").forward(chain(ALONE, 0, [7])).experts_read == 0
