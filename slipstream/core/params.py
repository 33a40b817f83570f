"""`SamplingParams`: what a request may ask for. Every field is honoured by every drafter and rule, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from slipstream.errors import ParameterError, did_you_mean


class Strict:
    """Mixin for configuration dataclasses: an unknown keyword is a `ParameterError` that says what was meant."""

    def __new__(cls, *args: Any, **kwargs: Any):
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                raise ParameterError(
                    f"{cls.__name__} has no parameter {name!r}",
                    why="a parameter that is silently dropped would change the output unnoticed",
                    fix=did_you_mean(name, known),
                )
        return super().__new__(cls)


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ParameterError unless `value` is a finite number in [low, high], or (low, high] if `open_low`."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < low or value > high or (open_low and value == low):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ParameterError(
            f"{name} is {value!r}, must be a finite number in {interval}", fix=f"choose {name} in {interval}"
        )


def check_integer(name: str, value: Any, low: int) -> None:
    """Raise ParameterError unless `value` is an integer and at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ParameterError(f"{name} is {value!r}, must be an integer >= {low}", fix=f"choose {name} >= {low}")


@dataclass(frozen=True)
class SamplingParams(Strict):
    """How to turn the target's logits into text.

    temperature         0 is greedy: the first maximum. Default 0.
    top_k               keep the k most likely tokens; 0 keeps all.
    top_p               keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
    min_p               drop tokens less likely than min_p times the most likely one, in [0, 1].
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output (> 0; CTRL, 2019).
    frequency_penalty   subtracted from a logit once per occurrence in the output, in [-2, 2].
    presence_penalty    subtracted from a logit once if the token is in the output, in [-2, 2].
    logit_bias          token id -> value added to its logit, in [-100, 100]; -100 forbids.
    bad_words           token id sequences that may not be completed (strings are encoded by `LLM`).
    min_tokens          no stop id can be sampled before so many output tokens.
    max_tokens          most output tokens (>= 1).
    stop                strings that end the text; the text is cut before them.
    stop_token_ids      ids that end the text, beside the model's EOS.
    ignore_eos          the model's EOS does not end the text.
    seed                any integer makes the request reproducible; None draws one from the operating system.
    logprobs            None, or the number of alternatives to report with each token's log-probability.
    draft_tokens        most guesses a step for this request, 0 turns speculation off; None leaves it to the engine.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Seq[Seq[int] | str] = ()
    min_tokens: int = 0
    max_tokens: int = 128
    stop: Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_integer("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_integer("min_tokens", self.min_tokens, 0)
        check_integer("max_tokens", self.max_tokens, 1)
        for name in ("seed", "logprobs", "draft_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, -(2**63) if name == "seed" else 0)
        for token, bias in (self.logit_bias or {}).items():
            check_integer("logit_bias key", token, 0)
            check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ParameterError("stop holds an empty string", fix="remove it: it would end every text at once")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0)
        for word in self.bad_words:
            if not word:
                raise ParameterError("bad_words holds an empty sequence", fix="remove it")
            for token in () if isinstance(word, str) else word:
                check_integer("bad_words", token, 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def law(self) -> tuple[object, ...]:
        """Everything that `warp` reads where it does not look at the history: equal for requests whose laws are made
        alike, however their seeds, lengths and stops may differ."""
        bias = tuple(sorted((self.logit_bias or {}).items()))
        return (self.temperature, self.top_k, self.top_p, self.min_p, bias, self.needs_history)

    @property
    def argmax_only(self) -> bool:
        """True if the law is the argmax of the bare logits: greedy, and nothing edits a logit."""
        return self.greedy and not self.logit_bias and not self.needs_history

    @property
    def temperature_only(self) -> bool:
        """True if the distribution is the softmax of the bare logits over the temperature, or their argmax."""
        edited = self.logit_bias or self.needs_history
        return self.argmax_only or not (edited or self.top_k or self.top_p < 1 or self.min_p)

    @property
    def needs_history(self) -> bool:
        """True if the law at a node depends on which tokens came before it (beyond the model itself)."""
        return bool(
            self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.bad_words
            or self.min_tokens
        )
