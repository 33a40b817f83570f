"""`custom_generate`: speculative decoding in `model.generate` of transformers.

>>> fast = slipstream.custom_generate(draft="path/to/draft")
>>> model.generate(**inputs, max_new_tokens=64, custom_generate=fast)

transformers prepares the call as always (configuration, logits processors, stopping criteria), and leaves the loop to
us. The logits processors become `SamplingParams`; the result is like `generate`'s. Errors name unsupported arguments.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence as Seq
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.core.strict import JsonObject
from slipstream.core.target import Target
from slipstream.drafters.registry import DRAFTERS
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.engine import MOST_ROWS, Engine
from slipstream.errors import ParameterError
from slipstream.heads.recognition import recognise
from slipstream.llm import LLM
from slipstream.settings import AUTO, TRANSFORMERS
from slipstream.targets.describe import as_target

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig, PreTrainedModel
    from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteria
    from transformers.generation.streamers import BaseStreamer

    from slipstream.drafters.draft_plan import DraftArgument

_log = logging.getLogger("slipstream")

_READ = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "num_logits_to_keep"}
"""Arguments from transformers that add no information: prompts are read from ids and mask. An empty cache adds none
either; its argument has several names, so it is recognised by its class."""

_NOT_OFFERED = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "dola_layers": None, "prompt_lookup_num_tokens": None,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "output_logits": False,
    "token_healing": False,
}  # fmt: skip
"""Unsupported fields of the generation configuration, each with its neutral value."""

_FILTERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p",
            "MinPLogitsWarper": "min_p"}  # fmt: skip
"""Logits processors of transformers -> the attribute that is our sampling parameter of the same name."""


class custom_generate:
    """The argument of `model.generate(..., custom_generate=...)`. Keep the object: it prepares each model only once.

    draft, draft_tokens, rule, draft_options  as in `LLM`. If draft_tokens is "auto", later calls use what earlier calls
    learned; if it is a number, `torch.manual_seed` repeats a sampled text under every rule.
    executor  "transformers" runs the model itself, whose weights may change between calls. "auto" copies the weights of
              an architecture that our own decoder runs, which is faster on a CPU.
    streamer  a streamer of transformers (`put` and `end`), for one text at a time: `generate` does not pass on the
              streamer that it is given.

    stats     statistics of each text of the last call.

    Raises ParameterError for unknown names and options."""

    def __init__(
        self,
        draft: DraftArgument = None,
        *,
        draft_tokens: int | str | DraftLengths = AUTO,
        rule: str = "rejection",
        draft_options: Mapping[str, object] | None = None,
        executor: str = TRANSFORMERS,
        streamer: BaseStreamer | None = None,
    ):
        self.draft, self.draft_tokens, self.rule, self.options = draft, draft_tokens, rule, dict(draft_options or {})
        self.executor, self.streamer = executor, streamer
        self.stats: list[SpecStats] = []
        self._prepared: tuple[PreTrainedModel, tuple[torch.device, torch.dtype], Target] | None = None
        """(model, its device and dtype, the target around it); None before the first call."""
        self._draft_model: Target | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Seq[Any],
        stopping_criteria: Seq[StoppingCriteria],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate; called by transformers. Returns ids [B, L], or `GenerateDecoderOnlyOutput` if
        `return_dict_in_generate`.

        Raises ParameterError, which names the argument, for unsupported arguments, and the errors of `LLM`."""
        _refuse(model, input_ids, generation_config, model_kwargs, self.streamer)
        prompts = read_prompts(input_ids, model_kwargs.get("attention_mask"))
        target = self._prepare_target(model)
        criteria, eos = _split_criteria(stopping_criteria)
        room = generation_config.max_length - input_ids.shape[1]
        params = SamplingParams(
            max_tokens=max(1, room),
            ignore_eos=True,
            stop_token_ids=[token for token in eos or () if 0 <= token < target.vocab_size],  # -1: no token
            **read_sampling(logits_processor, generation_config.do_sample, input_ids.shape[1], target.vocab_size),
        )
        llm = LLM(
            target,
            self._prepare_draft(),
            draft_tokens=self.draft_tokens,
            rule=self.rule,
            max_batch=len(prompts),
            draft_options=self.options,
        )
        if isinstance(llm.lengths, DraftLengths):
            self.draft_tokens = llm.lengths
        seeds = torch.randint(2**62, (len(prompts),)).tolist()  # depends on torch.manual_seed
        seqs = [llm.sequence(ids, replace(params, seed=seed)) for ids, seed in zip(prompts, seeds, strict=True)]
        outputs = self._decode(llm, seqs, input_ids, criteria, together=eos is None)
        if any(seq.finish == "length" and len(seq.output) < room for seq in seqs):
            _log.warning("a text ends at the context of %d tokens; transformers would continue", target.context)
        self.stats = [seq.stats for seq in seqs]
        return _make_result(input_ids, outputs, generation_config)

    def _prepare_target(self, model: PreTrainedModel) -> Target:
        """Return the target around a model; it is rebuilt after the model was moved to another device or dtype."""
        first = next(model.parameters())
        state = (first.device, first.dtype)
        if self._prepared is None or self._prepared[0] is not model or self._prepared[1] != state:
            self._prepared = model, state, as_target(model, executor=self.executor)
        return self._prepared[2]

    def _prepare_draft(self) -> DraftArgument:
        """Return the argument `draft` of `LLM`. A draft model is loaded once."""
        draft = self.draft
        if not isinstance(draft, (str, Path, Checkpoint, Target, torch.nn.Module)) or isinstance(draft, Drafter):
            return draft
        if isinstance(draft, str) and draft in DRAFTERS:
            return draft
        if self._draft_model is None:
            if isinstance(draft, (str, Path, Checkpoint)):
                draft = Checkpoint.open(draft, "draft")
                if recognise(draft) is not None:
                    return self.draft  # a draft head
            self._draft_model = as_target(draft)
        return self._draft_model

    def _decode(
        self, llm: LLM, seqs: list[Sequence], input_ids: Tensor, criteria: Seq[StoppingCriteria], together: bool
    ) -> list[list[int]]:
        """Return the output of each text, up to the token at which a stopping criterion holds. together: cut all
        outputs at the token at which a criterion has held for every text, as transformers does if there are no end
        tokens."""
        engine = Engine(llm.target, llm.drafter, llm.rule, llm.lengths, len(seqs), prompt_rows=MOST_ROWS)
        shown = [0] * len(seqs)
        lengths: dict[int, int] = {}  # index of text -> its length when a criterion first held
        cut: dict[int, int] = {}  # index of text -> its final length
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        with closing(engine.decode(seqs)) as steps:  # a streamer may raise
            for _ in steps:
                for b, seq in enumerate(seqs):
                    while shown[b] < len(seq.output) and b not in lengths:
                        shown[b] += 1
                        if self.streamer is not None:
                            self.streamer.put(torch.tensor(seq.output[shown[b] - 1 : shown[b]]))
                        if _has_ended(criteria, input_ids[b], seq.output[: shown[b]]):
                            lengths[b] = shown[b]
                if not together or len(lengths) == len(seqs):
                    cut = {b: max(lengths.values()) if together else end for b, end in lengths.items()}
                for b, end in cut.items():
                    if len(seqs[b].output) >= end:
                        engine.abort(seqs[b])
        if self.streamer is not None:
            self.streamer.end()
        return [seq.output[: cut.get(b)] for b, seq in enumerate(seqs)]


