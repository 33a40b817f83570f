"""GGUF files for our decoder: the architecture is that of the checkpoint, and so are the weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import refusal
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.gguf_weights import GgufTensors
from slipstream.checkpoints.weight_blocks import READERS
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError
from slipstream.executor.executor import Executor
from tests.backends.native.models import chain
from tests.checkpoints.gguf_files import VOCAB, family_config, gguf_model, random_bytes

KINDS = [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0", "F32")]


def logits(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """[n, V] of a text."""
    return executor.forward(chain(0, 0, tokens)).logits[:, :VOCAB].double()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe"])
def test_the_configuration_and_the_weights_are_those_of_the_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    config = family_config(family, tied)
    file, floats = gguf_model(tmp_path, config)
    assert refusal(read_header(file)) is None
    read = DecoderConfig.load(file)
    assert replace(read, norm_eps=0.0, rope_parameters={}, windows=()) == replace(
        config, norm_eps=0.0, rope_parameters={}, windows=()
    )
    assert read.norm_eps == pytest.approx(config.norm_eps)
    assert [window or config.context for window in read.windows] == [config.context] * config.layers
    if config.position == "rope":
        assert torch.equal(read.rope()[0], config.rope()[0])
    weights = load_weights(file, read)
    assert set(weights) == set(floats)
    for name, values in floats.items():
        assert np.array_equal(weights[name].numpy(), values), name


EXPERTS = ("Q4_1", "F32", "Q8_0")


@pytest.mark.parametrize(
    ("family", "kinds"), [*(("llama", kinds) for kinds in KINDS), ("mixtral", EXPERTS), ("qwen3_moe", EXPERTS)]
)
def test_the_native_backend_computes_with_the_weights_of_the_file(family, kinds, tmp_path: Path) -> None:
    """Rounding of activations to 8 bits is all that differs from the reference in float64. Experts are read from one
    tensor."""
    file, _ = gguf_model(tmp_path, family_config(family, tied=family == "llama"), kinds)
    config, tokens = DecoderConfig.load(file), [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
    native = logits(NativeExecutor(config, load_weights(file, config)), tokens)
    reference = logits(TorchExecutor(config, load_weights(file, config, torch.float64)), tokens)
    error = (native - reference).square().mean().sqrt() / reference.std()
    assert error < 0.05


def test_what_our_decoder_does_not_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    file, _ = gguf_model(tmp_path, family_config("llama"))
    header = read_header(file)
    metadata = dict(header.metadata)
    assert "'mamba'" in str(refusal(replace(header, metadata=metadata | {"general.architecture": "mamba"})))
    odd = replace(header.tensors[1], type="IQ2_XS")
    assert "IQ2_XS" in str(refusal(replace(header, tensors=(header.tensors[0], odd))))
    assert "longrope" in str(refusal(replace(header, metadata=metadata | {"llama.rope.scaling.type": "longrope"})))


def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    file, _ = gguf_model(tmp_path, family_config("llama"))
    header = read_header(file)
    config = DecoderConfig.load(file)
    first, *rest = header.tensors
    for tensors, name in (
        (rest, first.name),
        ([*header.tensors, replace(first, name="blk.0.extra.weight")], "blk.0.extra.weight"),
        ([replace(first, shape=(VOCAB, 128)), *rest], first.name),
    ):
        with pytest.raises(CheckpointError, match=name):
            GgufTensors(replace(header, tensors=tuple(tensors)), config)


def test_rows_that_do_not_divide_into_blocks_are_refused_by_name(tmp_path: Path) -> None:
    file, _ = gguf_model(tmp_path, family_config("llama"), ("Q8_0",))
    header = read_header(file)
    config = replace(DecoderConfig.load(file), hidden_size=240)
    tensors = tuple(replace(t, shape=(*t.shape[:-1], 240)) if "attn_q" in t.name else t for t in header.tensors)
    narrow = replace(header, tensors=tensors), replace(config, hidden_size=256)
    with pytest.raises(CheckpointError, match=r"attn_q.*240"):
        GgufTensors(*narrow).blocks("layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("name", READERS)
def test_blocks_hold_the_weights_of_the_file_exactly(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    raw = random_bytes(name, 7, 3)
    blocks = READERS[name](raw)
    want = gguf.quants.dequantize(raw.reshape(7, -1), gguf.GGMLQuantizationType[name])
    assert blocks.shape == want.shape
    assert np.allclose(blocks.floats(), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    assert np.array_equal(blocks.floats(), want) or not blocks.table
    assert blocks.integers.min() >= -blocks.zero
    assert blocks.integers.max() < 2**blocks.bits - blocks.zero
    assert blocks.scales.floats(blocks.group, want.shape[1]).shape == (7, want.shape[1] // blocks.group)
