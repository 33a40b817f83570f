"""Tie or bug."""

import torch

from slipstream.bench.identity import Divergence, divergence
from slipstream.targets.decoder import Decoder
from tests.checkpoints import clone

EXACT = {"executor": "torch", "dtype": "float64", "device": "cpu"}


def test_divergence_tells_near_ties_from_bugs(tiny, tmp_path):
    target = Decoder.load(tiny.target, **EXACT)
    prompt = [5, 6, 7]
    assert divergence(target, prompt, [1, 2], [1, 2]) is None
    difference = divergence(target, prompt, [1, 2, 3], [1, 2, 4])
    assert difference.position == 2
    assert not difference.near_tie
    assert "bug" in str(difference)
    assert divergence(target, prompt, [1, 2], [1, 2, 4]).position == 2
    assert Divergence(3, 1e-7, 1e-6).near_tie
    tied = make_tied(tmp_path / "tied", tiny)
    assert divergence(Decoder.load(tied, **EXACT), prompt, [8], [9]).near_tie
    assert not target.executor._pool.tables  # every sequence was released


def make_tied(folder, tiny):
    """A checkpoint whose logits are all the same."""
    from safetensors.torch import load_file, save_file

    clone(tiny.target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
