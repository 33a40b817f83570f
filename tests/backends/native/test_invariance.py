"""Batch invariance: a row's logits, keys and values are bitwise the same alone, in a chain, in a tree among siblings,
in a batch of several sequences, and on any number of threads."""

import dataclasses
import functools
import random

import pytest
import torch

from slipstream.backends.native.kernels.matrices import MIN_SPLIT_SLOTS
from slipstream.checkpoints.layers import LayerDescription
from slipstream.checkpoints.module_shape import Experts
from tests.backends.native.models import (
    ALONE,
    EVERY_FORMAT,
    TOGETHER,
    UNLIKE_LLAMA,
    begin,
    chain,
    check,
    executor,
    forest,
    ids,
    in_every_format,
    on_threads,
    one_by_one,
    random_members,
    random_tree,
    same,
    tree,
)

THREADS = (1, 2, 3, 5, 8)

make = functools.cache(executor)

TREES = {
    "chain": [*range(-1, 11)],
    "a chain with one sibling": [-1, -1, *range(1, 11)],
    "comb": [-1, -1, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8],  # at every depth one node with children and one without
    "flat": [-1] * 14,
    "binary": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
}


@pytest.mark.parametrize(("shape", "form"), in_every_format("llama", "windows", others=["latent"]))
def test_a_chain_of_any_length_equals_its_rows_alone(shape: str, form: str) -> None:
    model, text = on_threads(make(shape, form), 1), ids(60, 1)
    alone, kept = one_by_one(model, ALONE, 0, text)
    for piece in (60, 2, 3, 7, 12, 13, 25):
        for threads in THREADS if piece > 10 else (1, 3):
            on_threads(model, threads).release(TOGETHER)
            for start in range(0, 60, piece):
                batch = chain(TOGETHER, start, text[start : start + piece])
                same(model.forward(batch).logits, alone[start : start + piece])
            same(model.kv(TOGETHER, 60).permute(3, 0, 1, 2, 4), kept)


@pytest.mark.parametrize(("shape", "form"), in_every_format("llama", "windows", "gpt2", "mixture", *UNLIKE_LLAMA))
def test_ragged_batches_of_trees_and_chains(shape: str, form: str) -> None:
    """New sequences, trees, chains and single rows, of contexts of any length."""
    draw, (seeds, count, nodes, past) = random.Random(f"{shape} {form}"), (3, 5, 24, 80)
    if shape in UNLIKE_LLAMA:
        seeds, count, nodes, past = 2, 3, 12, 60
    for seed in range(seeds):
        known = [1, 1, 2, draw.randint(1, 40)]
        members = random_members(draw, draw.randint(2, count), nodes, known, range(past + 1))
        check(make(shape, form), members, seed)


@pytest.mark.parametrize("form", ["float32", "w8a8", "float16 with a cache in float16"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 32, 33])
def test_a_chunk_edge_inside_a_draft_and_experts_whose_inputs_are_weighted(chunk: int, form: str) -> None:
    chunked = LayerDescription(heads=6, kv_heads=2, head_dim=16, window=chunk, chunked=True, intermediate_size=144)
    mixture = LayerDescription(heads=6, kv_heads=2, head_dim=16, rotary=None, growing=True, sparse=True)
    experts = Experts(4, 2, 48, False, (False, True), sigmoid=True, shared=48, weighted_inputs=True)
    model = executor(each=(chunked, mixture), experts=experts, growth=(0.3, 4, 1))
    for past in {0, 1, max(0, chunk - 3), chunk - 1, chunk, chunk + 1, 30, 33, 70}:
        check(model, [(past, ids(9, past), []), (3, ids(7, past), TREES["comb"][:6])], seed=past)
        check(model, [(past, ids(14, past), TREES["comb"])], seed=past)


@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 64])
def test_a_window_edge_inside_a_draft(window: int) -> None:
    """Chains and trees that begin before, at and after its edge, also at the edge of a block of the cache."""
    model = make("llama", windows=(window, None))
    for past in {0, 1, max(0, window - 3), window - 1, window, window + 1, 30, 33}:
        check(model, [(past, ids(9, past), [])], seed=past)
        check(model, [(past, ids(14, past), TREES["comb"])], seed=past)


@pytest.mark.parametrize(
    "form", ["float32", "w8a16", "float16 with a cache in float16", "float16 with a cache in q8_0"]
)
@pytest.mark.parametrize("shape", ["llama", "windows", "many heads", "latent"])
def test_a_long_context_that_is_split_among_threads(shape: str, form: str) -> None:
    """From MIN_SPLIT_SLOTS slots on, if there are fewer heads than threads."""
    draw, model = random.Random(7), make(shape, form)
    for past in (MIN_SPLIT_SLOTS - 2, MIN_SPLIT_SLOTS + 150, 2 * MIN_SPLIT_SLOTS + 5):
        check(model, [(past, ids(3, past), [])], seed=past)
        parents = random_tree(draw, 9)
        check(model, [(past, ids(1 + len(parents), past), parents)], seed=past)
    check(model, [(MIN_SPLIT_SLOTS + 40, ids(4, 4), [-1, -1, 0]), (5, ids(2, 5), [])], seed=8)


