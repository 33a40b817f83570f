"""`ReadKeys`: a config.json that records which of its keys were read, so that no other key is silently ignored."""

import re
from typing import Any

_WITHOUT_EFFECT = re.compile(
    "_.*|architectures|(attention|attn|embd|resid|residual|hidden|embedding)_(dropout|pdrop)|"
    "(bos|eod|pad|sep|unk)_token_id|cache_implementation|(torch_)?dtype|"
    "finetuning_task|id2label|initializer_range|is_llama_config|label2id|max_length|max_window_layers|n_ctx|num_labels|"
    "pretraining_tp|problem_type|reorder_and_upcast_attn|return_dict|(output_)?router_.*|summary_.*|"
    r"task_specific_params|transformers(\.js_config|_version)|unsloth_.*|use_cache|out_hidden_size|spatial_merge_size|"
    "(audio|bo[aiv]|downsample|eo[aiv]|image|mm|mtp|multimodal|projector|video|vision)_.*|"
    "mamba_ssm(_cache)?_dtype|moe_shared_expert_overlap|num_logits_to_keep|rescale_prenorm_residual|residual_in_fp32|"
    "use_mamba_kernels|aux_loss_alpha|ep_size|seq_aux"
)
"""Keys without effect here. They are for training, other tasks, pictures and sounds, layers that are not run, and the
file itself. Other known keys are recorded when they are read."""


class ReadKeys(dict[str, Any]):
    """A config.json, or an object in it, that records which of its keys were read.

    last  the key that was read last.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self._read: set[str] = set()
        self.last = ""

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def _note(self, key: str) -> None:
        self._read.add(key)
        self.last = key

    def list_unread(self) -> list[str]:
        """Return the keys that were not read and may have an effect; null, false, zero and empty have none."""
        own = [key for key in self.keys() - self._read if self[key] and not _WITHOUT_EFFECT.fullmatch(key)]
        inner = {name: each.list_unread() for name, each in self.items() if isinstance(each, ReadKeys)}
        return sorted(own) + [f"{name}.{key}" for name, keys in inner.items() for key in keys]
