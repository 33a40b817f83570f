"""The tiny checkpoints of the tests: a Llama, a draft model that mostly agrees with it, their byte-level tokenizer, and
one model of each supported family."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.embedded.tokenizer import save_tokenizer, train_tokenizer

OTHER_TEXTS = ["SELECT column FROM table WHERE value > 17;\n", "INSERT INTO table VALUES (1, 2, 3);\n"]
TEXTS = [
    "def add(first, second):\n    return first + second\n", "for name in names:\n    print(name)\n",
    "naïve café 🎈 ☃\n",
]  # fmt: skip
CONTEXT = 192
SHAPE = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
"""Default shape of `random_llama`."""
EXACT: dict[str, Any] = {"executor": "torch", "dtype": "float64", "device": "cpu"}
"""Settings of loading for exact comparisons: PyTorch in float64 on the CPU."""


@dataclass(frozen=True)
class Tiny:
    """The folders of a tiny target and its draft model."""

    target: Path
    draft: Path


def make_tokenizer(folder: Path, vocab_size: int = 320, texts: list[str] = TEXTS) -> Any:
    """Write a byte-level tokenizer with a chat template to `folder`. It can encode every UTF-8 text. Other `texts` give
    other merges, so that ids from 260 on are other tokens."""
    tokenizer = train_tokenizer(texts, vocab_size)
    save_tokenizer(tokenizer, folder, CONTEXT)
    return tokenizer


@torch.random.fork_rng(devices=[])
def random_llama(seed: int = 0, noise: float = 0.0, **shape: Any) -> Any:
    """Make a random Llama whose weights depend only on `seed`, `noise` and the shape. noise: disturbs the weights, to
    make a draft model that mostly agrees with the model without noise. shape: fields of `LlamaConfig` that replace
    SHAPE.

    Weights have a standard deviation of 0.25 instead of the usual 0.02, so that rounding does not change the best
    token, and the effect of a wrong mask exceeds the tolerance.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(config_of("Llama", **SHAPE | shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter += noise * torch.randn_like(parameter) * parameter.std().nan_to_num()
    return model


def make_model(folder: Path, seed: int = 0, noise: float = 0.0, **shape: Any) -> Any:
    """Write a `random_llama` to `folder`."""
    model = random_llama(seed, noise, **shape)
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
    """Copy a checkpoint, so that a test may change the copy."""
    return Path(shutil.copytree(source, folder))


def rewrite(folder: Path, tensors: Callable[[dict[str, Tensor]], Any] | None = None, **keys: Any) -> Path:
    """Change a checkpoint. tensors: function that changes tensors in place. keys: new values in config.json; None
    removes a key."""
    file, state = folder / "config.json", load_file(weights := next(folder.glob("*.safetensors")))
    values = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if tensors:
        tensors(state)
        save_file(state, weights, metadata={"format": "pt"})
    return folder


# --- one model of each family -------------------------------------------------------------------------------------

FAMILY_VOCAB = 96

_LLAMA = {
    "vocab_size": FAMILY_VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_MOE = _LLAMA | {"num_experts_per_tok": 2, "head_dim": 16}


def config_of(kind: str, **shape: Any) -> Any:
    """A configuration of transformers, which writes to some of the dictionaries that it gets: it gets copies."""
    import transformers

    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} does not know {kind}")
    return getattr(transformers, f"{kind}Config")(**copy.deepcopy(shape))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: config_of("Llama", **_LLAMA),
    "llama-tied-mha": lambda: config_of("Llama", **_LLAMA | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama-bias": lambda: config_of("Llama", **_LLAMA, attention_bias=True, mlp_bias=True),
    "llama3.1": lambda: config_of("Llama", **_LLAMA, rope_parameters=_LLAMA3),
    "codellama-linear": lambda: config_of(
        "Llama", **_LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    ),
    "mistral-window": lambda: config_of("Mistral", **_LLAMA, sliding_window=7, head_dim=16),
    "mixtral": lambda: config_of("Mixtral", **_MOE, num_local_experts=4),
    "qwen2": lambda: config_of("Qwen2", **_LLAMA, rope_parameters=_YARN),
    "qwen2-window": lambda: config_of(
        "Qwen2", **_LLAMA, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: config_of("Qwen3", **_LLAMA, head_dim=32, tie_word_embeddings=True),
    "qwen3-moe": lambda: config_of("Qwen3Moe", **_MOE, num_experts=5, moe_intermediate_size=32, mlp_only_layers=[1]),
    "gpt2": lambda: config_of(
        "GPT2", vocab_size=FAMILY_VOCAB, n_positions=128, n_embd=64, n_layer=3, n_head=4, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


def make_family(family: str, folder: Path, shard_bytes: int | None = None, **changes: Any) -> Path:
    """Write the tiny checkpoint of `family`, here or in `tiny_families`, into `folder`, in shards of `shard_bytes` if
    given. changes: keys of its configuration."""
    import transformers

    from tests import tiny_families

    known = FAMILIES if family in FAMILIES else tiny_families.FAMILIES
    torch.manual_seed(sorted(known).index(family))
    config = known[family]()
    config = type(config).from_dict(config.to_dict() | changes) if changes else config
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        buffers = [b for name, b in model.named_buffers() if "correction" in name or "scalar" in name]
        for p in [*model.parameters(), *buffers]:
            if p.ndim == 1:  # biases start at 0 and norms at 1, so that mistakes would have no effect
                p.add_(torch.randn_like(p) * 0.2)
            elif not p.any():  # transformers 5.17 leaves the router of ERNIE 4.5 at 0: all experts would be equal
                p.normal_(std=0.25)
    model.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return folder
