"""The native executor against the torch executor in float64: every format, chains drafted in one call, trees,
rollbacks, slices of layers. The promises of every executor are in the conformance suite."""

import ctypes
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backends.native import native_executor
from slipstream.backends.native.kernels import passes, processor, records
from slipstream.backends.native.native_backend import MOST_COLUMNS, refusal
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.table import choose, resolve
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.core.decode_steps import ARGMAX, StepSampling, Worth
from slipstream.errors import ParameterError, TargetError, UnsupportedModelError
from slipstream.executor.executor import Batch, Executor
from tests.backends.native.models import (
    EVERY_FORMAT,
    FORMATS,
    SHAPES,
    VOCAB,
    chain,
    config,
    executor,
    forest,
    ids,
    in_every_format,
    in_float64,
    last,
    tree,
    weights,
)
from tests.spying import spied
from tests.targets.reference import assert_close

TEXTS = [30, 41, 3]  # tokens of three sequences, two of them pending
TREE = [-1, 0, -1, 2]  # below a root, two branches of two

native = functools.cache(executor)

TOLERANCES = {
    "bfloat16 products": 0.1, "w8a16": 3e-3, "w8a8": 0.1, "int8 without dot products": 5e-3,
    "float16 with a cache in q8_0": 0.05,
}  # fmt: skip
"""Relative to the largest value; 1e-5 for weights in their stored format, 2e-3 for a cache in float16."""


def tolerance(form: str) -> float:
    return TOLERANCES.get(form, 2e-3 if "cache" in form else 1e-5)


@functools.cache
def oracle(shape: str = "llama", form: str = "float32") -> TorchExecutor:
    """The same weights in float64, int8 ones as multiples of their scales."""
    dtype, options = FORMATS[form]
    decoder = config(**SHAPES[shape])
    return TorchExecutor(decoder, in_float64(decoder, weights(decoder, dtype), options.get("quantize")))


def together(texts: list[list[int]], pending: int = 2) -> Batch:
    """The last tokens of each text, with their logits only."""
    return last(forest([(b, len(text) - pending, text[-pending:], []) for b, text in enumerate(texts)]))


def prefilled(model: Executor, texts: list[list[int]], pending: int = 2) -> Batch:
    for b, text in enumerate(texts):
        if len(text) > pending:
            model.forward(chain(b, 0, text[:-pending], []))
    return together(texts, pending)


