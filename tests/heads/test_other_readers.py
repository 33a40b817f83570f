"""The packages that the formats are named after load them whole. Each test runs where its package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import zoo
from slipstream.heads.head_convert import convert_head


def converted(folder: Path, to: str) -> dict[str, torch.Tensor]:
    """Write the embedded EAGLE-3 head to `folder`; returns its tensors."""
    convert_head(zoo.head_dir("eagle3", zoo.target_dir()), to, folder, zoo.target_dir())
    return load_file(folder / "model.safetensors")


def loaded(model: Any, written: dict[str, torch.Tensor]) -> set[str]:
    """Names that the model has and the checkpoint has not; all others are equal."""
    state = model.state_dict()
    assert written.keys() <= state.keys()
    assert all(torch.equal(state[name].to(tensor.dtype), tensor) for name, tensor in written.items())
    return set(state.keys() - written.keys())


def test_speculators_loads_its_format(tmp_path: Path) -> None:
    """The rest is the target's."""
    package = pytest.importorskip("speculators", reason="speculators is not installed")
    written = converted(tmp_path / "head", "speculators")
    model = package.SpeculatorModel.from_pretrained(str(tmp_path / "head"))
    assert loaded(model, written) == {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]


def test_specforge_loads_its_format(tmp_path: Path) -> None:
    """Training takes the embedding from the target."""
    pytest.importorskip("specforge", reason="SpecForge is not installed")
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    written = converted(tmp_path / "head", "specforge")
    model = LlamaForCausalLMEagle3.from_pretrained(str(tmp_path / "head"))
    assert loaded(model, written) == {"embed_tokens.weight"}
    assert model.norm_output  # a norm before the lm_head
