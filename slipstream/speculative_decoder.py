"""`SpeculativeDecoder`: a small interface for tensors of token ids, on top of `LLM`.

>>> target, draft, tokenizer = load_model_pair("path/to/target", "path/to/draft")
>>> decoder = SpeculativeDecoder(target, draft, draft_tokens=4)
>>> ids = decoder.decode(tokenizer("def add(a, b):", return_tensors="pt").input_ids, max_new_tokens=64)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.models.pair_check import require_pair
from slipstream.models.text import load_tokenizer
from slipstream.targets.sources import as_target
from slipstream.zoo import checkpoint_of


class SpeculativeDecoder:
    """Decode token ids with a target and a draft model of the same vocabulary.

    target_model, draft_model  loaded transformers models of the supported families, paths or hub ids, or `Target`s.
    draft_tokens               maximum draft tokens per step (K).
    options                    further arguments of `LLM`, e.g. rule="block" or executor="torch".
    """

    def __init__(self, target_model: Any, draft_model: Any, draft_tokens: int = 4, **options: Any):
        self.llm = LLM(target_model, draft_model, draft_tokens=draft_tokens, **options)
        self.stats = SpecStats()

    def decode(self, input_ids: Tensor, max_new_tokens: int, **sampling: Any) -> Tensor:
        """Generate: input_ids int64 [B, L] or [L] -> int64 [B, L + n], n <= max_new_tokens: the batch's longest output.

        Shorter rows are padded with their last token. `sampling`: fields of `SamplingParams`
        (default: temperature=0). `self.stats` then holds the counters of this call.
        """
        if input_ids.dim() not in (1, 2) or input_ids.is_floating_point():
            shape = tuple(input_ids.shape)
            raise ParameterError(f"input_ids are {input_ids.dtype} {shape}, expected integers [B, L]")
        prompts = (input_ids if input_ids.dim() == 2 else input_ids[None]).tolist()
        done = self.llm.generate(prompts, SamplingParams(max_tokens=max_new_tokens, **sampling))
        self.stats = sum((completion.stats for completion in done), SpecStats())
        longest = max(len(completion.token_ids) for completion in done)
        rows = []
        for prompt, completion in zip(prompts, done, strict=True):
            output = completion.token_ids
            rows.append([*prompt, *output, *[output[-1]] * (longest - len(output))])
        return torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)


def load_model_pair(target_id: str | Path, draft_id: str | Path, **load: Any) -> tuple[Any, Any, Any]:
    """Load a target, a draft model and their tokenizer. Raises PairError if their vocabularies differ.

    target_id, draft_id: directories, hub ids, or "embedded".
    `load`: executor, dtype, device, quantize, threads, kv_dtype, as in `LLM`. Returns (target, draft, tokenizer), for
    `SpeculativeDecoder` or `LLM(target, draft, tokenizer=tokenizer)`.
    """
    target, draft = checkpoint_of(target_id, "target"), checkpoint_of(draft_id, "draft")
    require_pair(target, draft)
    return as_target(target, **load), as_target(draft, **load), load_tokenizer(target)
