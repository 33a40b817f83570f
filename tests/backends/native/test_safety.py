"""No prompt, draft or pair of models makes a backend read memory outside the model."""

import contextlib
import ctypes
import platform
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from slipstream.backends.native import paged
from slipstream.backends.native.kernels import processor
from slipstream.backends.native.native_heads import NativeDFlash, NativeEagle
from slipstream.backends.torch.torch_heads import TorchEagle
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import ParameterError, TargetError
from slipstream.executor.executor import Batch
from slipstream.targets.decoder import Decoder
from tests.backends.native.models import VOCAB, chain, executor, forest, ids, last, needs_bfloat16, on_torch, tree
from tests.heads.tiny_heads import config, dflash_config, dflash_head, head

OUTSIDE = [-1, -VOCAB, VOCAB, VOCAB + 5, VOCAB + 1000, 1 << 40, -(1 << 62)]
FORMS = ["float32", "float16", "w8a8", pytest.param("bfloat16 products", marks=needs_bfloat16)]


@pytest.mark.parametrize("form", [*FORMS, "torch"])
@pytest.mark.parametrize("shape", ["llama", "qwen", "gpt2"])  # untied and tied embeddings, learned positions
def test_a_token_outside_of_the_vocabulary_is_an_error_and_nothing_is_read(shape: str, form: str) -> None:
    model, text = on_torch(shape) if form == "torch" else executor(shape, form), ids(6)
    want = model.forward(chain(0, 0, text)).logits.clone()
    for token in OUTSIDE:
        for batch in (
            chain(0, 0, [token]),
            chain(0, 0, [*text[:5], token]),
            tree(0, 3, [3, token, 4], [-1, -1]),
            forest([(0, 0, [3], []), (1, 0, [token], [])]),
        ):
            with pytest.raises(TargetError, match="outside the model's embedding"):
                model.forward(batch)
            if model.multi_step and all(t is None for t in batch.trees):
                with pytest.raises(TargetError, match="outside the model's embedding"):
                    model.decode_steps(batch, 2)
    assert torch.equal(model.forward(chain(0, 0, text)).logits, want)
    assert model.forward(chain(0, 0, [VOCAB - 1, 0])).logits.isfinite().all()


def test_a_learned_position_after_the_last_one_is_an_error() -> None:
    model = executor("gpt2", context=20)
    text = ids(22)
    model.forward(chain(0, 0, text[:20]))
    for batch in (chain(0, 0, text[:21]), chain(0, 20, text[20:21]), tree(0, 18, text[:4], [-1, 0, 1])):
        with pytest.raises(TargetError, match="after the last position"):
            model.forward(batch)
    with pytest.raises(TargetError, match="after the last position"):
        model.decode_steps(chain(0, 17, text[17:19]), 3)
    model.decode_steps(chain(0, 17, text[17:19]), 2)
    negative = Batch([0], torch.tensor([3]), [-1], [0, 1], [0], [None], [0])
    with pytest.raises(TargetError, match="after the last position"):
        model.forward(negative)
    with pytest.raises(TargetError, match="a position is outside"):
        on_torch("gpt2", context=20).forward(chain(0, 0, text[:21]))
    with pytest.raises(TargetError, match="20 learned positions"):
        Decoder(model).run([Sequence([1] * 21)], Draft.empty(1))


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("own_embedding", [True, False])
@pytest.mark.parametrize("runs", [NativeEagle, TorchEagle])
def test_a_head_refuses_tokens_outside_of_its_embedding(version: int, own_embedding: bool, runs: Any) -> None:
    changes = {"own_embedding": own_embedding, "draft_vocab": 24} if version == 3 else {}
    eagle = config(version, 40, target=8, decoder={"head_dim": 16}, **changes)
    runtime = runs(head(eagle))
    width = len(eagle.taps) * eagle.target_hidden
    batch = forest([(0, 0, [3, 4, 5], [])])
    fine = runtime.decode_steps(last(batch), torch.ones(3, width), 2)[1].clone()
    for token in (-1, 40, 45, 1040, 1 << 40):
        bad = last(forest([(0, 0, [3, token, 5], [])]))
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.decode_steps(bad, torch.ones(3, width), 2)
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.extend(bad, torch.ones(3, width))
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.extend(bad, torch.ones(3, eagle.hidden_size), from_head=True)
    assert torch.equal(runtime.decode_steps(last(batch), torch.ones(3, width), 2)[1], fine)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no mallopt")
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_reads_no_memory_that_was_freed(kind: str) -> None:
    """While glibc overwrites what is freed (M_PERTURB)."""
    eagle = kind == "eagle3"
    runtime: Any = (
        NativeEagle(head(config(3, 40, target=64, decoder={"head_dim": 16})))
        if eagle
        else NativeDFlash(dflash_head(dflash_config(40, target=64)))
    )
    batch, taps = last(chain(0, 0, [3] * 200)), torch.randn(200, 192, generator=torch.Generator().manual_seed(0))

    def results() -> list[Tensor]:
        runtime.extend(batch, taps)
        return [runtime.decode_steps(batch, taps, 2).logits if eagle else runtime.run_blocks(batch), runtime.kv(0, 200)]

    wanted = results()
    try:
        assert ctypes.CDLL(None).mallopt(-6, 165)
        computed = results()
    finally:
        ctypes.CDLL(None).mallopt(-6, 0)
    assert all(map(torch.equal, computed, wanted))


def test_hidden_states_that_overflow_are_refused() -> None:
    model = executor(spoilt=4)
    with pytest.raises(TargetError, match="NaN or infinite"):
        model.decode_steps(chain(0, 0, [3, 4]), 2)
    with pytest.raises(TargetError, match="NaN or infinite"):
        Decoder(model).run([Sequence([3, 4])], Draft.empty(1))
    out = model.forward(forest([(0, 0, [3, 4], []), (1, 0, [3, 5], [])])).logits
    assert not out[1].isfinite().any()
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("allocations", range(5))
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_interrupt_while_the_cache_grows_leaves_every_sequence_readable(backend, allocations, monkeypatch):
    """Some layers then have new memory, others the old."""
    model, text = executor() if backend == "native" else on_torch("llama"), ids(60)
    where, name = (paged.np, "empty") if backend == "native" else (torch.Tensor, "new_zeros")
    exact = {"rtol": 0.0, "atol": 0.0} if backend == "native" else {}
    want = model.forward(chain(0, 0, text)).logits.clone()
    model.forward(chain(1, 0, text[:59], []))
    allocate, left = getattr(where, name), [allocations]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return allocate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            model._pool.reserve(2, 0, 2000)
    for _ in range(2):
        assert_close(model.forward(chain(1, 59, text[59:])).logits, want[59:], **exact)
        assert_close(model.kv(0, 60), model.kv(1, 60), **exact)
        assert_close(model.forward(chain(3, 0, text)).logits, want, **exact)
        model.forward(chain(2, 0, ids(700), []))  # grows to its end


def test_without_float16_instructions_weights_are_converted_and_logits_are_the_same(monkeypatch):
    text = ids(30)
    plain = executor(form="float16")
    want = plain.forward(chain(0, 0, text)).logits.clone()
    monkeypatch.setattr(processor, "converts_half", lambda: False)
    model = executor(form="float16")
    assert torch.equal(model.forward(chain(0, 0, text)).logits, want)
    assert model.memory()["weights"] > 1.8 * plain.memory()["weights"]
    for name in ("float16", "q8_0"):
        with pytest.raises(ParameterError, match=f"{name!r}.*F16C"):
            executor(form=f"float16 with a cache in {name}")
