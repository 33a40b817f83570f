"""`AsyncLLM`: coroutines get the texts of `LLM.generate`, and none of them can harm another."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from slipstream import LLM, AsyncLLM, SamplingParams, Structured
from slipstream.errors import EngineError, ParameterError, PromptError, RuleError, TargetError
from slipstream.llm import Chunk, Completion
from tests.engine.paged_toy import PagedToy
from tests.server.hosting import break_engine
from tests.targets.toy import ToyTarget

LONG = SamplingParams(max_tokens=3000)


def in_a_loop(body: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, as a function."""

    @functools.wraps(body)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(body(*given, **named), 60))

    return run


async def completed(chunks: AsyncIterator[Chunk]) -> Completion:
    received = [chunk async for chunk in chunks]
    assert all(chunk.completion is None for chunk in received[:-1])
    last = received[-1].completion
    assert "".join(chunk.text for chunk in received) == last.text
    return last


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine holds nothing."""
    while llm.stats.running or llm.stats.waiting or llm.stats.kv_usage:
        await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def pair() -> LLM:
    return LLM("embedded", draft="embedded", max_batch=4, draft_tokens=4)


@in_a_loop
async def test_many_coroutines_get_the_texts_of_generate(pair: LLM) -> None:
    prompts = [f"def add_{i}(a, b):\n" for i in range(6)]
    each = [
        SamplingParams(max_tokens=12, stop=("\n\n",), logprobs=2 if i % 2 else None, draft_tokens=0 if i == 3 else None)
        for i in range(6)
    ]
    expected, asked = pair.generate(prompts, each), zip(prompts, each, strict=True)
    async with AsyncLLM(pair) as llm:
        done = await asyncio.gather(*(completed(llm.generate(prompt, params)) for prompt, params in asked))
    for got, want in zip(done, expected, strict=True):
        assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
        assert (got.stop_cause, got.prompt_token_ids) == (want.stop_cause, want.prompt_token_ids)
        assert (got.logprobs is None) == (want.logprobs is None)
        assert len(got.logprobs or got.token_ids) == len(got.token_ids) == len(got.drafted)


@in_a_loop
async def test_closing_the_iterator_aborts_the_request_and_frees_its_cache() -> None:
    target = PagedToy(5)
    async with AsyncLLM(LLM(target, "ngram", draft_tokens=4)) as llm:
        async with aclosing(llm.generate([1, 2, 3], LONG)) as chunks:
            async for _ in chunks:
                break
        await idle(llm)
        assert not target.pool.tables


@in_a_loop
async def test_cancelling_a_coroutine_aborts_its_request_and_no_other() -> None:
    target = PagedToy(5)
    async with AsyncLLM(LLM(target, "ngram", draft_tokens=4)) as llm:
        tasks = [asyncio.create_task(completed(llm.generate([i], LONG))) for i in range(4)]
        while llm.stats.running < 4:
            await asyncio.sleep(0.001)
        other = asyncio.create_task(completed(llm.generate([4], SamplingParams(max_tokens=20))))
        for task in tasks:
            task.cancel()
        assert len((await other).token_ids) == 20
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(llm)
        assert not target.pool.tables


@pytest.mark.parametrize(
    ("prompt", "params", "rule", "error"),
    [
        ([], SamplingParams(), None, PromptError),
        ([5], SamplingParams(), None, PromptError),
        ([1], SamplingParams(stop_token_ids=(9,)), None, ParameterError),
        ([1], SamplingParams(structured=Structured(regex="a")), None, ParameterError),  # there is no tokenizer
        ([1], SamplingParams(), "exact", RuleError),
        ([3], SamplingParams(), None, TargetError),  # the target fails at token 3
    ],
)
@in_a_loop
async def test_a_fault_of_a_request_is_raised_to_its_caller_alone(prompt, params, rule, error):
    target = PagedToy(5, faulty=3, seed=1)
    safe = SamplingParams(max_tokens=30, logit_bias={3: -100})
    async with AsyncLLM(LLM(target, draft_tokens=4)) as llm:
        other = asyncio.create_task(completed(llm.generate([1], safe)))
        with pytest.raises(error):
            await completed(llm.generate(prompt, params, rule))
        assert len((await other).token_ids) == 30
        assert llm.dead is None
        await idle(llm)


@in_a_loop
async def test_a_dead_engine_ends_every_request_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(LLM(ToyTarget(5), draft_tokens=4))
    tasks = [asyncio.create_task(completed(llm.generate([i], LONG))) for i in range(3)]
    while llm.stats.running < 3:
        await asyncio.sleep(0.001)

    break_engine(monkeypatch, llm)
    for task in tasks:
        with pytest.raises(EngineError, match="no block is left"):
            await task
    assert isinstance(llm.dead, EngineError)
    with pytest.raises(EngineError):
        await completed(llm.generate([1]))
    assert not llm.streams


@in_a_loop
async def test_closing_ends_the_requests_and_the_thread() -> None:
    async with AsyncLLM(LLM(ToyTarget(5), draft_tokens=4)) as llm:
        task = asyncio.create_task(completed(llm.generate([1], LONG)))
        while not llm.stats.running:
            await asyncio.sleep(0.001)
    with pytest.raises(EngineError, match="closed"):
        await task
    assert not llm._thread._thread.is_alive()


@in_a_loop
async def test_a_request_that_is_aborted_while_it_is_prepared_never_joins() -> None:
    target, gate = PagedToy(5), threading.Event()
    async with AsyncLLM(LLM(target, draft_tokens=4)) as llm:
        sequence = llm.llm.sequence

        def slowly(*given: object) -> object:
            gate.wait(20)
            return sequence(*given)  # type: ignore[arg-type]

        llm.llm.sequence = slowly  # type: ignore[assignment]
        task = asyncio.create_task(completed(llm.generate([1], LONG)))
        while not llm.streams:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.set()
        llm.llm.sequence = sequence  # type: ignore[method-assign]
        await completed(llm.generate([2], SamplingParams(max_tokens=3)))
        assert (llm.stats.running, llm.stats.waiting) == (0, 0)


@in_a_loop
async def test_a_form_that_is_compiled_for_long_keeps_no_other_request_waiting(monkeypatch) -> None:
    llm, compiling = LLM(ToyTarget()), threading.Event()
    prepared = llm.prepare
    monkeypatch.setattr(llm, "prepare", lambda spec: (spec.params.structured and compiling.wait(), prepared(spec))[1])
    async with AsyncLLM(llm) as engine:
        given = SamplingParams(max_tokens=2, structured=Structured(tokens=[1, 2]))
        slow = asyncio.ensure_future(completed(engine.generate([1, 2], given)))
        await completed(engine.generate([1, 2], SamplingParams(max_tokens=2)))
        assert not slow.done()
        compiling.set()
        assert (await slow).token_ids == [1, 2]
