"""Makes a tiny random model of any causal architecture of the installed transformers.

The default configuration is made small. Each size in it is set to the value in `SIZES`, lists with an entry for each
layer keep one layer of each kind, and nested configurations are treated in the same way. `OVERRIDES` has further values
that some architectures need.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 64
_SPREAD = 0.25
"""Standard deviation of weights. It is large enough that rounding does not change the best token, and that a wrong mask
changes the text."""
_BY_SIZE = {
    VOCAB: """vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size ngram_vocab_size_base
        encoder_hash_byte_group_vocab""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
        context_length original_max_position_embeddings model_max_length""",
    48: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff n_inner ffn_hidden_size
        expert_ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size""",
    32: """hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim attention_hidden_size
        input_embedding_size output_embedding_size mamba_d_ssm lru_width pronunciation_embed_dim shape_embed_dim
        dim_model_base adapter_in_dim adapter_input_size adapter_out_dim""",
    16: """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size rel_extent
        shared_intermediate_size moe_shared_expert_intermediate_size router_hidden_size hidden_size_per_layer_input
        linear_head_dim hc_lowrank ple_embed_dim index_n_heads""",
    8: """head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim attention_head_size d_head swa_head_dim kv_channels
        dim_head linear_key_head_dim linear_value_head_dim index_head_dim attention_head_dim rotary_dim
        query_pre_attn_scalar kv_lora_rank q_lora_rank o_lora_rank laurel_rank gated_norm_rank adapter_rank
        mamba_dt_rank time_step_rank d_rel state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim
        mamba_n_heads mamba_num_heads n_mamba_heads mamba_chunk_size chunk_size""",
    6: """sliding_window sliding_window_size window_size attention_chunk_size attention_window_size local_attention""",
    4: """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
        linear_num_heads o_groups linear_num_value_heads num_experts num_local_experts n_routed_experts
        moe_num_experts zero_expert_num block_size index_topk""",
    2: """num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers num_blocks num_layers_per_stack num_experts_per_tok num_experts_per_token moe_topk moe_k
        n_group num_expert_group n_groups""",
    1: """topk_group first_k_dense_replace num_dense_layers moe_layer_end_index""",
}
SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
"""Values of the sizes in a configuration, unless the default is smaller."""
_GROUPED = {"num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"}

_SLIDING_FULL = ["sliding_attention", "full_attention"]
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "cohere_compass_text": {"layer_types": _SLIDING_FULL, "rope_parameters": dict.fromkeys(_SLIDING_FULL, _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 24},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": 2 * _SLIDING_FULL, "num_kv_shared_layers": 2, "intermediate_size": 48,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8},
    "hrm_text": {"num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "use_mamba_kernels": False},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "use_mamba_kernels": False},
}  # fmt: skip
"""By model type, values of the configuration that `SIZES` does not set."""


def shrunk(kind: Any) -> Any:
    """Make a tiny configuration of this class."""
    default = kind()
    values = default.to_dict()
    changes = _sizes(values) | _layers(values)
    changes |= {
        name: shrunk(type(part)).to_dict() for name in kind.sub_configs if (part := getattr(default, name, None))
    }
    changes |= dict.fromkeys({"initializer_range", "init_std"} & set(values), _SPREAD)
    changes |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    return kind(**changes | OVERRIDES.get(kind.model_type, {}))


def _sizes(values: dict[str, Any], most: int = 1) -> dict[str, Any]:
    """Return the sizes among `values`, reduced to at most `most` times the value in `SIZES`."""
    sizes = {name: min(values[name], most * SIZES[name]) for name in SIZES if type(values.get(name)) is int}
    for name in _GROUPED & set(sizes):
        if values[name] == values.get("num_attention_heads"):
            sizes[name] = sizes["num_attention_heads"]
    return sizes


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """Cut lists with an entry for each layer to one layer of each kind, but at least two layers. Returns the lists and
    the number of layers."""
    key = next((name for name in ("num_hidden_layers", "n_layer", "n_layers") if values.get(name)), None)
    if key is None:
        return {}
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == values[key] and values[key] > 2
    }
    if not lists:
        return {}
    kept, seen = list[int](), set[Any]()
    for i in range(values[key]):
        kinds = {(name, str(value[i])) for name, value in lists.items() if isinstance(value[i], str)}
        if not kinds <= seen:
            kept.append(i)
            seen |= kinds
    rest = (i for i in range(values[key]) if i not in kept)
    while len(kept) < 2:
        kept = sorted([*kept, next(rest)])
    layers = {name: [value[i] for i in kept] for name, value in lists.items()} | {key: len(kept)}
    apart = {int(i): each for i, each in values.get("per_layer_config", {}).items()}
    if apart:  # layers with their own sizes
        layers["per_layer_config"] = {i: _sizes(apart[at], most=2) for i, at in enumerate(kept) if at in apart}
    return layers


def tiny_model(model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Make the model in memory. Raises the errors of transformers."""
    import transformers

    torch.manual_seed(seed)
    config = shrunk(transformers.CONFIG_MAPPING[model_type])
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.std() < _SPREAD / 2:  # too small, or zeros
                parameter.normal_(0.0, _SPREAD)
        model.get_input_embeddings().weight.mul_(1 + seed)  # for texts where one token always wins
    model.config._experts_implementation = "eager"  # the grouped kernels do not support float64
    # Outputs do not end early.
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model.to(dtype).eval()
