"""`SpeculativeDecoder`: a small interface for tensors of token ids, on top of `LLM`.

>>> target, draft, tokenizer = load_model_pair("path/to/target", "path/to/draft")
>>> inputs = tokenizer("def add(a, b):", return_tensors="pt")
>>> decoder = SpeculativeDecoder(target, draft, draft_tokens=4)
>>> ids = decoder.decode(**inputs, max_new_tokens=64)
>>> ids = target.generate(**inputs, max_new_tokens=64, assistant_model=draft)  # the same, in the words of transformers
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.load_settings import LoadKeywords, show_settings
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.core.target import Capabilities, Target
from slipstream.errors import ParameterError
from slipstream.integrations.custom_generation import read_prompts
from slipstream.llm import LLM, LLMKeywords
from slipstream.settings import AUTO
from slipstream.targets.describe import as_target
from slipstream.targets.pair_check import check_pair
from slipstream.tokens.text import load_tokenizer
from slipstream.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from slipstream.drafters.draft_plan import DraftArgument
    from slipstream.targets.describe import Model


class SpeculativeDecoder:
    """Decode token ids with a target and a draft model of the same vocabulary.

    target_model, draft_model  loaded transformers models of the supported families, paths or hub ids, or `Target`s.
    draft_tokens               maximum draft tokens per step (K).
    options                    further arguments of `LLM`, e.g. rule="block" or executor="torch".
    """

    def __init__(
        self,
        target_model: Model,
        draft_model: DraftArgument,
        draft_tokens: int | str = 4,
        **options: Unpack[LLMKeywords],
    ):
        self.llm = LLM(target_model, draft_model, draft_tokens=draft_tokens, **options)
        self.stats = SpecStats()

    def decode(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        pad_token_id: int | None = None,
        **sampling: Any,
    ) -> Tensor:
        """Generate: input_ids int64 [B, L] or [L] -> int64 [B, L + n]; n <= max_new_tokens is the longest output.

        attention_mask has the shape of input_ids, and is 0 where a row is padded on the left. Shorter outputs are
        padded with pad_token_id, or with their last token. sampling: fields of `SamplingParams` (default:
        temperature=0). After the call, `self.stats` holds its counters.
        """
        if input_ids.dim() not in (1, 2) or input_ids.is_floating_point():
            shape = tuple(input_ids.shape)
            raise ParameterError(f"input_ids is {input_ids.dtype} {shape}, but must be integers [B, L]")
        whole = input_ids if input_ids.dim() == 2 else input_ids[None]
        prompts = read_prompts(whole, None if attention_mask is None else attention_mask.reshape(whole.shape))
        done = self.llm.generate(prompts, SamplingParams(max_tokens=max_new_tokens, **sampling))
        self.stats = sum((completion.stats for completion in done), SpecStats())
        longest = max(len(completion.token_ids) for completion in done)
        rows = []
        for prompt, completion in zip(whole.tolist(), done, strict=True):
            output = completion.token_ids
            pad = output[-1] if pad_token_id is None else pad_token_id
            rows.append([*prompt, *output, *[pad] * (longest - len(output))])
        return torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)


class GeneratingTarget:
    """A `Target` with transformers' method `generate` and some values of its `config`, for programs that are written
    for transformers."""

    def __init__(self, target: Target):
        self.vocab_size, self.context, self.device = target.vocab_size, target.context, target.device
        self.run, self.commit, self.release = target.run, target.commit, target.release
        self._prepare_target = target
        self.config = SimpleNamespace(vocab_size=target.vocab_size, max_position_embeddings=target.context)
        self._decoders: list[tuple[DraftArgument, SpeculativeDecoder]] = []  # (draft model, decoder with it)

    @property
    def capabilities(self) -> Capabilities:
        return self._prepare_target.capabilities

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        assistant_model: DraftArgument = None,
        num_assistant_tokens: int | str = AUTO,
        do_sample: bool = False,
        **more: Any,
    ) -> Tensor:
        """Generate like `SpeculativeDecoder.decode`, with transformers' names. assistant_model: the draft model; None:
        plain decoding. do_sample: False is greedy; True samples at temperature 1 without filters, unless given."""
        decoder = next((kept for draft, kept in self._decoders if draft is assistant_model), None)
        if decoder is None:
            decoder = SpeculativeDecoder(self, assistant_model)
            self._decoders.append((assistant_model, decoder))
        if decoder.llm.draft_tokens != num_assistant_tokens:
            decoder.llm.draft_tokens = num_assistant_tokens
        more["temperature"] = more.get("temperature", 1.0) if do_sample else 0.0
        return decoder.decode(input_ids, max_new_tokens, attention_mask, **more)


@show_settings()
def load_model_pair(
    target_id: str | Path, draft_id: str | Path, **settings: Unpack[LoadKeywords]
) -> tuple[GeneratingTarget, GeneratingTarget, Tokenizer]:
    """Load a target, a draft model and their tokenizer. Raises PairError if their vocabularies differ.

    target_id, draft_id: directories, hub ids, or "embedded".
    settings: executor, dtype, device, quantize, threads, kv_dtype, as in `LLM`. Returns (target, draft, tokenizer), for
    `SpeculativeDecoder`, for `LLM(target, draft, tokenizer=tokenizer)`, or for `target.generate`, which takes
    transformers' arguments.
    """
    target, draft = Checkpoint.open(target_id), Checkpoint.open(draft_id, "draft")
    check_pair(target, draft).require()
    running, drafting = (GeneratingTarget(as_target(path, **settings)) for path in (target, draft))
    return running, drafting, load_tokenizer(target)
