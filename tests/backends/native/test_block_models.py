"""Decoders with weights of every kind of block: logits against float64 with the same weights, and rows that are bitwise
the same in any batch; on the kernels of this processor, and on those of one that has AVX2 only."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.models.gguf_header import read_header
from slipstream.models.gguf_weights import GgufWeights, gguf_config
from slipstream.models.load_settings import LoadSettings
from slipstream.models.weight_blocks import READERS
from tests.backends.native.models import ALONE, TOGETHER, chain, ids, in_float64, on_threads, one_by_one, same, weights
from tests.models.gguf_files import VOCAB, family_config, gguf_model

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}
KINDS = [*READERS, *FLOATS, "int4"]
AVX2 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16"
"""What Haswell has, by LLVM's names."""


@functools.cache
def executors(kind: str) -> tuple[NativeExecutor, TorchExecutor]:
    """A Llama of two layers with all matrices of that kind: ours, and the reference."""
    if kind in READERS:
        with tempfile.TemporaryDirectory() as folder:
            header = read_header(gguf_model(Path(folder), family_config("llama"), (kind,))[0])
            config = gguf_config(header)
            native = NativeExecutor(config, GgufWeights(header, config), LoadSettings(threads=1))
            reference = TorchExecutor(config, GgufWeights(header, config, torch.float64))
    else:
        config = family_config("llama")
        given = weights(config, FLOATS.get(kind, torch.float16))
        native = NativeExecutor(config, given, LoadSettings(threads=1, quantize="int4" if kind == "int4" else None))
        reference = TorchExecutor(config, in_float64(config, given, "int4" if kind == "int4" else None))
    native._workspace._small = False  # every pass uses all its threads
    return native, reference


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_float64_with_the_same_weights(kind: str) -> None:
    """With blocks, rounding of activations to 8 bits is all that differs; else the arithmetic is that of float32."""
    text = chain(ALONE, 0, ids(40, vocab=VOCAB))
    native, reference = (each.forward(text).logits[:, :VOCAB].double() for each in executors(kind))
    error = (native - reference).square().mean().sqrt() / reference.std()
    assert error < (1e-5 if kind in FLOATS else 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_bitwise_the_same_in_any_batch_and_on_any_number_of_threads(kind: str) -> None:
    model, text = executors(kind)[0], ids(9, 1, VOCAB)
    model.release(ALONE)
    alone, kept = one_by_one(on_threads(model, 1), ALONE, 0, text)
    for threads in (1, 2, 3):
        for rows in range(1, 10):
            on_threads(model, threads).release(TOGETHER)
            same(model.forward(chain(TOGETHER, 0, text[:rows])).logits, alone[:rows])
            same(model.kv(TOGETHER, rows).permute(3, 0, 1, 2, 4), kept[:rows])


@pytest.mark.skipif(processor.is_arm() or processor.lanes() < 16, reason="the tests above had no AVX-512 to use")
def test_the_same_holds_for_a_processor_that_has_avx2_only() -> None:
    """Numba compiles for that processor, and the tiles are those that it would get."""
    files = [__file__, str(Path(__file__).with_name("test_block_products.py"))]
    told = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    code = "import slipstream.backends.native.kernels.processor as p; print(p.lanes(), p.has_byte_dots())"
    seen = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["8", "False"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
