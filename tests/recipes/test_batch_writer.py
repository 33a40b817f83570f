"""The writer of training text says what the target says, whatever slots and prompts are beside each other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.smollm2.batch_writer import Ask, BatchWriter
from slipstream import LLM, SamplingParams
from slipstream.core.warp import warp
from slipstream.targets.decoder import Decoder
from slipstream.training.features import FINAL, Teacher
from tests.significance import assert_distribution

PROMPTS = [[7, 9, 11], list(range(5, 45)), [3] * 17, [40, 5], list(range(9, 42))]


@pytest.fixture
def decoder(checkpoint: Callable[[str], Path]) -> Decoder:
    return Decoder.load(checkpoint("llama"), "torch", dtype="float32")


def writer(decoder: Decoder, slots: int) -> BatchWriter:
    return BatchWriter(decoder.config, decoder.weights, slots, 96, "cpu", torch.float32)


def test_greedy_answers_are_those_of_the_target_in_fewer_slots_than_prompts(decoder: Decoder) -> None:
    lengths = [20, 30, 9, 1, 24]
    asks = [Ask(prompt, 0.0, count) for prompt, count in zip(PROMPTS, lengths, strict=True)]
    answers = dict(writer(decoder, 2).write(asks, every=7))
    params = [SamplingParams(max_tokens=count) for count in lengths]
    assert [answers[i] for i in range(len(asks))] == [c.token_ids for c in LLM(decoder).generate(PROMPTS, params)]


def test_sampled_tokens_have_the_warped_distribution(decoder: Decoder) -> None:
    """By a G-test of 4,000 first tokens."""
    asks = [Ask(PROMPTS[0], 0.8, 1, min_p=0.05)] * 4000
    tokens = [answer[0] for _, answer in writer(decoder, 500).write(asks, every=1)]
    teacher = Teacher(decoder)
    final = teacher.read(torch.tensor([PROMPTS[0]]), (FINAL,))[FINAL][0, -1:]
    probs = warp(teacher.logits(final), SamplingParams(temperature=0.8, min_p=0.05))[0].tolist()
    assert_distribution(tokens, {i: p for i, p in enumerate(probs) if p})
