"""The models of the board: the embedded pair, and for the rows named "hybrid" a tiny random pair with recurrent layers,
whose state, unlike a KV cache, cannot be cut back to the accepted tokens. It is a Qwen3.5, or a Qwen3-Next for vLLM,
whose Qwen3.5 needs torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT
from slipstream.zoo import draft_dir, target_dir

HYBRID = ", hybrid"
"""End of the names of methods whose model is the hybrid."""
VOCAB = 96
NOISE = 0.1
"""Of the draft model's weights, in their standard deviations: some draft tokens are accepted."""
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
RECURRENT = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


def models_of(method: str, hybrid: str = "qwen3_5") -> tuple[Path, Path]:
    """Target and draft model of a method. hybrid: kind of the models of methods that end with `HYBRID`."""
    return _hybrids(hybrid) if method.endswith(HYBRID) else (target_dir(), draft_dir())


def _hybrids(kind: str) -> tuple[Path, Path]:
    """Their folders, written once; the weights depend on the version of PyTorch alone."""
    write = {"qwen3_5": _write_qwen3_5, "qwen3_next": _write_qwen3_next}[kind]
    target, draft = (ROOT / "runs" / "board-hybrid" / kind / name for name in ("target", "draft"))
    if not (draft / "model.safetensors").exists():
        import torch  # here, because it takes seconds

        torch.manual_seed(0)
        with torch.no_grad():
            write(target, draft)
    return target, draft


def _write_qwen3_5(target: Path, draft: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    sizes: dict[str, Any] = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SHAPE, **RECURRENT, **sizes, initializer_range=0.25))
    model.save_pretrained(target)
    for weights in model.parameters():
        weights += NOISE * torch.randn_like(weights) * weights.std().nan_to_num()
    model.save_pretrained(draft)


def _write_qwen3_next(target: Path, draft: Path) -> None:
    """What vLLM can run on a CPU: bfloat16, states of 128 x 128, experts, an MTP layer, and a draft model without
    recurrent layers. The embeddings and the output layer, which the draft model shares, decide most tokens."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3NextConfig

    sizes: dict[str, Any] = SHAPE | {"head_dim": 32, "initializer_range": 0.1, "dtype": "bfloat16"}
    experts: dict[str, Any] = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**sizes, **RECURRENT, **experts)).to(torch.bfloat16)
    small = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, num_hidden_layers=1)).to(torch.bfloat16)
    for name, spread in (("model.embed_tokens", 1.0), ("lm_head", 0.25)):
        model.get_submodule(name).weight.normal_(0, spread)
        small.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    model.save_pretrained(target)
    small.save_pretrained(draft)
    file = target / "model.safetensors"
    state = load_file(file)  # the MTP layer is the last layer, and reads the embedding of the last token
    last = {name: weights for name, weights in state.items() if name.startswith("model.layers.3.")}
    state |= {name.replace("model.layers.3", "mtp.layers.0"): weights.clone() for name, weights in last.items()}
    state["mtp.fc.weight"] = torch.eye(64, 128, dtype=torch.bfloat16)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        state[f"mtp.{norm}.weight"] = torch.zeros(64, dtype=torch.bfloat16)
    save_file(state, file, {"format": "pt"})
