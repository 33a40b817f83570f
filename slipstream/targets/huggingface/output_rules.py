"""What an encoder-decoder's generation configuration forces and forbids, as transformers' `generate` does.

Translation and summarisation models are trained for it: the first token of the output may be a language code, the last
one the end of the text, and some ids never occur. transformers' own processors do the work, at every draft token, with
the text that leads to it. What belongs to a request (temperature, filters, lengths) is said by `SamplingParams`. Beams
are another call (`LLM.beam_search`); a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf

from slipstream.core.sequence import Sequence
from slipstream.errors import TargetError, UnsupportedModelError

log = logging.getLogger("slipstream")

_REFUSED: dict[str, Any] = {
    "sequence_bias": None, "guidance_scale": 1, "exponential_decay_length_penalty": None, "watermarking_config": None,
    "stop_strings": None, "remove_invalid_values": False, "token_healing": False,
}  # fmt: skip
"""Fields that would change the output and are not honoured, and their values with which they do nothing."""


class OutputRules:
    """generation: the model's generation configuration; start: how many ids every text begins with; eos_ids: ids that
    end a text; device: of the logits.

    Raises UnsupportedModelError, which names the field, for what is not honoured.
    """

    def __init__(self, generation: Any, start: int, eos_ids: Seq[int], device: torch.device):
        self._config, self._start, self._eos, self._device = generation, start, list(eos_ids), device
        for name, nothing in _REFUSED.items():
            value = getattr(generation, name, None)
            if value not in (None, nothing):
                raise UnsupportedModelError(
                    f"the model's generation configuration has {name}={value!r}",
                    why="it would change the text, and is not offered",
                    fix=f"remove it from generation_config.json, or set model.generation_config.{name} = None",
                )
        beams = getattr(generation, "num_beams", None) or 1
        if beams > 1:
            log.warning(
                "the model's generation configuration asks for %d beams: LLM.generate has none, see beam_search",
                beams,
            )

    def check_beams(self) -> None:
        """Raise TargetError for a rule that changes how probable the other tokens are: transformers' beams are compared
        by their probabilities from before the rules. A token that is forced is the only one."""
        for name in (
            "encoder_repetition_penalty", "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
            "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens",
        ):  # fmt: skip
            value = getattr(self._config, name)
            if value and value != 1.0:
                raise TargetError(
                    f"beams were asked of a model whose generation configuration has {name}={value!r}",
                    why="it would be applied before beams are compared, in transformers after it",
                    fix=f"set model.generation_config.{name} = None, or decode without beams",
                )

    def of(self, seq: Sequence) -> list[Any]:
        """The processors of one text, in transformers' order; empty where nothing is forced or forbidden.

        A text that must have a form, or may not end yet, is not ended by force at its limit. Raises TargetError if its
        first token is forced and it must have a form."""
        asked, eos, device = self._config, self._eos, self._device
        source: Any = torch.tensor([list(seq.source)], device=device)  # [1, S]
        rules: list[Any] = []
        if (asked.encoder_repetition_penalty or 1.0) != 1.0:
            rules.append(hf.EncoderRepetitionPenaltyLogitsProcessor(asked.encoder_repetition_penalty, source))
        if (asked.repetition_penalty or 1.0) != 1.0:
            rules.append(hf.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty))
        if asked.no_repeat_ngram_size:
            rules.append(hf.NoRepeatNGramLogitsProcessor(asked.no_repeat_ngram_size))
        if asked.encoder_no_repeat_ngram_size:
            rules.append(hf.EncoderNoRepeatNGramLogitsProcessor(asked.encoder_no_repeat_ngram_size, source))
        if asked.bad_words_ids:
            rules.append(hf.NoBadWordsLogitsProcessor(asked.bad_words_ids, eos or None))
        if asked.min_length and eos:
            rules.append(hf.MinLengthLogitsProcessor(asked.min_length, eos, device=str(device)))
        if asked.min_new_tokens and eos:
            least = asked.min_new_tokens
            rules.append(hf.MinNewTokensLengthLogitsProcessor(self._start, least, eos, device=str(device)))
        if asked.forced_bos_token_id is not None and self._start == 1:
            if seq.constraint is not None:
                raise TargetError(
                    f"the model's generation configuration forces the first token ({asked.forced_bos_token_id}), the "
                    "request asks for a structured output",
                    why="the form does not allow that token",
                    fix="leave `structured` out, or set forced_bos_token_id to None",
                )
            rules.append(hf.ForcedBOSTokenLogitsProcessor(asked.forced_bos_token_id))
        free = seq.constraint is None and seq.prompt + seq.params.min_tokens < seq.limit
        if asked.forced_eos_token_id is not None and free:
            rules.append(hf.ForcedEOSTokenLogitsProcessor(seq.limit, asked.forced_eos_token_id, device=str(device)))
        if asked.suppress_tokens:
            rules.append(hf.SuppressTokensLogitsProcessor(asked.suppress_tokens, device=str(device)))
        if asked.begin_suppress_tokens:
            forced = self._start == 1 and asked.forced_bos_token_id is not None
            ids, first = asked.begin_suppress_tokens, self._start + forced
            rules.append(hf.SuppressTokensAtBeginLogitsProcessor(ids, first, device=str(device)))
        return rules


def ruled(processors: Seq[Any], histories: Seq[Seq[int]], logits: Tensor) -> Tensor:
    """Logits [n, V], each after a text of its own (`histories`), as the processors leave them."""
    rows = []
    for i, text in enumerate(histories):
        ids, scores = torch.tensor([list(text)], device=logits.device), logits[i : i + 1]
        for one in processors:
            scores = one(ids, scores)
        rows.append(scores)
    return torch.cat(rows).to(logits.dtype)
