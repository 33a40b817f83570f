"""The list of known GGUF metadata: keys with an effect, with the types of their values, and keys without effect.

These are the keys and token texts that llama.cpp reads for our families (llama-model.cpp and llama-vocab.cpp of
github.com/ggml-org/llama.cpp).
"""

import logging
import math
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from slipstream.core.strict import JsonMapping, JsonObject

log = logging.getLogger("slipstream")

MAGIC = b"GGUF"
"""First bytes of a GGUF file."""
ENDS = "slipstream.eos_ids"
"""Key of the end-of-text ids in files written by Slipstream, with a value such as "0 3" or "none". The GGUF format has
keys for only three such ids, and llama.cpp adds further ids by the tokens' texts."""
WHOLE = "tokenizer.huggingface.json"
"""Key whose value is the complete tokenizer.json of the checkpoint."""
TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template. A named template's key is this key, a full stop and the name."""

_ENDING = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>"
)
END_TEXTS = frozenset(_ENDING.split())
"""Texts of tokens that always count as end-of-text tokens, even if the file gives them another type."""


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


_KEYS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    (r"general\.architecture|tokenizer\.(ggml\.(model|pre)|chat_template(\..+)?|huggingface\.json)|slipstream\.eos_ids",
     lambda value: isinstance(value, str)),
    (r"tokenizer\.(ggml\.(tokens|merges)|chat_templates)",
     lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)),
    (r"tokenizer\.ggml\.suppress_tokens", lambda value: isinstance(value, list) and all(map(_is_size, value))),
    (r"tokenizer\.ggml\.token_type",
     lambda value: isinstance(value, list) and all(_is_size(each) and 0 < each < 7 for each in value)),
    (r"\*\.attention\.causal|tokenizer\.ggml\.add_(bos_token|eos_token|sep_token|space_prefix)",
     lambda value: isinstance(value, bool)),
    (r"general\.file_type|split\.count|\*\.((vocab|context)_(size|length)|embedding_length|block_count|pard_token|"
     r"nextn_predict_layers|rope\.dimension_count|attention\.(key|value)_length|expert_(count|group_count|group_used_count)|"
     r"rope\.scaling\.original_context_length)", _is_size),
    (r"tokenizer\.ggml\.(bos|eos|eot|eom|unknown|seperator|padding|cls|mask|prefix|suffix|middle|fim_(pre|suf|mid|pad|rep|"
     r"sep))_token_id", lambda value: type(value) is int and 0 <= value < 2**32),  # 2**32 - 1: no token
    (r"\*\.((expert_)?feed_forward_length|attention\.head_count(_kv)?|expert_used_count)",
     lambda value: all(map(_is_size, value if isinstance(value, list) else [value]))),
    (r"general\.sampling\.(temp|top_k|top_p|min_p)|\*\.rope\.scaling\.attn_factor",
     lambda value: type(value) in (int, float) and abs(value) < math.inf),
    (r"\*\.(attention\.layer_norm_(rms_)?epsilon|rope\.(freq_base|scale_linear|scaling\.(factor|yarn_beta_(fast|slow))))",
     lambda value: type(value) in (int, float) and 0 <= value < math.inf),
    (r"\*\.rope\.scaling\.type", lambda value: value in ("none", "linear", "yarn", "longrope")),  # llama.cpp aborts
    (r"general\.(alignment|quantization_version|type|name|author|version|organization|finetune|basename|description|url|"
     r"quantized_by|size_label|license|doi|uuid|repo_url|tags|languages|datasets|(license|source|base_model|dataset)\..+)|"
     r"split\..+|quantize\.imatrix\..+|tokenizer\.rwkv\.world|tokenizer\.ggml\.(scores|token_type_count|"
     r"remove_extra_whitespaces|precompiled_charsmap|normalizer\..+)|"
     r"\*\.(tensor_data_layout|pooling_type|n_deepstack_layers|rope\.(scaling\.finetuned|dimension_sections))",
     lambda value: True),
)  # fmt: skip
"""Known keys, with * for the name of the architecture, and checks of their values. Keys of the last entry have no
effect: they describe the file, or are for tokenizers."""


_FURTHER: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    (r"\*\.(leading_dense_block_count|expert_shared_(count|feed_forward_length)|expert_gating_func|"
     r"attention\.sliding_window|ssm\.(conv_kernel|state_size|group_count|time_step_rank|inner_size)|"
     r"attention\.((key|value)_length_swa|shared_kv_layers)|rope\.dimension_count_swa|embedding_length_per_layer_input|"
     r"attention\.((q|kv)_lora_rank|(key|value)_length_mla)|shortconv\.l_cache|"
     r"full_attention_interval|interleave_moe_layer_step)", _is_size),
    (r"\*\.attention\.recurrent_layers",
     lambda value: isinstance(value, list) and all(each in (0, 1) for each in value)),
    (r"\*\.attention\.sliding_window_pattern",
     lambda value: _is_size(value) or (isinstance(value, list) and all(each in (0, 1) for each in value))),
    (r"\*\.(expert_weights_norm|use_parallel_residual|rope\.scaling\.finetuned)",
     lambda value: isinstance(value, bool)),
    (r"\*\.((attn|final)_logit_softcapping|attention\.(scale|temperature_scale|temperature_length)|"
     r"(embedding|residual|logit)_scale|expert_weights_scale|rope\.freq_base_swa|rope\.scaling\.yarn_log_multiplier)",
     lambda value: type(value) in (int, float) and 0 <= value < math.inf),
)  # fmt: skip
"""Keys that have an effect in some families only."""


def _check(key: str, architecture: str, more: bool = True) -> Callable[[Any], bool] | None:
    """Return the function that checks a key's value; None for an unknown key. more: whether keys that have an effect
    only in some families are known, too."""
    name = f"*.{key.removeprefix(architecture)[1:]}" if key.startswith(f"{architecture}.") else key
    keys = _KEYS + _FURTHER if more else _KEYS
    return next((check for known, check in keys if re.fullmatch(known, name)), None)


def wrong_value(metadata: Mapping[str, object]) -> str | None:
    """Return the first known key whose value is impossible; None if there is none."""
    checks = {key: _check(key, str(metadata.get("general.architecture"))) for key in metadata}
    return next((key for key, check in checks.items() if check and not check(metadata[key])), None)


def warn_of_keys(file: str, metadata: JsonMapping, read: Container[str]) -> None:
    """Log a warning for keys without effect. read: keys of the architecture that our own decoder has read."""
    name = metadata["general.architecture"]
    own = [key for key in metadata if not key.startswith(f"{name}.") or key not in read]
    ignored = [key for key in own if not _check(key, name, more=False)]
    if ignored:
        log.warning("%s has metadata without an effect here: %s", file, ", ".join(map(repr, ignored)))


def sampling_of(metadata: JsonMapping) -> JsonObject:
    """Return the file's sampling settings as in generation_config.json. As in llama.cpp, values below 0 mean 0."""
    given = {name: metadata.get(f"general.sampling.{name}") for name in ("top_k", "top_p", "min_p")}
    given |= {"temperature": metadata.get("general.sampling.temp")}
    given = {name: max(0, value) for name, value in given.items() if value is not None}
    return given | {"suppress_tokens": metadata.get("tokenizer.ggml.suppress_tokens")}
