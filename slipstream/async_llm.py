"""`AsyncLLM`: an `LLM` for the coroutines of one event loop.

>>> llm = AsyncLLM(LLM("embedded", draft="embedded"))
>>> async for chunk in llm.generate("def fibonacci(n):"):
...     print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from slipstream.core.params import SamplingParams
from slipstream.core.stats import TokenLogprob
from slipstream.engine.engine_thread import EngineThread
from slipstream.engine.messages import EngineStats, Report, RequestSpec, Streams, Update
from slipstream.engine.request_checks import Prompt, takes_params
from slipstream.llm import LLM, Chunk, Completion


class AsyncLLM:
    """Decodes the requests of many coroutines together, in one thread with one persistent engine.

    llm   the model; its present drafter, rule, draft length and `max_batch` are the defaults of every request.

    Used with `async with`, or closed with `close`. Only the coroutines of one event loop may use it.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._thread = EngineThread(llm.engine(), llm.prepare, self._deliver)
        self.streams = Streams(self._thread.submit, self._thread.abort)

    @property
    def dead(self) -> Exception | None:
        """Why no request can run any more; None while the engine works."""
        return self._thread.dead

    @property
    def stats(self) -> EngineStats:
        """Counts of the engine after its last step."""
        return self.streams.stats

    @takes_params
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, rule: str | None = None, prediction: Prompt = ()
    ) -> AsyncGenerator[Chunk, None]:
        """Complete one prompt. Yields the text that each step added; the last chunk has the completion. Closing the
        iterator, or cancelling the task that awaits it, aborts the request.

        rule  verification rule of this request; None: the rule of the `LLM`. `params.draft_tokens=0` turns speculation
              off for this request.

        prediction  text or ids that the output is expected to contain, such as the file that is being edited. Draft
              tokens are copied from the prediction; it changes the speed, not the text.

        Raises the errors of `LLM.generate`, for this request alone, and EngineError once the engine has stopped.
        """
        checks = self.llm.checks
        params = await asyncio.to_thread(checks.params, params or SamplingParams())  # long texts take long
        ids = await asyncio.to_thread(checks.prompt, prompt)
        expected = await asyncio.to_thread(checks.prediction, prediction)
        output: list[Update] = []
        text = self.llm.text_stream(params, checks.before(ids))
        async with aclosing(self.streams.follow(RequestSpec(ids, params, rule, expected))) as updates:
            async for update in updates:
                output.append(update)
                last = update.finish is not None
                pieces = [] if text is None else text.add(update.ids, update.drafted, last, update.stop_cause)
                yield Chunk(pieces, self._completion(ids, params, output) if last else None)

    def close(self) -> None:
        """End every request, and the thread after its current step."""
        self._thread.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _deliver(self, report: Report) -> None:  # called only after a request, when `streams` exists
        self.streams.deliver(report)

    def _completion(self, prompt: list[int], params: SamplingParams, output: list[Update]) -> Completion:
        last = output[-1]
        ids = [token for update in output for token in update.ids]
        logprobs: list[TokenLogprob] = [each for update in output for each in update.logprobs or ()]
        assert last.stats is not None
        return Completion(
            text=self.llm.text_of(ids, self.llm.checks.before(prompt), last.stop_cause),
            token_ids=ids,
            finish_reason=last.finish or "length",
            stop_cause=last.stop_cause,
            drafted=[each for update in output for each in update.drafted],
            logprobs=logprobs if params.logprobs is not None else None,
            stats=last.stats,
            prompt_token_ids=prompt,
        )
