"""Tiny random models of the families whose layers have more parts than Llama's: every part is switched on."""

import inspect
from collections.abc import Callable
from typing import Any

from tests.tiny_checkpoints import FAMILY_VOCAB, config_of

SLIDING, FULL = "sliding_attention", "full_attention"
_KINDS = [SLIDING, FULL, SLIDING, FULL]
_SHAPE: dict[str, Any] = {
    "vocab_size": FAMILY_VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_TIED = _SHAPE | {"tie_word_embeddings": True}
_WINDOWS = {"sliding_window": 6, "layer_types": _KINDS}
_MOE = _SHAPE | {"num_experts_per_tok": 2}
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
}  # fmt: skip
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "final_logit_softcapping": 30.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 256,
}  # fmt: skip
MINISTRAL = _YARN | {
    "factor": 16.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
MLA = _MOE | {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 8, "moe_intermediate_size": 32,
}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4, "factor": 1.0}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_MIXERS = ["linear_attention", FULL, "linear_attention", "linear_attention"]
_DELTA = {
    "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "layer_types": _MIXERS, "initializer_range": 0.15,
}  # fmt: skip
_MAMBA = {
    "layer_types": _MIXERS, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "shared_intermediate_size": 48,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "time_step_min": 1e-30, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5, "initializer_range": 0.25,
}  # fmt: skip
"""transformers would keep the time steps of prompts, and not of the tokens that follow, above time_step_min."""
_FALCON = {
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_norm_before_gate": False,
    "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.9, 1.3], "key_multiplier": 0.4,
    "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.2, "ssm_multipliers": [0.35, 0.6, 0.7, 0.5, 0.8],
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7,
}  # fmt: skip
_BIASED = {"attention_bias": True, "mlp_bias": True}