def numbers(kind: str, vocab: int | None = None) -> StepSampling:
    u = torch.rand(4, len(TEXTS), VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    heat = torch.tensor([0.7, 2.0, 0.1], dtype=torch.float64)
    if kind == "uniforms":
        return StepSampling(heat, u[..., 0], vocab=vocab)
    return StepSampling(heat, noise=-(-u.log()).log(), vocab=vocab)


@pytest.mark.parametrize(("shape", "form"), in_every_format("llama", "many heads", "window"))
def test_logits_and_cache_are_those_of_the_stored_weights_in_float64(shape: str, form: str) -> None:
    """A prompt, and the rest of it in another pass."""
    text, model, reference = ids(70), native(shape, form), oracle(shape, form)
    for batch in (chain(3, 0, text[:60]), chain(3, 60, text[60:])):
        assert_close(model.forward(batch).logits, reference.forward(batch).logits, tolerance(form))
    assert_close(model.kv(3, 70), reference.kv(3, 70), tolerance(form))


@pytest.mark.parametrize("window", [None, 1, 2, 33, 41])
@pytest.mark.parametrize(("size", "past"), [(16, 0), (48, 31), (64, 40), (128, 600)])
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_of_trees_and_chains_is_that_in_float64(size, past, window, threads):
    """Every row, after contexts that are shorter and longer than windows and blocks, and split among threads."""
    shape = config(1, head_dim=size, windows=(window,))
    given = weights(shape)
    model = NativeExecutor(shape, given, LoadSettings(threads=threads))
    exact = TorchExecutor(shape, in_float64(shape, given))
    for each in (model, exact):
        for b, length in ((0, past), (1, past + 7)):
            if length:
                each.forward(chain(b, 0, ids(length, b), []))
    batch = forest([(0, past, ids(7), [-1, 0, -1, 2, 2]), (1, past + 7, ids(4, 1), [])])
    assert_close(model.forward(batch).logits, exact.forward(batch).logits, 1e-5)


@pytest.mark.parametrize(("limit", "wanted"), [(1 << 40, 1), (0, 2)])
def test_only_large_models_are_packed_by_several_threads_of_torch(limit, wanted, monkeypatch):
    seen = spied(monkeypatch, native_executor, "decoder_weights", lambda *given: torch.get_num_threads())
    monkeypatch.setattr(native_executor, "PACKED_ALONE", limit)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        NativeExecutor(config(), weights(config()))
        assert (seen, torch.get_num_threads()) == ([wanted], 2)
    finally:
        torch.set_num_threads(before)


def test_logits_of_earlier_calls_stay_readable() -> None:
    model, text = native(), ids(300)
    first = model.forward(chain(9, 0, text[:5])).logits
    for n in (1, 70, 200, 2):
        model.forward(chain(9, 0, text[:n]))
    assert first.shape == (5, VOCAB)
    assert first.isfinite().all()
    assert model.forward(chain(9, 0, text[:2], [])).logits.shape == (0, VOCAB)


@pytest.mark.parametrize("kind", ["uniforms", "noise"])
def test_distributions_are_those_of_the_logits_in_float64(kind: str) -> None:
    texts = [ids(n, seed) for seed, n in enumerate(TEXTS)]
    draws, model = numbers(kind, VOCAB - 5), native(form="float16")
    decoded = model.decode_steps(prefilled(model, texts), 4, draws)
    want = torch.softmax(decoded.logits[..., : VOCAB - 5].double() * draws.inv_temperature[None, :, None], -1)
    assert torch.allclose(decoded.probs[..., : VOCAB - 5], want, rtol=1e-12, atol=0)
    assert not decoded.probs[..., VOCAB - 5 :].any()
    assert bool((decoded.probs.gather(-1, decoded.tokens[..., None]) > 0).all())
    assert model.decode_steps(together(texts), 4).probs is None


def test_a_call_ends_where_no_sequence_is_worth_a_further_token() -> None:
    """With the tokens and logits of a longer call. A call with an exit does not end: its caller is owed streams."""
    texts = [ids(n, seed) for seed, n in enumerate(TEXTS)]
    rates, least = np.full((len(texts), 3), 0.5), np.zeros((len(texts), 4))
    least[:, 2] = 0.2  # two tokens are accepted with 0.25, three with 0.125
    worth, model = Worth(rates, least), native()
    for draws in (ARGMAX, numbers("uniforms"), numbers("noise")):
        whole = model.decode_steps(prefilled(model, texts), 4, draws)
        short = model.decode_steps(prefilled(model, texts), 4, replace(draws, worth=worth))
        assert torch.equal(short.tokens, whole.tokens[:3])
        assert torch.equal(short.logits, whole.logits[:3])
        assert short.confidence is not None
        assert short.confidence.shape == (3, len(texts))
        early = model.decode_steps(prefilled(model, texts), 4, replace(draws, worth=worth), exit=1)
        assert early.later is not None
        assert len(early.tokens) == len(early.later) == 4


def test_an_exit_returns_the_stream_of_every_token_and_writes_the_KV_of_its_layers() -> None:
    model, text = native(), ids(20)
    decoded = model.decode_steps(chain(8, 0, text), 3, exit=1)
    whole = text + decoded.tokens[:, 0].tolist()
    out = model.forward(chain(9, 0, whole), (1,), (0, 1))
    assert torch.equal(torch.cat((decoded.hidden, decoded.later[:, 0])), out.hidden)
    assert torch.equal(out.taps[1], out.hidden)
    assert torch.equal(decoded.logits[:, 0], out.logits[19:22])
    assert torch.equal(model.kv(8, 23)[0], model.kv(9, 23)[0])


def test_more_steps_exits_layers_and_taps_than_there_are_are_refused() -> None:
    model, batch = native(), chain(0, 0, [3, 4])
    for steps, exit in ((0, None), (2, 0), (2, 3)):
        with pytest.raises(TargetError):
            model.decode_steps(batch, steps, ARGMAX, exit)
    for taps, layers in (((), (0, 3)), ((), (1, 1)), ((5,), None), ((0,), (1, 2)), ((), (1, 2))):
        with pytest.raises(TargetError):
            model.forward(batch, taps, layers)


def chosen(config: Any, executor: str, dtype: Any, quantize: str | None = None) -> str:
    """Name of the backend that runs a decoder with these settings."""
    settings = LoadSettings(executor=executor, dtype=dtype, device="cpu", quantize=quantize)
    return choose(config, resolve(settings))[0].name


def test_a_cache_that_no_backend_keeps_for_a_decoder_is_refused_with_the_reason_of_each() -> None:
    settings = resolve(LoadSettings(executor="auto", dtype="float32", device="cpu", kv_dtype="q8_0"))
    says = r"given for a llama model.* heads is 24.*the torch .* dtype of the model\). Fix: leave it out"
    with pytest.raises(ParameterError, match=says):
        choose(dataclasses.replace(config(), head_dim=24), settings)


def test_an_unsupported_decoder_is_refused_by_name_and_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = config()
    odd, wide = dataclasses.replace(llama, head_dim=24), dataclasses.replace(llama, intermediate_size=MOST_COLUMNS + 64)
    assert refusal(llama) is refusal(llama, QUANTISED["w8a8"]) is refusal(wide) is None
    assert chosen(llama, "auto", None) == "native"
    assert chosen(llama, "auto", None, "int8") == "native"
    assert chosen(odd, "auto", None) == "torch"
    with pytest.raises(ParameterError, match=r"quantize='w8a8'.*overflow.*no kernels for quantised weights"):
        chosen(wide, "auto", None, "w8a8")
    assert chosen(llama, "auto", torch.float64) == "torch"
    for changed, quantised, says in (
        (odd, None, "heads is 24"),
        (wide, QUANTISED["w8a16"], "may overflow 32 bits"),
        (llama, QUANTISED["w4a8"], r"layers\.0\.mlp\.down_proj\.weight has rows of 144 numbers"),
        (
            config(intermediate_size=64, experts=Experts(4, 2, 48, True, (False, True))),
            QUANTISED["w4a8"],
            r"layers\.1\.mlp\.experts\.0\.down_proj\.weight has rows of 48 numbers",
        ),
    ):
        assert re.search(says, str(refusal(changed, quantised)))
    with pytest.raises(ParameterError, match="on the CPU, in float32 or bfloat16"):
        chosen(llama, "native", torch.float64)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name, *rest))
    assert refusal(llama) == "Numba is not installed"
    assert chosen(llama, "auto", None) == "torch"


