"""gpt-oss as it is published: experts in MXFP4. What transformers dequantises is the reference, to the last bit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slipstream import LLM, SamplingParams
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError, ConfigError, ParameterError, UnsupportedModelError
from slipstream.targets.describe import describe
from tests.backends.native.models import chain
from tests.tiny_checkpoints import rewrite

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = "model.layers.{}.mlp.experts."


def pack(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put random blocks in place of experts, other tensors in bfloat16; returns what transformers makes of the blocks,
    under the names of before."""
    generator, dequantised = torch.Generator().manual_seed(7), {}
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 123, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dequantised[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    for name, values in state.items():
        state[name] = values if values.dtype == torch.uint8 else values.bfloat16()
    return dequantised


@pytest.fixture
def folders(checkpoint: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the same weights in 32 bits."""
    packed, plain = (Path(shutil.copytree(checkpoint("gpt-oss"), tmp_path / name)) for name in ("packed", "plain"))
    held: dict[str, Tensor] = {}

    def both(state: dict[str, Tensor]) -> None:
        dequantised = pack(state)
        rest = {name: values.float() for name, values in state.items() if values.dtype != torch.uint8}
        held.update(rest | dequantised)

    def same(state: dict[str, Tensor]) -> None:
        state.clear()
        state.update(held)

    return rewrite(packed, both, quantization_config=MXFP4), rewrite(plain, same)


def texts(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(folder, executor="native", **settings)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return [one.token_ids for one in llm.generate([[5, 9, 33, 71, 2, 14], [7]], params)]


def test_weights_are_those_that_transformers_dequantises(folders: tuple[Path, Path]) -> None:
    packed, plain = (load_weights(folder, DecoderConfig.load(folder)) for folder in folders)
    assert packed.quantised == "MXFP4"
    assert set(packed) == set(plain)
    assert all(torch.equal(packed[name], plain[name]) for name in plain)
    for name in plain:
        in_blocks = ".experts." in name and name.endswith("weight")
        blocks = packed.blocks(name, slice(3, 9))
        assert (blocks is not None) == in_blocks
        assert blocks is None or torch.equal(torch.from_numpy(blocks.floats()), plain[name][3:9])


def test_products_with_blocks_round_nothing_but_activations(folders: tuple[Path, Path]) -> None:
    packed, plain = (
        NativeExecutor(config, load_weights(folder, config)).forward(chain(0, 0, [5, 9, 33, 71, 2, 14, 60, 8])).logits
        for folder in folders
        for config in [DecoderConfig.load(folder)]
    )
    assert 0 < (packed - plain).square().mean().sqrt() / plain.std() < 0.05


def test_drafts_and_threads_change_no_text(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    assert texts(packed) == texts(packed, draft="ngram", draft_tokens=4, threads=2)
    assert texts(packed, dtype="bfloat16") == texts(plain, dtype="bfloat16")
    assert describe(packed).stored_as == "MXFP4"
    assert DecoderConfig.load(packed) == DecoderConfig.load(plain)


def test_weights_are_not_rounded_twice(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ParameterError, match=r"quantize=.* given for a quantised checkpoint"):
        LLM(folders[0], executor="native", quantize="int8")


def cut(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def edit(state: dict[str, Tensor]) -> None:
        changed = change(state.pop(EXPERTS.format(1) + name))
        if changed is not None:
            state[EXPERTS.format(1) + name] = changed.contiguous()

    return edit


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gate_up_proj_scales", lambda _: None, r"layers\.1\.mlp\.experts\.gate_up_proj_scales is missing"),
        ("down_proj_blocks", lambda _: None, r"layers\.1\.mlp\.experts\.0\.down_proj\.weight"),
        ("down_proj_scales", lambda t: t[:, :, :1], r"down_proj_scales has \(4, 64, 1\)"),
        ("gate_up_proj_blocks", lambda t: t[..., :8], r"gate_up_proj_blocks in .* has the shape \(4, 192, 2, 8\)"),
        ("gate_up_proj_blocks", lambda t: t[:, :190], r"gate_up_proj_scales has \(4, 192, 2\)"),
        ("down_proj_scales", lambda t: t * 0 + 255, r"down_proj\.weight .* cannot be read as MXFP4"),
        ("down_proj_blocks", lambda t: t.to(torch.int8), r"down_proj\.weight .* stored as torch.int8"),
    ],
)
def test_damaged_blocks_are_refused_by_the_name_of_their_tensor(
    name: str, change: Callable[[Tensor], Tensor | None], says: str, folders: tuple[Path, Path]
) -> None:
    with pytest.raises(CheckpointError, match=says):
        LLM(rewrite(folders[0], cut(name, change)), executor="native")


def test_fewer_experts_than_the_configuration_says_are_refused(folders: tuple[Path, Path]) -> None:
    folder = rewrite(folders[0], num_local_experts=5)
    with pytest.raises(CheckpointError, match=r"router\.\w+ .* config.json says \(5"):
        LLM(folder, executor="native")


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"quant_method": "fp8"}, UnsupportedModelError, r"quantised \(fp8\)"),
        ("mxfp4", ConfigError, "quantization_config is 'mxfp4', but must be a JSON object"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    config: object, error: type[Exception], says: str, folders: tuple[Path, Path]
) -> None:
    with pytest.raises(error, match=says):
        LLM(rewrite(folders[0], quantization_config=config), executor="native")
