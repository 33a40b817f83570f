"""Tiny random multimodal models whose text part runs on our own kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_checkpoints import config_of
from tests.tiny_families import FULL, MINISTRAL, MLA, SLIDING

_TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = {"sliding_window": 6, "layer_types": [SLIDING, FULL] * 2}
_CHUNKS = {"attention_chunk_size": 6, "floor_scale": 4}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
_SIGLIP = _TOWER | {"image_size": 8, "model_type": "siglip_vision_model"}
_PIXTRAL = _TOWER | {"image_size": 8, "head_dim": 8, "model_type": "pixtral"}
_GEMMA4 = _TEXT | _WINDOWS | {"head_dim": 16, "global_head_dim": 32, "pad_token_id": 0}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
_QWEN3 = _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SECTIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_QWEN3_TEXT = _TEXT | {"head_dim": 32, "rope_parameters": _SECTIONS}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

WRAPPED: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: config_of(
        "Gemma3", text_config=_TEXT | _WINDOWS | {"head_dim": 32}, vision_config=_SIGLIP, mm_tokens_per_image=4
    ),
    "gemma4": lambda: config_of(
        "Gemma4", text_config=_GEMMA4 | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
        vision_config=_TOWER | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "gemma4_unified": lambda: config_of(
        "Gemma4Unified", text_config=_GEMMA4,
        vision_config={"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
    ),
    "llama4": lambda: config_of(
        "Llama4",
        text_config=_TEXT | _CHUNKS | {"head_dim": 32, "intermediate_size_mlp": 96, "num_local_experts": 4},
        vision_config=_TOWER | {f"projector_{end}put_dim": 16 for end in ("in", "out")} | {"vision_output_dim": 16},
    ),
    "mistral3": lambda: config_of(
        "Mistral3", vision_config=_PIXTRAL, tie_word_embeddings=False,
        text_config=_TEXT | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    ),
    "mistral3 of Ministral 3": lambda: config_of(
        "Mistral3", vision_config=_PIXTRAL, text_config=_TEXT | {"model_type": "ministral3", "head_dim": 16}
    ),
    "mistral3 of Mistral 4": lambda: config_of(
        "Mistral3", vision_config=_PIXTRAL, text_config=MLA | {
            "model_type": "mistral4", "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "rope_parameters": MINISTRAL,
        },
    ),
    "muse_glimmer": lambda: config_of(
        "MuseGlimmer", text_config=_TEXT | _WINDOWS | {"head_dim": 32, "layer_types": [SLIDING] * 3 + [FULL]},
        vision_config=_TOWER | {"pos_emb_height": 4, "pos_emb_width": 4}, out_hidden_size=64,
        projector_hidden_size=16,
    ),
    "qwen2_5_vl": lambda: config_of(
        "Qwen2_5_VL", vision_config=_QWEN | {"fullatt_block_indexes": [0]},
        text_config=_TEXT | {"rope_parameters": {"type": "mrope", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
    ),
    "qwen3_vl": lambda: config_of("Qwen3VL", text_config=_QWEN3_TEXT, vision_config=_QWEN3),
    "lfm2_vl": lambda: config_of(
        "Lfm2Vl", vision_config=_TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16},
        projector_hidden_size=16, text_config=_TEXT | {"layer_types": ["conv", FULL] * 2, "model_type": "lfm2"},
    ),
    "qwen3_vl_moe": lambda: config_of("Qwen3VLMoe", text_config=_QWEN3_TEXT | _EXPERTS, vision_config=_QWEN3),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    """Write a complete multimodal model, and return it."""
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(WRAPPED[name](), attn_implementation="eager")
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim == 1:  # norms start at 1 or 0, where a wrong shift would not change the best token
                each.add_(torch.randn_like(each) * 0.3)
    model.save_pretrained(folder)
    return model.double().eval()
