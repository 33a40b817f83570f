"""Values for every sampling parameter, and the visible part of a result."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.core.structured import Structured
from slipstream.llm import Completion

VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "temperature": (1.7, [-0.1, math.nan, math.inf, "1", True, 1e308], [0.0, 0.3, 1.0, 1.7]),
    "top_k": (2, [-1, 1.0, True, np.float64(1.0), np.True_], [0, 1, 3, 50]),
    "top_p": (0.6, [0.0, 1.01, -1, math.nan, np.float32(1.5), np.True_, np.array(0.5)], [1.0, 0.9, 0.45, 1e-9]),
    "min_p": (0.4, [-0.1, 1.1, None], [0.0, 0.05, 0.4, 1.0]),
    "repetition_penalty": (1.8, [0.0, -1, math.inf], [1.0, 1.3, 0.7]),
    "frequency_penalty": (1.5, [2.1, -2.1, math.nan], [0.0, 0.8, -1.1]),
    "presence_penalty": (1.9, [2.1, -2.1], [0.0, 1.9, -0.4]),
    "logit_bias": (
        {3: 3.0, 5: -100}, [{-1: 0.0}, {0: 101.0}, {0: math.nan}, {"0": 1.0}, {True: 1.0}, {0: True}, [(0, 1.0)], 5],
        [None, {2: 3.5, 5: -1.25}, {0: -100, 3: 100.0}],
    ),
    "bad_words": (
        ((2,), (1, 2, 3), (5, 6)), [((),), ((-1,),), ("",), "", (1, 2), 5, ((True,),), None],
        [(), ((4,),), ((1, 2), (7, 7, 5), (3, 1, 2, 6))],
    ),
    "structured": (
        Structured(regex="([a-d]|e[fg]|f[gh]|h|[i-k]b)+"), [{"regex": "a"}, "a", True, 5],
        [None, Structured(choice=[a + b for a in "bcdfh" for b in ("", "a", "c", "ee", "h")])],
    ),
    "min_tokens": (14, [-1, 1.5], [0, 2, 9]), "max_tokens": (9, [0, -1, 2.0], []),
    "stop": (("c", "fg"), ["", ("a", ""), (1,), 5], []),
    "stop_token_ids": ((1, 6, 7), [(-1,), ("a",), 5, (True,), (np.True_,), None], []),
    "ignore_eos": (True, ["no", "yes", "", 0, 1, None, np.True_], []), "seed": (8, [1.5, "a"], []),
    "logprobs": (2, [-1], []), "draft_tokens": (1, [-1], []),
}  # fmt: skip
"""For each field: a value other than the default, whose effect is visible in `test_sampling_parameters.py`; values that
are refused; and, if the field changes the distribution, values to combine with values of other fields."""

CHANGED, REFUSED, CHOICES = ({name: values[i] for name, values in VALUES.items() if values[i] != []} for i in range(3))


def visible(completion: Completion) -> tuple[object, ...]:
    """Return all parts of a completion except measured times."""
    counts = {name: count for name, count in completion.stats.as_dict().items() if "second" not in name}
    return replace(completion, stats=None), counts  # type: ignore[type-var]
