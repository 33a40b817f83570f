"""Forces and forbids tokens as an encoder-decoder's generation configuration asks, like transformers' `generate`.

Translation and summarisation models are trained for such rules: the first token of the output may be a language code,
the last the end of the text, and some ids never occur. transformers' own processors apply them, at every draft token,
with the text that leads to this token. `SamplingParams` gives the parameters of a request (temperature, filters,
lengths). Beams need another call (`LLM.beam_search`); a warning says so.
"""

import copy
import logging
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import LogitsProcessor

from slipstream.core.sequence import Sequence, source_of
from slipstream.errors import TargetError, UnsupportedModelError

log = logging.getLogger("slipstream")

_REFUSED: dict[str, object] = {
    "sequence_bias": None, "guidance_scale": 1, "exponential_decay_length_penalty": None, "watermarking_config": None,
    "stop_strings": None, "remove_invalid_values": False, "token_healing": False,
}  # fmt: skip
"""Fields that are not supported, each with its neutral value. Any other value is refused."""


class OutputRules:
    """Forces and forbids tokens. module: a transformers model; start: number of ids that every text begins with;
    eos_ids: ids that end a text; device: device of the logits.

    Raises UnsupportedModelError, which names the field, for a field that is not supported."""

    def __init__(self, module: Any, start: int, eos_ids: Seq[int], device: torch.device):
        self._module, self._start, self._device = module, start, device
        self._eos = torch.tensor(list(eos_ids), device=device) if eos_ids else None
        generation = module.generation_config
        for name, nothing in _REFUSED.items():
            value = getattr(generation, name, None)
            if value not in (None, nothing):
                raise UnsupportedModelError(
                    f"the model's generation configuration has {name}={value!r}",
                    why="this setting would change the text, and Slipstream does not support it",
                    fix=f"remove it from generation_config.json, or set model.generation_config.{name} = None",
                )
        beams = getattr(generation, "num_beams", None) or 1
        if beams > 1:
            log.warning(f"num_beams={beams} of the generation configuration is ignored: use LLM.beam_search")

    def check_beams(self) -> None:
        """Raise TargetError for a rule that changes the other tokens' probabilities: transformers compares beams by the
        probabilities before such rules. (Rules that force a token leave no other token, so they are allowed.)"""
        for name in (
            "encoder_repetition_penalty", "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
            "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens",
        ):  # fmt: skip
            value = getattr(self._module.generation_config, name)
            if value and value != 1.0:
                raise TargetError(
                    f"beam search does not work with {name}={value!r} in the model's generation configuration",
                    why="Slipstream would apply it before beams are compared, transformers applies it afterwards",
                    fix=f"set model.generation_config.{name} = None, or generate without beam search",
                )

    def of(self, seq: Sequence) -> list[LogitsProcessor]:
        """Return the logits processors of one text, in transformers' order; [] if no token is forced or forbidden.

        The end of text is not forced at the length limit if the text has structured output, or must not end yet. Raises
        TargetError if the first token is forced, but the text has structured output."""
        asked = copy.copy(self._module.generation_config)
        if asked.forced_bos_token_id is not None and self._start == 1 and seq.constraint is not None:
            raise TargetError(
                f"the model's generation configuration forces the first token ({asked.forced_bos_token_id}), but the "
                "request has structured output",
                why="the structured output does not allow that token",
                fix="leave `structured` out, or set forced_bos_token_id to None",
            )
        asked.do_sample = asked.renormalize_logits = False
        asked.max_length, asked._eos_token_tensor = seq.limit, self._eos
        if seq.constraint is not None or seq.prompt + seq.params.min_tokens >= seq.limit:
            asked.forced_eos_token_id = None
        source = torch.tensor([list(source_of(seq))], device=self._device)  # [1, S]
        return list(self._module._get_logits_processor(asked, self._start, source, device=str(self._device)))