def test_int8_weights_and_bfloat16_arithmetic_are_refused_together() -> None:
    """Neither is ignored silently."""
    for executor_name in ("auto", "native", "torch"):
        with pytest.raises(ParameterError, match="quantize='w8a8' and dtype='bfloat16' were given together"):
            chosen(config(), executor_name, "bfloat16", "w8a8")
    assert "need float32, not bfloat16" in str(refusal(config(), QUANTISED["w8a16"], torch.bfloat16))


def test_without_bfloat16_products_the_dtype_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "has_bfloat16_dots", lambda: False)
    llama = config()
    assert chosen(llama, "auto", "bfloat16") == "torch"
    with pytest.raises(UnsupportedModelError, match="AVX-512 BF16"):
        chosen(llama, "native", "bfloat16")


def test_weights_are_stored_in_the_checkpoints_format() -> None:
    forms = ("float32", "float16", "bfloat16", "w8a8")
    sizes = {form: native(form=form).memory()["weights"] for form in forms}
    assert sizes["float16"] < 0.55 * sizes["float32"]
    assert sizes["bfloat16"] == sizes["float16"]
    assert sizes["w8a8"] < 0.4 * sizes["float32"]
    tied = native("qwen", "bfloat16")._model[0]
    assert tied["embed"]["values"] == tied["head"]["weights"]