def _refuse(
    model: PreTrainedModel,
    input_ids: Tensor,
    config: GenerationConfig,
    given: Mapping[str, object],
    streamer: BaseStreamer | None,
) -> None:
    """Raise ParameterError for arguments that `custom_generate` does not support."""
    from transformers import Cache

    if model.config.is_encoder_decoder:
        raise _explain_refusal(
            f"a {type(model).__name__}",
            "transformers passes only the encoded source, but drafters need its tokens",
            "call LLM(model, draft=...).generate(sources)",
        )
    if _find_streamer() is not None:
        raise _explain_refusal(
            "streamer", "model.generate does not pass its streamer on", "call custom_generate(..., streamer=streamer)"
        )
    for name, nothing in _NOT_OFFERED.items():
        value = getattr(config, name, nothing)
        if value not in (nothing, None):
            raise _explain_refusal(
                f"{name}={value!r}",
                "speculative decoding does not support it",
                "leave it out, or generate without custom_generate",
            )
    for name, value in given.items():
        if isinstance(value, Cache):
            if _count_cached(value):
                why = "Slipstream uses its own KV cache"
                raise _explain_refusal(f"{name} of an earlier call", why, "leave it out: the prompt is prefilled again")
        elif name not in _READ and value is not None:
            raise _explain_refusal(f"the model input {name!r}", "only ids and attention_mask are used", "leave it out")
    if streamer is not None and len(input_ids) > 1:
        raise _explain_refusal(
            f"a streamer for {len(input_ids)} texts", "a streamer accepts only one text", "stream one text at a time"
        )
    if not input_ids.shape[1]:
        raise _explain_refusal("an empty prompt", "a model needs at least one token", "give at least one token")


def _explain_refusal(what: str, why: str, fix: str) -> ParameterError:
    return ParameterError(f"{what} is not supported by custom_generate", why=why, fix=fix)


