"""The KV cache in q8_0: what is stored, how it is read, and that texts do not depend on how they were decoded."""

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import LLM, SamplingParams, zoo
from slipstream.backends.native.kernels.addresses import attention_tile_addresses
from slipstream.backends.native.kernels.formats import FLOAT32, Q8_0, Format
from slipstream.backends.native.kernels.matrices import MIN_SPLIT_SLOTS
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.native.paged import NativeBlocks
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.layers import LayerDescription
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.kv.blocks import BLOCK
from slipstream.targets.decoder import Decoder
from slipstream.tokens.text import load_tokenizer
from tests.backends.native.models import chain, check, config, executor, ids, weights
from tests.checkpoints.tiny_hybrids import make_checkpoint

SPAN = 32
SIZES = [16, 48, 64, 80, 128]


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 [..., D] as q8_0 stores it, computed span by span."""
    out = np.empty_like(x)
    for begin in range(0, x.shape[-1], SPAN):
        part = x[..., begin : begin + SPAN]
        scale = (np.abs(part).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):
            integers = np.where(scale > 0, np.clip(np.rint(part / scale), -127, 127), 0)
        out[..., begin : begin + SPAN] = integers * scale
    return out


def in_q8_0(of: DecoderConfig) -> NativeExecutor:
    return NativeExecutor(of, weights(of), LoadSettings(threads=1, kv_dtype="q8_0"))


def one_layer(size: int, fmt: Format) -> NativeBlocks:
    """Blocks of a layer with heads of `size` numbers, of which 3 are filled with random numbers."""
    rng, blocks = np.random.default_rng(size), NativeBlocks([LayerDescription(heads=2, kv_heads=2, head_dim=size)], fmt)
    blocks.grow(3)
    for data in (blocks.keys[0], blocks.values[0]):
        data["values"] = rng.integers(-127, 128, data["values"].shape)
        data["scales"] = rng.standard_normal(data["scales"].shape)
    return blocks


class Tile:
    """A tile of attention, called with arrays."""

    def __init__(self, fmt: Format, scores: bool):
        address = attention_tile_addresses(fmt)[0 if scores else 1]
        self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(address)

    def __call__(self, w: np.ndarray, scales: np.ndarray, x: np.ndarray, y: np.ndarray, *numbers: int) -> np.ndarray:
        self._call(*(each.ctypes.data for each in (w, scales, x, y)), *numbers)
        return y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_tiles_compute_bit_for_bit_what_float32_tiles_do_with_the_rounded_numbers(size: int, rows: int) -> None:
    rng, blocks = np.random.default_rng(rows), one_layer(size, Q8_0)
    floats = blocks.read(range(2 * BLOCK, 3 * BLOCK)).numpy()[0]  # [2, Hk, slots, D]
    keys, values = blocks.keys[0][2, 1], blocks.values[0][2, 1]

    def both(scores: bool, stored: Any, exact: np.ndarray, x: np.ndarray, y: np.ndarray, *numbers: int) -> None:
        args = stored["values"], stored["scales"], x, y.copy(), *numbers
        want = Tile(FLOAT32, scores)(np.ascontiguousarray(exact), exact, x, y.copy(), *numbers)
        assert np.array_equal(Tile(Q8_0, scores)(*args), want)

    queries = rng.standard_normal((size, rows)).astype(np.float32)
    room = np.zeros((rows, BLOCK), np.float32)
    both(True, keys, floats[0, 1].T, queries, room, size, BLOCK, PANEL, 0, BLOCK, BLOCK, rows)
    chances = rng.random((rows, BLOCK), np.float32)
    sums = rng.standard_normal((rows, size)).astype(np.float32)
    for slots in (BLOCK, 7):
        both(False, values, floats[1, 1], chances, sums, slots, size, PANEL, BLOCK, size, size, rows)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_stored_in_spans_of_32_numbers_with_a_float16_scale(size: int) -> None:
    """The first layer's keys and values depend on no other number of the cache."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": size}
    exact = executor(**shape)
    model = in_q8_0(exact.config)
    for each in (exact, model):
        each.forward(chain(0, 0, ids(40)))
    assert np.array_equal(model.kv(0, 40)[0].numpy(), rounded(exact.kv(0, 40)[0].numpy()))
    blocks = model._blocks
    assert blocks.block_bytes == BLOCK * 2 * exact.config.layers * 2 * (size + 2 * -(-size // SPAN))
    assert blocks.block_bytes == sum(each.nbytes // len(each) for each in blocks.keys + blocks.values)


@pytest.mark.parametrize("size", [48, 64])
def test_places_and_blocks_are_copied_with_their_scales(size: int) -> None:
    blocks = one_layer(size, Q8_0)
    before = blocks.read(range(3 * BLOCK))
    blocks.move([40, 41, 95], [3, 40, 41])
    blocks.copy([1], [2])
    want = before.clone()
    want[:, :, :, [3, 40, 41]] = before[:, :, :, [40, 41, 95]]
    want[:, :, :, 2 * BLOCK :] = want[:, :, :, BLOCK : 2 * BLOCK]
    assert torch.equal(blocks.read(range(3 * BLOCK)), want)
    blocks.grow(5)
    assert torch.equal(blocks.read(range(3 * BLOCK)), want)


def test_numbers_of_every_size_are_rounded_to_the_nearest_that_their_scale_has() -> None:
    """Also where the scale is 0, below the usual numbers of float16, or too large for it."""
    of = config(layers=1, head_dim=64, kv_heads=2, heads=4, qkv_bias=True)
    for largest in (0.0, 1e-7, 3e-6, 1e-3, 1.0, 8e6, 1e7):
        given, values = weights(of), largest * torch.linspace(-1, 1, 128)
        tensors = {name: given[name] for name in given}
        tensors["layers.0.self_attn.v_proj.weight"].zero_()
        tensors["layers.0.self_attn.v_proj.bias"].copy_(values)
        exact = Weights({name: (name, tensor.__getitem__) for name, tensor in tensors.items()}, of, torch.float32)
        model = NativeExecutor(of, exact, LoadSettings(threads=1, kv_dtype="q8_0"))
        out = model.forward(chain(0, 0, [5]))
        stored = model.kv(0, 1)[0, 1, :, 0].numpy()
        if largest == 1e7:  # 127 times the largest float16 is 8.3e6
            assert not out.finite
            assert np.isnan(stored[:, [0, -1]]).any()
        else:
            assert np.array_equal(stored, rounded(values.reshape(2, 64).numpy()))


@pytest.mark.parametrize("size", [48, 80])
def test_rows_after_a_long_context_are_bitwise_as_alone_where_threads_share_the_columns_of_a_head(size: int) -> None:
    """A thread then begins in the middle of a span."""
    model = in_q8_0(config(head_dim=size))
    model._workspace._small = False
    for past in (MIN_SPLIT_SLOTS + 1, MIN_SPLIT_SLOTS + 100):
        check(model, [(past, ids(6, past), [-1, 0, -1, 2])], seed=past)


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "granitehybrid"])
def test_texts_of_a_hybrid_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    folder, params = make_checkpoint(tmp_path, name), SamplingParams(max_tokens=40, ignore_eos=True)
    llm = LLM(folder, executor="native", threads=1, kv_dtype="q8_0", draft_tokens=4)
    prompts = [ids(40, seed, 32) for seed in range(3)]
    plain = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    llm.use("suffix")
    for _ in range(2):
        assert [done.token_ids for done in llm.generate(prompts, params)] == plain


@pytest.fixture(scope="module")
def embedded() -> dict[str, Decoder]:
    return {name: Decoder.load(zoo.target_dir(), "native", kv_dtype=name) for name in ("float32", "q8_0")}


def texts() -> list[list[int]]:
    tokenizer = load_tokenizer(zoo.target_dir())
    lines = (zoo.HERE / "prompts" / "code.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def test_logits_of_the_embedded_model_are_near_those_of_a_float32_cache(embedded: dict[str, Decoder]) -> None:
    """Measured: 0.4 % of their spread, and a divergence of 3e-5 nats."""
    error, divergence, rows = 0.0, 0.0, 0
    for text in texts():
        want, got = (logits(embedded[name], text) for name in ("float32", "q8_0"))
        error = max(error, float((got - want).square().mean().sqrt() / want.std()))
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
        rows += len(text)
    assert 0 < error < 0.01
    assert 0 < divergence / rows < 1e-4


def logits(target: Decoder, tokens: list[int]) -> Tensor:
    """float64 [len(tokens), V]"""
    seq = Sequence(tokens[:1])
    out = target.run([seq], Draft.chains([tokens[1:]])).logits.double().clone()
    target.release(seq.id)
    return out


SPECULATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "suffix": ("suffix", {}),
    "draft model": ("embedded", {}),
    "eagle3, tree": ("eagle3", {"shape": "tree", "width": 2, "nodes": 8}),
}


@pytest.fixture(scope="module")
def speculating() -> LLM:
    return LLM("embedded", executor="native", threads=2, kv_dtype="q8_0", draft_tokens=6)


@pytest.mark.parametrize("name", SPECULATIONS)
def test_greedy_texts_are_those_of_plain_decoding(name: str, speculating: LLM) -> None:
    """Four requests in a batch; the second time with the beginning of each text from the prefix cache."""
    prompts, params = texts()[:4], SamplingParams(max_tokens=40, ignore_eos=True)
    speculating.use(None)
    plain = [speculating.generate([prompt], params)[0].token_ids for prompt in prompts]
    draft, options = SPECULATIONS[name]
    speculating.use(draft, **options)
    for _ in range(2):
        done = speculating.generate(prompts, params)
        assert [each.token_ids for each in done] == plain
        assert sum(each.stats.accepted for each in done) > 0
    if name == "draft model":
        assert speculating.drafter.model.capabilities.runtime.kv_dtype == "q8_0"  # type: ignore[attr-defined]


def test_a_cache_of_few_tokens_preempts_requests_and_texts_stay_the_same() -> None:
    prompts, params = texts()[:4], SamplingParams(max_tokens=40, ignore_eos=True)
    plain, small = (
        LLM("embedded", draft, executor="native", threads=1, kv_dtype="q8_0", kv_tokens=tokens)
        for draft, tokens in ((None, None), ("suffix", 10 * BLOCK))
    )
    want = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert [done.token_ids for done in small.generate(prompts, params)] == want
