"""The models of the board: the embedded pair, and for the rows named "hybrid" a tiny random pair with recurrent layers,
whose state, unlike a KV cache, cannot be cut back to the accepted tokens."""

from __future__ import annotations

from pathlib import Path

from benchmarks.protocol import ROOT
from slipstream.zoo import draft_dir, target_dir

HYBRID = ", hybrid"
"""End of the names of methods whose model is the hybrid."""
VOCAB = 96
NOISE = 0.1
"""Of the draft model's weights, in their standard deviations: some draft tokens are accepted."""


def models_of(method: str) -> tuple[Path, Path]:
    """Target and draft model of a method."""
    return _hybrids() if method.endswith(HYBRID) else (target_dir(), draft_dir())


def _hybrids() -> tuple[Path, Path]:
    """Their folders, written once; the weights depend on the version of PyTorch alone."""
    target, draft = (ROOT / "runs" / "board-hybrid" / name for name in ("target", "draft"))
    if not (draft / "model.safetensors").exists():
        import torch  # here, because it takes seconds
        from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

        torch.manual_seed(0)
        config = Qwen3_5TextConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=16,
            num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=512, initializer_range=0.25,
            bos_token_id=1, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(target)
        with torch.no_grad():
            for weights in model.parameters():
                weights += NOISE * torch.randn_like(weights) * weights.std().nan_to_num()
        model.save_pretrained(draft)
    return target, draft