def _count_cached(cache: Cache) -> int:
    """Return the tokens in a cache of transformers. For a recurrent cache, only 0 (no state) or 1 is known."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return int(bool(cache.has_previous_state()))


def _find_streamer() -> object:
    """Return the streamer given to `generate`, from its frame. It is not passed on, so it would be ignored silently."""
    frame: Any = sys._getframe(1)
    for _ in range(6):  # skips the frames of this module and of torch's decorator
        if frame is None:
            return None
        if frame.f_code.co_name == "generate" and "streamer" in frame.f_locals:
            return frame.f_locals["streamer"]
        frame = frame.f_back
    return None


def read_prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the prompts without their padding on the left. Raises ParameterError for other masks."""
    if mask is None:
        return [list(row) for row in input_ids.tolist()]
    prompts = []
    for b, (row, seen) in enumerate(zip(input_ids.tolist(), mask.tolist(), strict=True)):
        first = seen.index(1) if 1 in seen else len(seen)
        if first == len(seen) or 0 in seen[first:]:
            raise ParameterError(
                f"attention_mask of text {b} masks tokens that are not padding on the left",
                why="the tokens of a prompt must follow each other without gaps",
                fix="pad on the left: tokenizer.padding_side = 'left'",
            )
        prompts.append(row[first:])
    return prompts


def _split_criteria(given: Seq[StoppingCriteria]) -> tuple[list[StoppingCriteria], list[int] | None]:
    """Return (criteria to check after each token, ids that end a text or None). The length limit is not among them."""
    from transformers import MaxLengthCriteria
    from transformers.generation import EosTokenCriteria

    eos: list[int] | None = None
    rest = []
    for one in given:
        if isinstance(one, EosTokenCriteria):
            eos = [*(eos or ()), *one.eos_token_id.flatten().tolist()]
        elif not isinstance(one, MaxLengthCriteria):
            rest.append(one)
    return rest, eos


def read_sampling(processors: Seq[Any], sampled: bool, read: int, vocab_size: int) -> JsonObject:
    """Return sampling parameters with the effect of transformers' logits processors. sampled: whether tokens are drawn;
    read: number of prompt ids, including padding. The repetition penalty counts the text's tokens, without padding.

    Raises ParameterError, which names the processor, for a processor that no parameter can express."""
    fields: JsonObject = {"temperature": float(sampled), "repetition_penalty": 1.0}
    biases: dict[int, float] = {}
    for one in processors:
        name = type(one).__name__ if type(one).__module__.startswith("transformers.") else ""
        if name in _FILTERS:
            if sampled:
                fields[_FILTERS[name]] = getattr(one, _FILTERS[name])
        elif name == "RepetitionPenaltyLogitsProcessor" and not one.prompt_ignore_length:
            fields["repetition_penalty"] = one.penalty
        elif name == "MinNewTokensLengthLogitsProcessor":
            fields["min_tokens"] = max(fields.get("min_tokens", 0), one.min_new_tokens)
        elif name == "MinLengthLogitsProcessor":
            fields["min_tokens"] = max(fields.get("min_tokens", 0), one.min_length - read)
        elif name == "NoBadWordsLogitsProcessor":
            fields["bad_words"] = list(one.sequence_bias)
        elif name == "SuppressTokensLogitsProcessor":
            biases |= {token: -100.0 for token in one.suppress_tokens.tolist() if 0 <= token < vocab_size}
        elif name == "SequenceBiasLogitsProcessor" and all(len(ids) == 1 for ids in one.sequence_bias):
            biases = {ids[0]: bias for ids, bias in one.sequence_bias.items()} | biases
        elif name != "LogitNormalization":  # normalisation changes no distribution
            what = f"the logits processor {type(one).__name__}"
            why = "no sampling parameter of Slipstream has the same effect"
            raise _explain_refusal(what, why, "leave it out, or generate without custom_generate")
    return fields | {"logit_bias": biases or None}


def _has_ended(criteria: Seq[StoppingCriteria], prompt: Tensor, output: Seq[int]) -> bool:
    if not criteria:
        return False
    ids = torch.cat((prompt, torch.tensor(list(output), device=prompt.device)))[None]  # [1, L]
    return any(bool(torch.as_tensor(one(ids, None)).any()) for one in criteria)


def _make_result(
    input_ids: Tensor, outputs: Seq[Seq[int]], config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Make the result of `generate`: texts of the same length, padded on the right."""
    longest = max(map(len, outputs))
    pad = config._pad_token_tensor
    if pad is None and any(len(output) < longest for output in outputs):
        raise ParameterError("texts end at different lengths, but pad_token_id is not set", fix="give pad_token_id")
    fill = 0 if pad is None else int(pad)
    rows = [[*output, *[fill] * (longest - len(output))] for output in outputs]
    ids = torch.cat((input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)), 1)
    if not config.return_dict_in_generate:
        return ids
    from transformers.generation import GenerateDecoderOnlyOutput

    result: Any = GenerateDecoderOnlyOutput
    return result(sequences=ids)