def test_computing_fewer_logits_or_layers_does_not_change_them() -> None:
    """The last layer then computes only these rows."""
    for shape in ("llama", "mixture", "latent"):
        model = make(shape)
        batch = tree(TOGETHER, 0, ids(17, 9), TREES["comb"])
        begin(model, TOGETHER, [])
        whole = model.forward(batch).logits.clone()
        for select in ([16], [0, 3, 4, 11], [4], range(16)):
            part = dataclasses.replace(batch, select=select)
            same(model.forward(part).logits, whole[list(select)])
            same(model.forward(part, taps=(-1,)).logits, whole[list(select)])
        last = model.config.layers - 1
        below = model.forward(batch, layers=(0, last)).hidden
        same(model.forward(batch, layers=(last, last + 1), hidden=below).logits, whole)


@pytest.mark.parametrize("form", EVERY_FORMAT)
def test_a_draft_in_one_call_equals_one_pass_per_step(form: str) -> None:
    model = make("windows", form)
    texts = [ids(n, n) for n in (30, 4, 61)]
    for b, text in enumerate(texts):
        begin(model, TOGETHER + b, text[:-2])
    batch = forest([(TOGETHER + b, len(text) - 2, text[-2:], []) for b, text in enumerate(texts)])
    for threads in (1, 3):
        decoded = on_threads(model, threads).decode_steps(batch, 5)
        for b, text in enumerate(texts):
            drafted = decoded.tokens[:, b].tolist()
            begin(on_threads(model, 1), ALONE, text[:-2])
            alone, _ = one_by_one(model, ALONE, len(text) - 2, [*text[-2:], *drafted[:-1]])
            same(decoded.logits[:, b], alone[1:])
            assert drafted == alone[1:].argmax(-1).tolist()


SPOILT = 7
overflowing = functools.partial(make, spoilt=SPOILT)


@pytest.mark.parametrize(
    ("shape", "form"), in_every_format("llama", "windows", "mixture", "many heads", others=["latent"])
)
def test_a_draft_token_that_overflows_spoils_no_row_that_does_not_see_it(shape: str, form: str) -> None:
    """Weight 0 times a value that is not finite would be NaN. In a chain, the rows before it; in a tree, siblings and
    their children; and other sequences of the batch."""
    past = 29  # the draft lies in two blocks
    model, text = overflowing(shape, form), [t for t in ids(past + 60) if t != SPOILT]
    for parents in TREES.values():
        tokens = [text[past], *text[past + 1 : past + 1 + len(parents)]]
        for at in (1, len(parents) // 2, len(parents)):
            spoilt = [*tokens[:at], SPOILT, *tokens[at + 1 :]]
            begin(model, ALONE, text[:past])
            begin(model, TOGETHER, text[:past])
            kept = tree(ALONE, past, tokens, parents)
            wanted = model.forward(kept).logits.clone()
            batch = forest([(ALONE, past, spoilt, parents), (TOGETHER, past, tokens, parents)])
            logits = model.forward(batch).logits
            sees = batch.trees[0]
            first = logits[: len(tokens)]
            assert torch.equal(first[~sees[:, at]], wanted[~sees[:, at]])
            assert not first[sees[:, at]].isfinite().any()
            assert torch.equal(logits[len(tokens) :], wanted)


@pytest.mark.parametrize("threads", THREADS)
def test_a_long_context_that_threads_share_is_not_spoilt_either(threads: int) -> None:
    model, past = overflowing("llama", "float32"), MIN_SPLIT_SLOTS + 40
    text = [t for t in ids(past + 60) if t != SPOILT]
    begin(on_threads(model, threads), ALONE, text[:past])
    for at in range(1, 4):
        tokens = text[past : past + 4]
        wanted = model.forward(tree(ALONE, past, tokens, [-1, -1, -1])).logits.clone()
        tokens[at] = SPOILT
        logits = model.forward(tree(ALONE, past, tokens, [-1, -1, -1])).logits
        rest = [row for row in range(4) if row != at]
        assert torch.equal(logits[rest], wanted[rest])


@pytest.mark.parametrize("form", EVERY_FORMAT)
def test_what_a_rejected_overflow_leaves_in_the_cache_spoils_nothing(form: str) -> None:
    """Slots of rejected draft tokens, and blocks of finished sequences, are written again before they are read."""
    model, text = overflowing("llama", form), [t for t in ids(60) if t != SPOILT]
    begin(model, ALONE, text[:40])
    wanted = model.forward(chain(ALONE, 40, text[40:42])).logits.clone()
    for rejected in ([SPOILT] * 12, [text[40], *[SPOILT] * 60]):
        model.release(ALONE)
        begin(model, ALONE, text[:40])
        model.forward(chain(ALONE, 40, rejected))
        assert torch.equal(model.forward(chain(ALONE, 40, text[40:42])).logits, wanted)
        model.release(ALONE)
        begin(model, TOGETHER, text[:40])  # in the blocks that were freed
        assert torch.equal(model.forward(chain(TOGETHER, 40, text[40:42])).logits, wanted)
        model.release(TOGETHER)
