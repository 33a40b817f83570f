"""User turns that a chat model writes itself, for training text without data (Magpie, 2406.08464, section 2): the model
continues its chat template where a user's message belongs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.bench.loops import periodic_tail
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.training.regenerate import Prompts

MARK = "\ue000the user's message\ue000"
TURN = SamplingParams(temperature=1.0, min_p=0.03, max_tokens=160)
SHORTEST = 12
"""Characters of a message; shorter ones say too little."""
ROUNDS = 8


def self_prompts(llm: LLM) -> Prompts:
    """A source of prompts for `regenerate`: conversations up to the start of the answer. Messages that do not end, that
    loop or that repeat another are left out.

    Raises ParameterError for a target without a chat template."""
    tokenizer = llm.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError(
            "the target has no chat template",
            why="it is not known where a user's message begins",
            fix="give --data, and --regenerate for text of the target",
        )
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = rendered.partition(MARK)
    start, end = (ids_of(tokenizer, text) for text in (before, after))

    def write(rng: np.random.Generator, count: int) -> list[list[int]]:
        made, seen = list[list[int]](), set[str]()
        for _ in range(ROUNDS):
            if len(made) >= count:
                break
            params = [replace(TURN, seed=int(rng.integers(2**31))) for _ in range(count - len(made))]
            for turn in llm.generate([start] * len(params), params):
                ids = [token for token in turn.token_ids if token not in llm.target.capabilities.eos_ids]
                text = turn.text.strip()
                if turn.finish_reason != "stop" or len(text) < SHORTEST or periodic_tail(ids) or text in seen:
                    continue
                seen.add(text)
                made.append([*start, *ids, *end])
        return made

    return write


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Ids of a part of a rendered template."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]
