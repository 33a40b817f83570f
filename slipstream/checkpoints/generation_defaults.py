"""`GenerationDefaults`: the defaults of requests, from a checkpoint's generation_config.json.

Penalties and forbidden ids belong to the model: without them its greedy text differs from transformers' `generate`.
They apply to every request that does not set them. For encoder-decoders the target applies them, see
`targets.huggingface.output_rules`. Sampling settings (temperature, top-p, ...) apply only to chats and servers, as in
vLLM. This module does not import torch.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.checkpoints.checkpoint import GENERATION, Checkpoint
from slipstream.checkpoints.gguf_keys import sampling_of
from slipstream.core.params import SamplingParams, Strict
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ParameterError
from slipstream.settings import OFF
from slipstream.zoo import find_sampling

log = logging.getLogger("slipstream")

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_KNOWN = re.compile(
    "_.*|assistant_.*|bad_words_ids|(bos|eos|pad|decoder_start)_token_id|.*cache.*|compile_config|continuous_.*|"
    "disable_compile|diversity_penalty|do_sample|early_stopping|encoder_no_repeat_ngram_size|is_assistant|"
    "length_penalty|low_memory|max_(length|new_tokens|matching_ngram_size)|min_new_tokens|num_(assistant_.*|"
    "return_sequences)|output_.*|prefill_chunk_size|prompt_lookup_.*|remove_invalid_values|renormalize_logits|"
    "repetition_penalty|return_dict_in_generate|speculation_type|suppress_tokens|target_lookbehind|"
    "transformers_version|use_mtp|" + "|".join(SAMPLING)
)
"""Settings that are supported, that requests set, or that do not change the output of a decoder without beam search."""
_ONE = ("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams", "typical_p")
"""Unsupported settings that have no effect if their value is 1; others have none if null, zero or empty."""


@dataclass(frozen=True)
class GenerationDefaults(Strict):
    """repetition_penalty, bad_words, min_tokens  as in `SamplingParams`, for requests that do not set them.
    suppressed  ids that are never generated, unless a request's `logit_bias` names them.
    sampling    defaults of `SamplingParams` for chats and servers.
    """

    repetition_penalty: float | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    sampling: JsonMapping = field(default_factory=dict)

    @staticmethod
    def of(settings: JsonMapping, encoder_decoder: bool = False) -> GenerationDefaults:
        """Read a parsed generation_config.json, or `to_dict()` of a loaded model's generation configuration. Logs a
        warning about unsupported and unknown settings, and about sampling settings out of range, which files of models
        that do not sample have. Raises ParameterError for a value of a wrong type, or a penalty out of range."""
        given = {name: settings[name] for name in SAMPLING if settings.get(name) is not None}
        try:
            sampling = {name: value for name, value in given.items() if not _out_of_range(name, value)}
            if encoder_decoder:
                return GenerationDefaults(sampling=sampling)
            eos = settings.get("eos_token_id")
            ends = [(one,) for one in (eos if isinstance(eos, (list, tuple)) else [eos])]
            # transformers never forbids end-of-text tokens.
            words = [word for word in map(tuple, settings.get("bad_words_ids") or ()) if word not in ends]
            penalty, least = settings.get("repetition_penalty"), settings.get("min_new_tokens") or 0
            suppressed = tuple(token for token in settings.get("suppress_tokens") or () if token != -1)  # -1: none
            defaults = GenerationDefaults(penalty, tuple(words), least, suppressed, sampling)
            defaults.fill(SamplingParams())
        except Exception as fault:  # the file may contain anything
            raise ParameterError(
                f"the checkpoint's {GENERATION} cannot be used: {fault}",
                fix=f'correct the file, or give generation_config="{OFF}", which ignores it',
            ) from fault
        ignored = [name for name in given if name not in sampling]
        ignored += [
            name
            for name, value in settings.items()
            if value and not (value == 1 and name in _ONE) and not _KNOWN.fullmatch(name)
        ]
        if ignored:
            log.warning(
                f"{GENERATION} of the checkpoint has {', '.join(f'{name}={settings[name]!r}' for name in ignored)}, "
                "which Slipstream ignores: texts may differ from those of transformers"
            )
        return defaults

    def fill(self, params: SamplingParams) -> SamplingParams:
        """Return a request's parameters, with these defaults for parameters that it does not set. Requests that only
        score their prompt are not changed."""
        if params.structured is not None and params.structured.tokens is not None:
            return params
        more: JsonObject = {}
        if self.repetition_penalty is not None and params.repetition_penalty is None:
            more["repetition_penalty"] = self.repetition_penalty
        if self.bad_words and not set(self.bad_words) <= set(params.bad_words):
            more["bad_words"] = (*params.bad_words, *self.bad_words)
        if self.min_tokens and not params.min_tokens:
            more["min_tokens"] = min(self.min_tokens, params.max_tokens)
        if set(self.suppressed) - set(params.logit_bias or ()):
            more["logit_bias"] = dict.fromkeys(self.suppressed, -100.0) | dict(params.logit_bias or {})
        return replace(params, **more) if more else params

    @property
    def rules(self) -> list[str]:
        """Names of the settings that apply to every request."""
        named = {"repetition_penalty": self.repetition_penalty not in (None, 1.0), "bad_words_ids": self.bad_words,
                 "min_new_tokens": self.min_tokens, "suppress_tokens": self.suppressed}  # fmt: skip
        return [name for name, value in named.items() if value]


def _out_of_range(name: str, value: Any) -> bool:
    """Return True for a number that `SamplingParams` refuses. Raises ParameterError for values of a wrong type."""
    try:
        SamplingParams(**{name: value})
    except ParameterError:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise
        return True
    return False


def describe_sampling(sampling: JsonMapping) -> str:
    """Return one line for users about `GenerationDefaults.sampling`."""
    values = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    return f"the model's own sampling: {values} (--generation-config none: greedy)"


def generation_defaults(
    choice: str, module: object, checkpoint: Checkpoint | None, encoder_decoder: bool
) -> GenerationDefaults:
    """Read the defaults of requests. choice: `LLM`'s argument `generation_config`, "auto" (read the target's file) or
    "none". checkpoint: the target's; None: `module` is a loaded target. Raises ParameterError and ConfigError."""
    if choice == OFF:
        return GenerationDefaults()
    if checkpoint is None:
        generation = getattr(module, "generation_config", None)
        settings = {} if generation is None else generation.to_dict()
    else:
        settings = sampling_of(checkpoint.header.metadata) if checkpoint.is_gguf else checkpoint.json(GENERATION)
        settings = {**find_sampling(checkpoint.source), **settings}
    return GenerationDefaults.of(settings, encoder_decoder)
