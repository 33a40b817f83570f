"""A tiny random Llama, a draft that agrees with it most of the time, and their byte-level tokenizer, on disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.embedded.tokenizer import save_tokenizer, train_tokenizer

OTHER_TEXTS = ["SELECT column FROM table WHERE value > 17;\n", "INSERT INTO table VALUES (1, 2, 3);\n"]
TEXTS = [
    "def add(first, second):\n    return first + second\n",
    "for name in names:\n    print(name)\n",
    "naïve café 🎈 ☃\n",
]
CONTEXT = 192


@dataclass(frozen=True)
class Tiny:
    """Folders of the two checkpoints."""

    target: Path
    draft: Path


def make_tokenizer(folder: Path, vocab_size: int = 320, texts: list[str] = TEXTS) -> Any:
    """A byte-level tokenizer with a chat template in `folder`; every UTF-8 text has ids. Other `texts` give other
    merges, so that ids from 260 on stand for other tokens."""
    tokenizer = train_tokenizer(texts, vocab_size)
    save_tokenizer(tokenizer, folder, CONTEXT)
    return tokenizer


def make_model(folder: Path, seed: int = 0, vocab_size: int = 320, noise: float = 0.0, **changes: Any) -> Any:
    """A random Llama in `folder`; `noise` shakes the weights that `seed` gives, so that a draft nearly agrees.

    Weights are drawn wide, so that the first token is ahead by far more than rounding.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    config = LlamaConfig(**shape | changes)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter += noise * torch.randn_like(parameter) * parameter.std().nan_to_num()
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return model


def make_tiny(folder: Path) -> Tiny:
    tiny = Tiny(folder / "target", folder / "draft")
    make_model(tiny.target)
    make_model(tiny.draft, noise=0.05)
    for path in (tiny.target, tiny.draft):
        make_tokenizer(path)
    return tiny


def clone(source: Path, folder: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(source, folder))
