"""Decoders with weights of every kind of block: logits against float64 with the same weights, and rows that are bitwise
the same in any batch."""

import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.formats import FORMATS, Format
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_blocks import READERS, Blocks, Scales, format_holding, stack
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError
from tests.backends.native.models import ALONE, TOGETHER, chain, ids, in_float64, on_threads, one_by_one, same, weights
from tests.backends.native.products import ROWS, Product, model_of_blocks
from tests.checkpoints.gguf_files import SIZES, VOCAB, family_config, gguf_model, random_bytes

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}
KINDS = [*READERS, *FLOATS, "int4"]
ROOT = Path(__file__).parents[3]


@functools.cache
def executors(kind: str) -> tuple[NativeExecutor, TorchExecutor]:
    """A Llama of two layers with all matrices of that kind: ours, and the reference."""
    if kind in READERS:
        with tempfile.TemporaryDirectory() as folder:
            file, _ = gguf_model(Path(folder), family_config("llama"), (kind,))
            config = DecoderConfig.load(file)
            native = NativeExecutor(config, load_weights(file, config), LoadSettings(threads=1))
            reference = TorchExecutor(config, load_weights(file, config, torch.float64))
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


@pytest.mark.skipif(processor.is_arm(), reason="Arm has other features")
def test_the_features_that_make_test_names_are_those_of_a_processor_with_avx2_only() -> None:
    """`make test` runs these tests with them again."""
    (features,) = re.findall("^AVX2 := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    told = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    code = (
        "import slipstream.backends.native.kernels.processor as p; print(p.lanes(), p.registers(), p.has_byte_dots())"
    )
    seen = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["8", "16", "False"]


def random_blocks(seed: int, form: Format, outs: int, columns: int) -> Blocks:
    rng = np.random.default_rng(seed)
    integers = rng.integers(-form.zero, 2**form.bits - form.zero, (outs, columns)).astype(np.int8)

    def scales() -> Scales:
        values = rng.standard_normal((outs, columns // form.span)).astype(np.float16)
        if form.powers:  # the three smallest ones, and, not in the same sum, because `fused` rounds twice, usual ones
            values = rng.integers(0, 3, values.shape).astype(np.uint8)
            values[::2] += 120
        factors = rng.integers(-128, 128, (outs, columns // form.group)).astype(np.int8)
        return Scales(values, factors if form.span > form.group else None)

    minima = scales() if form.minima else None
    return Blocks(form.bits, form.group, integers, scales(), minima, form.table, form.zero)


@pytest.mark.parametrize("form", [form for form in FORMATS if form.span], ids=lambda form: form.name)
@pytest.mark.parametrize(("outs", "spans"), [(1, 1), (63, 2), (65, 3), (130, 18), (200, 5)])
def test_a_product_equals_the_model_of_its_blocks_bit_for_bit(form: Format, outs: int, spans: int) -> None:
    columns = form.span * min(spans, 1024 // form.span)
    rng = np.random.default_rng(2)
    weight = random_blocks(1, form, outs, columns)
    x, bias = rng.standard_normal((40, columns)), rng.standard_normal(outs)
    x[5], x[9] = 0, x[9] * 1e-20
    x, bias = x.astype(np.float32), bias.astype(np.float32)
    product, want = Product(weight, bias=torch.from_numpy(bias)), model_of_blocks(weight, x, bias)
    for rows in ROWS:
        assert np.array_equal(product(x[:rows]), want[:rows])
        assert np.array_equal(product(x[-rows:], threads=2), want[-rows:])


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", 4.5),
        ("Q4_1", 5),
        ("Q5_0", 5.5),
        ("Q5_1", 6),
        ("Q8_0", 8.5),
        ("Q3_K", 4.5625),
        ("Q4_K", 4.625),
        ("Q5_K", 5.625),
        ("Q6_K", 6.5625),
        ("IQ4_NL", 4.5),
        ("IQ4_XS", 4.3125),
        ("MXFP4", 4.25),
    ],
)
def test_bits_of_a_weight_in_memory(name: str, bits: float) -> None:
    matrix = Product(READERS[name](random_bytes(name, 64, 512 // SIZES[name][0]))).matrix[0]
    assert 8 * matrix["out_bytes"] / matrix["columns"] == bits


def test_a_power_of_2_that_float16_lacks_is_refused_only_where_a_matrix_has_blocks_of_another_type() -> None:
    part, other = (READERS[name](random_bytes(name, 2, 8, 0, 0.1)) for name in ("MXFP4", "Q8_0"))
    part.scales.values[0, 3] = 200
    joined = format_holding([part, other])
    assert part.divide(format_holding([part])).scales.values[0, 3] == 200
    with pytest.raises(CheckpointError, match="float16"):
        part.divide(joined)
    part.integers[0, 96:128] = [0, 8] * 16  # 0 and -0
    assert np.array_equal(part.divide(joined).floats(), part.floats())


STACKS = [*itertools.combinations_with_replacement(READERS, 2), ("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q4_1", "Q8_0")]


@pytest.mark.parametrize("names", STACKS, ids="-".join)
def test_matrices_of_two_kinds_are_one_matrix_of_the_same_weights(names: tuple[str, ...]) -> None:
    parts = [READERS[name](random_bytes(name, 32, 512 // SIZES[name][0], i, 0.1)) for i, name in enumerate(names)]
    joined, columns = stack([part.divide(format_holding(parts)) for part in parts]), np.arange(0, 512, 37)
    assert np.array_equal(joined.floats(), np.concatenate([part.floats() for part in parts]))
    output, want = Product(joined)(np.eye(512, dtype=np.float32)[columns]), joined.floats()[:, columns].T
    assert np.allclose(output, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
