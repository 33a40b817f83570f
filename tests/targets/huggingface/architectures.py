"""Tiny random models of many architectures of transformers, for the targets that run any model; and linear layers that
round as those of quantisation libraries do, so that tests need no such library."""

from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.trials import forward_logits
from tests.tiny_checkpoints import config_of

VOCAB = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.25, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MHA = _COMMON | {"num_key_value_heads": 4}
_EXPERTS = _COMMON | {"num_experts_per_tok": 2}
_MLA = _MHA | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 16, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_GPT = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1}
_GPT |= {"eos_token_id": 2, "initializer_range": 0.25}
_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4 = _COMMON | {"head_dim": 8, "global_head_dim": 12, "hidden_size_per_layer_input": 8} | _ALTERNATING
_GEMMA4 |= {"vocab_size_per_layer_input": VOCAB}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _config(kind: str, **shape: Any) -> Any:
    """With an output head of its own unless `shape` says otherwise: a tied one mostly repeats the last token."""
    return config_of(kind, **{"tie_word_embeddings": False} | shape)


PACKED: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: _config(  # "eager": its default in transformers 5.17 leaves out the soft caps
        "Gemma2", **_COMMON, head_dim=8, query_pre_attn_scalar=8, **_ALTERNATING, attn_implementation="eager"
    ),
    "gemma3": lambda: _config("Gemma3Text", **_COMMON, head_dim=8, query_pre_attn_scalar=8, **_ALTERNATING),
    "gemma4": lambda: _config("Gemma4Text", **_GEMMA4),
    "gemma4-experts": lambda: _config(
        "Gemma4Text", **_GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=16,
    ),
    "phi": lambda: _config("Phi", **_MHA, partial_rotary_factor=0.5),
    "phi3": lambda: _config("Phi3", **_COMMON, sliding_window=7),
    "olmo2": lambda: _config("Olmo2", **_COMMON),
    "gpt-neox": lambda: _config("GPTNeoX", **_MHA, rotary_pct=0.5),
    "stablelm": lambda: _config("StableLm", **_COMMON),
    "granite": lambda: _config("Granite", **_COMMON, embedding_multiplier=2.0, logits_scaling=3.0),
    "cohere": lambda: _config("Cohere", **_COMMON, logit_scale=0.5),
    "cohere2": lambda: _config("Cohere2", **_COMMON, **_ALTERNATING),
    "deepseek-v2": lambda: _config("DeepseekV2", **_MLA),
    "deepseek-v3": lambda: _config("DeepseekV3", **_MLA),
    "opt": lambda: _config(
        "OPT", vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, init_std=0.25, bos_token_id=1, eos_token_id=2,
        pad_token_id=None,
    ),
    "starcoder2": lambda: _config("Starcoder2", **_COMMON, sliding_window=9),
    "nemotron": lambda: _config("Nemotron", **_COMMON),
    "qwen2-moe": lambda: _config(
        "Qwen2Moe", **_EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "gpt-oss": lambda: _config("GptOss", **_EXPERTS, head_dim=8, num_local_experts=4, **_ALTERNATING),
    "olmoe": lambda: _config("Olmoe", **_EXPERTS, num_experts=4),
    "smollm3": lambda: _config("SmolLM3", **_COMMON),
    "glm4": lambda: _config("Glm4", **_COMMON, head_dim=8),
    "gpt-bigcode": lambda: _config("GPTBigCode", **_GPT),
    "exaone4": lambda: _config("Exaone4", **_COMMON, head_dim=8, **_ALTERNATING),
    "phimoe": lambda: _config("Phimoe", **_EXPERTS, num_local_experts=4),
    "falcon": lambda: _config("Falcon", **_MHA, alibi=False),
    "gpt-j": lambda: _config("GPTJ", **_GPT, rotary_dim=4),
    "codegen": lambda: _config("CodeGen", **_GPT, rotary_dim=4),
}  # fmt: skip
"""Rows of several sequences in one pass."""

