"""Conversations that a chat model writes by itself."""

from pathlib import Path

import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ParameterError
from slipstream.training.packing import Stream
from slipstream.training.regenerate import RegenerateConfig, regenerate, self_prompts


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", draft_tokens=4, threads=1, max_batch=16)


def test_prompts_are_conversations_up_to_the_answer_and_repeatable(llm: LLM) -> None:
    write = self_prompts(llm)
    prompts = write(np.random.default_rng(5), 6)
    assert prompts == write(np.random.default_rng(5), 6) != write(np.random.default_rng(6), 6)
    assert len({tuple(ids) for ids in prompts}) == len(prompts) > 0
    rendered = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "X"}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = rendered.partition("X")
    for ids in prompts:
        text = llm.tokenizer.decode(ids)
        assert text.startswith(before)
        assert text.endswith(after)


def test_the_stream_holds_prompts_and_the_answers_of_the_target(llm: LLM, tmp_path: Path) -> None:
    config = RegenerateConfig(tokens=60, new_tokens=24, temperatures=(0.0,), shard=6)
    stream = Stream.open(regenerate(llm, self_prompts(llm), tmp_path / "self.bin", config), whole=True)
    for ids, mask in stream.documents():
        assert mask == sorted(mask)
        prompt = ids[: mask.index(True)]
        answer = llm.generate(prompt, SamplingParams(max_tokens=24))[0].token_ids
        assert ids[len(prompt) :] == answer


def test_a_target_without_a_chat_template_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ParameterError, match="no chat template"):
        self_prompts(LLM(tiny_target, executor="torch"))
