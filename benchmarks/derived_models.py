"""Makes checkpoints from other checkpoints, so that nothing is downloaded: larger models that write the same text, and
models with random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from slipstream import zoo

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def deeper(folder: Path, source: Path, idle: int) -> Path:
    """Write the Llama checkpoint `source` with `idle` further layers whose outputs are zero, so that it writes the same
    text."""
    weights, config = _read(source)
    layers = config["num_hidden_layers"]
    first = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    for layer in range(layers, layers + idle):
        for name, tensor in first.items():
            silent = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name.replace("layers.0.", f"layers.{layer}.", 1)] = np.zeros_like(tensor) if silent else tensor
    return written(folder, source, weights, config | {"num_hidden_layers": layers + idle})


def wider(folder: Path, source: Path, times: int) -> Path:
    """Write the Llama checkpoint `source` with `times` its width, heads and MLP, in float32. The added weights are
    zeros, so it writes the same text: the residual stream has the old numbers, followed by zeros. A norm divides by the
    mean of `times` as many squares; its weight and epsilon are changed to compensate for this."""
    weights, config = _read(source)
    for name, tensor in weights.items():
        values = tensor.astype(np.float32)
        if name.endswith(NORMS):
            values /= np.sqrt(np.float32(times))
        wide = [times * side for side in tensor.shape]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            wide[0] = tensor.shape[0]  # one row for each token
        weights[name] = np.zeros(wide, np.float32)
        weights[name][tuple(map(slice, tensor.shape))] = values
    counts = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    larger = {name: times * config[name] for name in counts}
    norm = {"rms_norm_eps": config["rms_norm_eps"] / times, "dtype": "float32"}
    return written(folder, source, weights, config | larger | norm)


TIMES, IDLE = 2, 4
"""`larger` makes a model with twice the width of the embedded target and four layers more: 12 layers of width 768, 79M
parameters."""


def larger(files: Path) -> Path:
    """Return a target of 79M parameters that writes the same text as the embedded target. It is made once, in the
    folder `files`."""
    path = files / f"target-{TIMES}x-{IDLE}"
    if not path.exists():
        wide = files / f"target-{TIMES}x"
        if not wide.exists():
            wider(wide, zoo.target_dir(), TIMES)
        deeper(path, wide, IDLE)
    return path


def random_weights(folder: Path, source: Path) -> Path:
    """Write a checkpoint of the shape of `source` with random weights, except for its norms, which are copied."""
    weights, config = _read(source)
    rng = np.random.default_rng(0)
    drawn = {
        name: weight if weight.ndim == 1 else (0.02 * rng.standard_normal(weight.shape)).astype(weight.dtype)
        for name, weight in weights.items()
    }
    return written(folder, source, drawn, config)


def written(folder: Path, source: Path, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> Path:
    """Write a new checkpoint with the tokenizer of `source`. Returns its folder."""
    folder.mkdir(parents=True)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _read(source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    return load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