def granite_mamba() -> dict[str, Any]:
    """Mamba-2 layers in one group, as released models have, where transformers norms all groups at once (5.17)."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    by_group = "group_size" in inspect.signature(granite.GraniteMoeHybridRMSNormGated).parameters
    return _MAMBA if by_group else _MAMBA | {"mamba_n_groups": 1}


FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek-v2-lite": lambda: config_of(
        "DeepseekV2", **MLA, q_lora_rank=None, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=2.0, first_k_dense_replace=1, n_shared_experts=2, rope_parameters=_MSCALE,
    ),
    "deepseek-v2": lambda: config_of(
        "DeepseekV2", **MLA, q_lora_rank=48, first_k_dense_replace=2, attention_bias=True,
        rope_parameters=_MSCALE | {"mscale": 0.9},
    ),
    "deepseek-v3": lambda: config_of(
        "DeepseekV3", **MLA, q_lora_rank=64, first_k_dense_replace=1, n_group=4, topk_group=2,
        rope_parameters=_MSCALE,
    ),
    "glm4-moe-lite": lambda: config_of(
        "Glm4MoeLite", **MLA, q_lora_rank=64, first_k_dense_replace=1, rms_norm_eps=1e-3
    ),
    "gemma": lambda: config_of("Gemma", **_TIED, head_dim=16),
    "gemma2": lambda: config_of(
        "Gemma2", **_TIED, **_WINDOWS, head_dim=32, query_pre_attn_scalar=20, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0, attn_implementation="eager",
    ),
    "gemma3": lambda: config_of(
        "Gemma3Text", **_TIED, **_WINDOWS, head_dim=32, query_pre_attn_scalar=20,
        rope_parameters={SLIDING: _PLAIN, FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
    ),
    "gemma4": lambda: config_of(
        "Gemma4Text", **_TIED, **_WINDOWS, **_GEMMA4 | {"final_logit_softcapping": 3.0}, attention_k_eq_v=True,
        num_global_key_value_heads=1, hidden_size_per_layer_input=0,
    ),
    "gemma4-moe": lambda: config_of(
        "Gemma4Text", **_TIED, **_WINDOWS, **_GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1,
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
    ),
    "gemma4-shared": lambda: config_of(
        "Gemma4Text", **_TIED | {"num_hidden_layers": 6}, sliding_window=6, layer_types=[*_KINDS, SLIDING, FULL],
        **_GEMMA4, hidden_size_per_layer_input=16, vocab_size_per_layer_input=FAMILY_VOCAB, num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gpt-oss": lambda: config_of(
        "GptOss", **_MOE, **_WINDOWS, head_dim=16, num_local_experts=4
    ),
    "phi3": lambda: config_of("Phi3", **_SHAPE, sliding_window=7, partial_rotary_factor=0.5),
    "phi4-mini": lambda: config_of(
        "Phi3", **_TIED | {"max_position_embeddings": 2048}, original_max_position_embeddings=256,
        rope_parameters=_LONG,
    ),
    "smollm3": lambda: config_of("SmolLM3", **_TIED),
    "granite": lambda: config_of("Granite", **_SHAPE, **_GRANITE, **_BIASED),
    "olmo2": lambda: config_of("Olmo2", **_SHAPE),
    "olmo3": lambda: config_of(
        "Olmo3", **_SHAPE, **_WINDOWS, rope_parameters={SLIDING: _PLAIN, FULL: _YARN}
    ),
    "ministral3": lambda: config_of("Ministral3", **_SHAPE, head_dim=32, rope_parameters=MINISTRAL),
    "exaone4": lambda: config_of("Exaone4", **_SHAPE, **_WINDOWS, head_dim=32),
    "hunyuan": lambda: config_of("HunYuanDenseV1", **_SHAPE, head_dim=32, rope_parameters=_ALPHA),
    "seed-oss": lambda: config_of("SeedOss", **_SHAPE, head_dim=32),
    "glm": lambda: config_of("Glm", **_SHAPE, head_dim=32),
    "glm4": lambda: config_of("Glm4", **_SHAPE, head_dim=32),
    "glm4-moe": lambda: config_of(
        "Glm4Moe", **_MOE, head_dim=32, n_routed_experts=8, moe_intermediate_size=32, n_group=4, topk_group=2,
        use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.0,
    ),
    "qwen2-moe": lambda: config_of(
        "Qwen2Moe", **_MOE, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "stablelm": lambda: config_of("StableLm", **_SHAPE, use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm-parallel": lambda: config_of("StableLm", **_SHAPE, use_parallel_residual=True),
    "nemotron": lambda: config_of("Nemotron", **_SHAPE, **_BIASED, head_dim=16),
    "granite-moe": lambda: config_of("GraniteMoe", **_MOE, **_GRANITE, num_local_experts=4),
    "granite-moe-shared": lambda: config_of(
        "GraniteMoeShared", **_MOE, **_GRANITE, num_local_experts=4, shared_intermediate_size=48
    ),
    "ernie4.5": lambda: config_of("Ernie4_5", **_TIED, head_dim=32, use_bias=True),
    "ernie4.5-moe": lambda: config_of(
        "Ernie4_5_Moe", **_TIED, moe_intermediate_size=32, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
        moe_layer_interval=1,
    ),
    "minimax-m2": lambda: config_of(
        "MiniMaxM2", **_MOE, head_dim=32, num_local_experts=4, rotary_dim=16,
        partial_rotary_factor=0.5,  # transformers 5.17 does not read `rotary_dim`
    ),
    "llama4": lambda: config_of(
        "Llama4Text", **_SHAPE | {"intermediate_size": 32}, head_dim=32, intermediate_size_mlp=96, num_local_experts=4,
        num_experts_per_tok=2, interleave_moe_layer_step=2, attention_chunk_size=6, floor_scale=4, attn_scale=0.4,
        attention_bias=True,
    ),
    "arcee": lambda: config_of("Arcee", **_SHAPE, **_BIASED, head_dim=16),
    "starcoder2": lambda: config_of("Starcoder2", **_TIED, sliding_window=9),
    "cohere": lambda: config_of("Cohere", **_TIED, logit_scale=0.5),
    "cohere2": lambda: config_of("Cohere2", **_TIED, **_WINDOWS, head_dim=16, logit_scale=0.5),
    "olmoe": lambda: config_of("Olmoe", **_MOE, num_experts=4),
    "lfm2": lambda: config_of(
        "Lfm2", **_TIED, layer_types=["conv", FULL, "conv", "conv"], conv_bias=True, block_auto_adjust_ff_dim=False
    ),
    "qwen3.5": lambda: config_of("Qwen3_5Text", **_SHAPE | _DELTA),
    "qwen3-next": lambda: config_of(
        "Qwen3Next", **_MOE | _DELTA, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "qwen3.5-moe": lambda: config_of(
        "Qwen3_5MoeText", **_MOE | _DELTA, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "granite-hybrid": lambda: config_of(
        "GraniteMoeHybrid", **_SHAPE, **_GRANITE, **granite_mamba(), num_local_experts=0, num_experts_per_tok=0
    ),
    "granite-hybrid-moe": lambda: config_of(
        "GraniteMoeHybrid", **_MOE, **_GRANITE, **granite_mamba(), num_local_experts=4, position_embedding_type="rope"
    ),
    "lfm2-moe": lambda: config_of(
        "Lfm2Moe", **_TIED | _MOE, layer_types=["conv", FULL, "conv", "conv"], num_experts=4, moe_intermediate_size=32,
        num_dense_layers=1,
    ),
    "lfm3": lambda: config_of(
        "Lfm3", **_TIED, layer_types=["conv", SLIDING, FULL, "conv"], head_dim=32, sliding_window=6
    ),
    "olmo-hybrid": lambda: config_of(
        "OlmoHybrid", **_SHAPE | _DELTA | {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
        rope_parameters=_PLAIN,
    ),
    "nemotron-h": lambda: config_of(
        "NemotronH", **_MOE | _NEMOTRON, layers_block_type=["linear_attention", "mlp", "linear_attention", FULL, "moe"]
    ),
    "falcon-h1": lambda: config_of("FalconH1", **_SHAPE, **_FALCON),
    "falcon-h1-normed": lambda: config_of("FalconH1", **_SHAPE, **_FALCON, mamba_rms_norm=True),
}  # fmt: skip