ONE_EACH: dict[str, Callable[[], Any]] = {
    "falcon-alibi": lambda: _config("Falcon", **_MHA, alibi=True),
    "bloom": lambda: _config("Bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25),
    "deepseek-v32": lambda: _config("DeepseekV32", **_MLA, index_topk=4, index_n_heads=16, index_head_dim=16),
    "mpt": lambda: _config("Mpt", vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, initializer_range=0.25),
    "gemma4-shared": lambda: _config(
        "Gemma4Text",
        **_GEMMA4 | {"num_hidden_layers": 4, "layer_types": 2 * _ALTERNATING["layer_types"]},
        num_kv_shared_layers=2,
    ),
    "gpt-neo": lambda: _config(
        "GPTNeo", vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=128,
        attention_types=[[["global", "local"], 1]], window_size=6, initializer_range=0.25, bos_token_id=1,
        eos_token_id=2,
    ),
}  # fmt: skip
"""A pass for each sequence: attention with biases, masks or caches of its own."""

STATEFUL: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: _config(
        "Qwen3Next", **_EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"], **_LINEAR,
    ),
    "mamba": lambda: _config(
        "Mamba", vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, initializer_range=0.25
    ),
    "mamba2": lambda: _config(
        "Mamba2", vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, num_heads=8, head_dim=8,
        n_groups=2, initializer_range=0.25,
    ),
    "jamba": lambda: _config(
        "Jamba", **_EXPERTS, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "lfm2": lambda: _config("Lfm2", **_COMMON, layer_types=["conv", "full_attention"]),
    "bamba": lambda: _config(
        "Bamba", **_COMMON, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8,
    ),
}  # fmt: skip
"""Recurrences and convolutions, whose states are copied."""

ARCHITECTURES = PACKED | ONE_EACH | STATEFUL
VARIANTS = {"falcon-alibi": "falcon (alibi)", "gemma4-shared": "gemma4_text (shared keys)"}
"""Architecture -> its name in `kinds`, where that is not its `model_type`."""


@torch.random.fork_rng(devices=[])
def random_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, noise: float = 0.0, **shape: Any) -> Any:
    """The tiny model of an architecture. Weights are large, so that the best token is far ahead of rounding and a wrong
    mask shows; norms and biases are disturbed, so that one that is left out shows, too. noise: disturbs all weights, so
    that a draft model mostly agrees with the one without. shape: values that the configuration has instead."""
    import transformers

    torch.manual_seed(seed + sorted(ARCHITECTURES).index(name))
    config = ARCHITECTURES[name]()
    config.update(shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for parameter in model.parameters() if noise else ():
            parameter += noise * torch.randn_like(parameter) * parameter.std().nan_to_num()
    model.config._experts_implementation = "eager"  # the grouped kernels do not support float64
    model.generation_config.eos_token_id = None  # texts go on, whatever is drawn
    return model.to(dtype).eval()


def generated(own: Any, prompts: Seq[Seq[int]], tokens: int) -> list[list[int]]:
    """What transformers generates greedily for each prompt or source, alone."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        ones = torch.ones_like(ids)
        out = own.generate(ids, do_sample=False, num_beams=1, max_new_tokens=tokens, attention_mask=ones)
        outputs.append(out[0, 1 if own.config.is_encoder_decoder else len(prompt) :].tolist())
    return outputs


ROUNDS = ("by row", "by tensor", "nothing")
"""What activations share a scale with: their row, or all rows of the pass. "nothing": weights alone are rounded."""


class Int8Linear(nn.Module):
    """int8 weights with one scale for each output, and activations as `rounds` says."""

    def __init__(self, linear: nn.Linear, rounds: str):
        super().__init__()
        self.in_features, self.out_features, self.rounds = linear.in_features, linear.out_features, rounds
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(1) / 127
        self.weight = nn.Parameter((weight / self.scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale[:, None]
        if self.rounds != "nothing":
            largest = x.abs().amax(-1, keepdim=True) if self.rounds == "by row" else x.abs().amax()
            scale = largest.clamp(min=1e-20) / 127
            x = (x / scale).round() * scale
        return nn.functional.linear(x, weight, self.bias)


def with_int8_layers(module: Any, rounds: str) -> Any:
    """`module` with all linear layers but its output head replaced."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not module.get_output_embeddings():
                setattr(parent, name, Int8Linear(child, rounds))
    return module


def behind(module: Any, prompt: Seq[int], text: Seq[int]) -> float:
    """How far a token of the text is behind the best one of the model's own forward at most, relative to the largest
    logit. The texts of an encoder-decoder begin with id 0."""
    encoded = module.config.is_encoder_decoder
    given = [*([0] if encoded else prompt), *text[:-1]]
    logits = forward_logits(module, ModuleParts(module), given, prompt if encoded else ())[-len(text) :]
    chosen = logits[range(len(text)), list(text)]
    return float((logits.amax(-1) - chosen).max() / logits.abs().max())
