"""`LLM.log_likelihoods`: those of a direct forward, whatever shares it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.engine import log_likelihoods
from slipstream.engine.log_likelihoods import score
from slipstream.engine.scored import Scored
from slipstream.errors import PromptError, TargetError
from slipstream.host.turns import Turns
from slipstream.targets.describe import as_target
from tests.checkpoints import CONTEXT, Tiny, random_llama
from tests.engine.paged_toy import PagedToy
from tests.targets.huggingface.architectures import VOCAB, random_model
from tests.targets.reference import Wide


@functools.cache
def module(name: str) -> Any:
    if name == "llama":
        return random_llama(vocab_size=VOCAB, hidden_size=32, eos_token_id=2).double()
    return random_model(name)


@functools.cache
def llm(name: str, max_batch: int = 8) -> LLM:
    return LLM(as_target(module(name)), max_batch=max_batch)


def ids(n: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def direct(name: str, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """By one forward of transformers over the whole text, without a cache."""
    with torch.no_grad(), Wide(True):
        logits = module(name)(torch.tensor([context + continuation]), use_cache=False).logits[0, len(context) - 1 : -1]
    logs = torch.log_softmax(logits, -1)
    return logs[range(len(continuation)), continuation].tolist(), logits.argmax(-1).tolist() == continuation


PAIRS = [(ids(1, 1), ids(1, 2)), (ids(30, 3), ids(7, 4)), (ids(4, 5), ids(40, 6)), (ids(9, 7), ids(2, 8)), ([5], [])]


@pytest.mark.parametrize("name", ["llama", "stablelm", "bloom", "lfm2"])
def test_they_are_those_of_a_direct_forward(name: str) -> None:
    tolerance = 1e-9 if name == "llama" else 1e-5  # transformers computes norms and states in float32
    for most in (1, 8) if name == "llama" else (8,):
        for one, (context, continuation) in zip(llm(name, most).log_likelihoods(PAIRS), PAIRS, strict=True):
            wanted, greedy = direct(name, context, continuation)
            assert one.logprobs == pytest.approx(wanted, abs=tolerance)
            assert one.logprob == pytest.approx(sum(wanted), abs=40 * tolerance)
            assert one.greedy == greedy


def test_a_greedy_continuation_is_greedy_until_its_last_token_differs() -> None:
    context = ids(6, 11)
    plain = llm("llama").generate(context, SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids
    other = [*plain[:-1], (plain[-1] + 1) % VOCAB]
    same, changed = llm("llama").log_likelihoods([(context, plain), (context, other)])
    assert (same.greedy, changed.greedy) == (True, False)


def test_long_continuations_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [one.logprobs for one in llm("llama").log_likelihoods(PAIRS)]
    for most in (2, 13, 40):
        monkeypatch.setattr(log_likelihoods, "MOST_SCORED", most)
        for found, wanted in zip(llm("llama").log_likelihoods(PAIRS), whole, strict=True):
            assert found.logprobs == pytest.approx(wanted, abs=1e-9)


def test_a_text_is_one_forward_and_several_texts_share_it() -> None:
    toy = PagedToy(vocab=8)
    texts = [Scored([1, 2, 3], [4, 5]), Scored([3], [1, 2, 3, 4]), Scored([7, 7], [7])]
    assert len(list(score(toy, texts, 8, Turns()))) == 3
    assert toy.runs == 1
    assert toy.rows == sum(text.slots for text in texts)
    assert toy.pool.held == 0


def test_a_cache_of_fixed_size_holds_as_many_texts_as_fit() -> None:
    toy = PagedToy(vocab=8, block=4, blocks=3)
    texts = [Scored([1, 2, 3], [4, 5, 6, 7, 0]) for _ in range(4)]  # two blocks each
    assert len(list(score(toy, texts, 8, Turns()))) == 4
    assert toy.runs == 4
    free = PagedToy(vocab=8, block=4)
    others = [Scored(text.context, text.continuation) for text in texts]
    list(score(free, others, 8, Turns()))
    assert [text.logprobs for text in texts] == [text.logprobs for text in others]


def test_nothing_is_held_after_a_fault_or_when_nobody_asks_for_more() -> None:
    toy = PagedToy(vocab=8, faulty=5)
    with pytest.raises(TargetError, match="token 5"):
        list(score(toy, [Scored([1, 5], [2])], 8, Turns()))
    assert toy.pool.held == 0
    rest = score(toy, [Scored([1, 2], [3]), Scored([1], [2])], 1, Turns())
    next(rest)
    rest.close()
    assert toy.pool.held == 0


def test_texts_may_fill_the_context_and_no_more(tiny: Tiny) -> None:
    own = LLM(tiny.target, executor="torch", dtype="float64", device="cpu")
    assert len(own.log_likelihoods([([65] * CONTEXT, [66])])[0].logprobs) == 1
    assert len(own.log_likelihoods([([65], [66] * CONTEXT)])[0].logprobs) == CONTEXT
    for context, continuation in (([65] * CONTEXT, [66, 67]), ([65], [66] * (CONTEXT + 1))):
        with pytest.raises(PromptError, match=f"the target's context holds {CONTEXT}"):
            own.log_likelihoods([(context, continuation)])


def test_texts_are_encoded_and_wrong_ones_are_refused(tiny: Tiny) -> None:
    own = LLM(tiny.target, executor="torch", dtype="float64", device="cpu")
    encode = own.tokenizer.encode
    text, same = own.log_likelihoods([("def add(", "first"), (encode("def add("), encode("first"))])
    assert text.continuation == same.continuation
    assert text.logprobs == pytest.approx(same.logprobs, abs=1e-9)
    for context, continuation in (("", "x"), ([], [1]), ([1], [-1]), ([1], ["x"]), ([1], [10**6])):
        with pytest.raises(PromptError):
            own.log_likelihoods([(context, continuation)])
    assert own.log_likelihoods([]) == []