def test_a_checkpoint_of_several_dtypes_is_stored_in_float32() -> None:
    llama = config()
    mixed = weights(llama, torch.float16)
    name = "layers.1.self_attn.o_proj.weight"
    wide = mixed[name].double()
    mixed._readers[name] = (name, wide.__getitem__)  # type: ignore[index]
    model = NativeExecutor(llama, mixed, LoadSettings(threads=1))
    wanted = oracle(form="float16").forward(chain(90, 0, ids(9))).logits
    assert_close(model.forward(chain(0, 0, ids(9))).logits, wanted, 1e-5)
    assert model.memory()["weights"] > 1.8 * native(form="float16").memory()["weights"]


def test_loading_leaves_the_cache_empty_and_one_in_float16_needs_half_the_memory() -> None:
    sizes = []
    for form in ("float16", "float16 with a cache in float16"):
        model = executor(form=form)
        assert model.memory()["kv"] == 0
        model.forward(chain(0, 0, ids(100), []))
        sizes.append(model.memory()["kv"])
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.parametrize("form", EVERY_FORMAT)
def test_everything_is_compiled_on_loading(form: str) -> None:
    model, kernels = native(form=form), (passes.forward, passes.decode)

    def compiled() -> list[int]:
        return [len(each.signatures) for each in kernels]

    before = compiled()
    assert before == [1, 1]
    batch = prefilled(model, [ids(n) for n in TEXTS])
    for draws in (ARGMAX, numbers("uniforms"), numbers("noise", VOCAB - 6)):
        model.decode_steps(batch, 4, draws)
        model.decode_steps(batch, 4, draws, exit=1)
    lower = model.forward(tree(9, 0, ids(5), TREE), (0, 1), (0, 1))
    model.forward(tree(9, 0, ids(5), TREE), (-1,), (1, 2), lower.hidden)
    model.forward(chain(9, 0, ids(5), []))
    assert compiled() == before


@contextmanager
def poisoned(model: NativeExecutor, expert: int) -> Iterator[None]:
    """NaN in every weight of an expert of layer 0."""
    record = model._model[0]
    size = int(record["expert_count"]) * 2 * records.MATRIX.itemsize
    table = (ctypes.c_char * size).from_address(int(record["experts"]))
    pair = torch.frombuffer(table, dtype=torch.uint8).numpy().view(records.MATRIX).reshape(-1, 2)[expert]
    regions = [(int(each["weights"]), int(each["outs"] * each["out_bytes"])) for each in pair]
    kept = [ctypes.string_at(*region) for region in regions]
    for address, size in regions:
        ctypes.memset(address, 0xFF, size)
    yield
    for (address, size), content in zip(regions, kept, strict=True):
        ctypes.memmove(address, content, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("per_token", [1, 2])
@pytest.mark.parametrize("count", [1, 24])
def test_only_the_experts_that_a_row_chose_are_read_for_it(count: int, per_token: int, dtype: torch.dtype) -> None:
    """If an expert is poisoned, the rows that did not choose it do not change."""
    mixture = config(1, experts=Experts(6, per_token, 48, True, (True,)))
    model = NativeExecutor(mixture, weights(mixture, dtype), LoadSettings(threads=1))
    for seed in range(6 if count == 1 else 1):
        rows = forest([(b, 0, [token], []) for b, token in enumerate(ids(count, seed))])
        plain, chosen = model.forward(rows).logits.clone(), 0
        for expert in range(6):
            with poisoned(model, expert):
                logits = model.forward(rows).logits
            bad = logits.isnan().any(1)
            assert logits[bad].isnan().all()
            assert torch.equal(logits[~bad], plain[~bad])
            chosen += int(bad.sum())
        assert chosen == per_token * count
        assert torch.equal(model.forward(rows).logits, plain)
