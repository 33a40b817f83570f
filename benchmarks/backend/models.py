"""The checkpoints that are timed: the embedded target, and random weights in the shapes of larger models.

The time of a forward pass depends on the shapes, not on the values, so nothing is downloaded. Checkpoints are written
once, in Hugging Face layout without a tokenizer, to a folder outside the repository.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream import zoo

STD = 0.02
"""Standard deviation of the random weights, as in `initializer_range` of transformers."""


@dataclass(frozen=True)
class Model:
    """label: its name in the tables. config: arguments of its transformers configuration, empty for the embedded
    target. stored: dtype of the checkpoint."""

    label: str
    kind: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    stored: str = "bfloat16"


GPT2: dict[str, Any] = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}

MODELS = {
    "14M": Model("embedded target, 14M", stored="float16"),
    "110M": Model(
        "Llama shape, 110M",
        config={
            "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048,
            "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        },
    ),
    "1B": Model(
        "Llama shape, 1.1B",
        config={
            "num_hidden_layers": 22, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
            "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048,
        },
    ),
    "gpt2": Model("GPT-2 shape, 124M, stored in bfloat16", "gpt2", GPT2),
    "gpt2-float32": Model("GPT-2 shape, 124M, stored in float32", "gpt2", GPT2, "float32"),
}  # fmt: skip


def checkpoint(name: str, folder: Path) -> Path:
    """Folder of the checkpoint; made below `folder` if it is not there yet."""
    if not MODELS[name].config:
        return Path(zoo.target_dir())
    return write(MODELS[name], folder / name)


def write(model: Model, path: Path) -> Path:
    """Write random weights of that shape to `path`, unless a finished checkpoint is there."""
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if (path / "model.safetensors").exists():
        return path
    with torch.device("meta"):  # names and shapes only
        if model.kind == "gpt2":
            network: Any = GPT2LMHeadModel(GPT2Config(**model.config))
        else:
            network = LlamaForCausalLM(LlamaConfig(**model.config))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in ((name, tensor.shape) for name, tensor in network.state_dict().items()):
        if name == "lm_head.weight" and network.config.tie_word_embeddings:
            continue
        values = torch.empty(shape, dtype=torch.bfloat16)  # the same values for every stored dtype
        if len(shape) > 1:
            values.normal_(std=STD, generator=generator)
        else:
            values.fill_(0.0 if name.endswith("bias") else 1.0)
        weights[name] = values.to(getattr(torch, model.stored))
    part = path.with_name(path.name + ".part")  # an interrupted run leaves no incomplete checkpoint
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    network.config.architectures = [type(network).__name__]
    network.config.dtype = model.stored
    network.config.save_pretrained(part)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(path, ignore_errors=True)
    part.replace(path)
    return path


def widened(path: Path, to: Path) -> Path:
    """A copy of a bfloat16 checkpoint with the same values in float32, for readers without bfloat16."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    source = path / "model.safetensors"
    with safe_open(source, "pt") as file:
        if all(file.get_slice(name).get_dtype() != "BF16" for name in file.keys()):  # noqa: SIM118
            return path
        if (to / "model.safetensors").exists():
            return to
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    to.mkdir(parents=True, exist_ok=True)
    shutil.copy(path / "config.json", to)
    save_file(weights, to / "model.part", metadata={"format": "pt"})
    (to / "model.part").replace(to / "model.safetensors")
    return to
