"""Multimodal models whose text part our own decoder runs: their `text_config`, and the tensors of the other parts."""

import re

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import object_of
from slipstream.core.strict import JsonMapping

WRAPPERS: dict[str, JsonMapping] = {
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma4": {"model_type": "gemma4_text"},
    "gemma4_unified": {"model_type": "gemma4_unified_text"},
    "llama4": {"model_type": "llama4_text"},
    "mistral3": {"model_type": "mistral", "tie_word_embeddings": True},
    "qwen2_vl": {"model_type": "qwen2_vl_text"},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text"},
    "qwen3_vl": {"model_type": "qwen3_vl_text"},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe_text"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
    "muse_glimmer": {"model_type": "muse_glimmer_text"},
    "lfm2_vl": {"model_type": "lfm2"},
}  # fmt: skip
"""By `model_type` of a multimodal model: keys that its published `text_config` leaves out, with transformers' defaults.
The `text_config` may be of any family that our decoder runs."""

OTHER_PARTS = re.compile(
    r"((vision|audio)_(tower|model|embedder|adapter|projection)|visual|embed_(vision|audio)|multi_modal_projector|patch_merger)\."
)
"""Prefixes of the names of vision and audio tensors, after `model.` and similar prefixes."""

_OF_BOTH = ("eos_token_id", "tie_word_embeddings", "quantization_config", "pard_token")


def text_part(config: ReadKeys) -> ReadKeys:
    """Return the configuration of the text part of a multimodal model. Keys outside `text_config` take precedence.
    Older files of Qwen-VL have all keys in one object, without `text_config`."""
    usual, given = WRAPPERS[config["model_type"]], object_of(config, "text_config")
    if not given:
        config.update({**usual, **config, "model_type": usual["model_type"]})
        return config
    config["text_config"] = text = ReadKeys({**usual, **given})
    text.update({key: config[key] for key in _OF_BOTH if config.get(key) is not None})
    return text
