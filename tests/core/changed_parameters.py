"""A value other than the default for every sampling parameter, and what may depend on it."""

from dataclasses import replace
from typing import Any

from slipstream.core.structured import Structured
from slipstream.llm import Completion

CHANGED: dict[str, Any] = {
    "temperature": 1.7, "top_k": 2, "top_p": 0.6, "min_p": 0.4, "repetition_penalty": 1.8, "frequency_penalty": 1.5,
    "presence_penalty": 1.9, "logit_bias": {3: 3.0, 5: -100}, "bad_words": ((2,), (1, 2, 3), (5, 6)),
    "structured": Structured(regex="([a-d]|e[fg]|f[gh]|h|[i-k]b)+"), "min_tokens": 14, "max_tokens": 9,
    "stop": ("c", "fg"), "stop_token_ids": (1, 6, 7), "ignore_eos": True, "seed": 8, "logprobs": 2, "draft_tokens": 1,
}  # fmt: skip
"""For each field a value other than its default, whose effect shows in the tests of `test_sampling_parameters.py`."""


def visible(completion: Completion) -> tuple[object, ...]:
    """Everything but the times."""
    counts = {name: count for name, count in completion.stats.as_dict().items() if "second" not in name}
    return replace(completion, stats=None), counts  # type: ignore[type-var]
