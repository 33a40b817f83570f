"""`Generation`: runs the choices of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from anyio import fail_after

from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats, TokenLogprob
from slipstream.core.strict import JsonObject
from slipstream.core.structured import Structured
from slipstream.engine.messages import RequestSpec, Update
from slipstream.engine.request_checks import read_prediction
from slipstream.errors import PromptError
from slipstream.server.api_error import ApiError
from slipstream.server.fields import SPECULATION, read_members
from slipstream.server.reply import Delta, Reply
from slipstream.server.service import Service

T = TypeVar("T")


@dataclass
class Choice:
    """One answer to one prompt.

    prompt     index of the prompt.
    text       text that may be sent so far; pieces: the part of `text` that each token added.
    proposers  drafter of each token, as in `Sequence`.
    reply      the parts of the text in a chat: reasoning, content, tool calls.
    concurrent  largest number of other choices that waited or ran at the same time as this choice.
    decode_tokens, decode_seconds  number of tokens after the first step, and wall time from the end of the first step
               to the end of the last step, measured by the engine.
    """

    index: int
    prompt: int
    spec: RequestSpec
    reply: Reply
    text: str = ""
    ids: list[int] = field(default_factory=list)
    proposers: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    stop_cause: int | str | None = None
    stats: SpecStats | None = None
    cached: int = 0
    concurrent: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Part:
    """Holds the text that one step added to a choice.

    offset    position of `text` in the text of the choice.
    deltas    what the step added to the choice's `reply`.
    tokens    (text, proposer) of each new token; see `Sequence`. logprobs: their log-probabilities.
    finish    finish reason, in the last part; None before.

    `choice` itself may already hold later tokens."""

    choice: Choice
    text: str
    offset: int
    deltas: list[Delta]
    tokens: list[tuple[str, str | None]]
    logprobs: list[TokenLogprob]
    finish: str | None


def make_generation(
    service: Service, prompts: list[list[int]], params: SamplingParams, n: int, given: Mapping[str, object], **more: Any
) -> Generation:
    """Make a request's generation. given: fields of the request; more: arguments of `Generation`. Raises ApiError."""
    try:
        text = read_prediction(given.get("prediction"))
    except PromptError as fault:
        raise ApiError(400, str(fault), "prediction") from fault
    prediction = service.checks.prediction(text)
    rule = read_members(given, "speculation", SPECULATION).get("rule")
    return Generation(service, prompts, params, n, rule, prediction, **more)


class Generation:
    """The choices of a request: n for each prompt, in the order of the prompts. With a seed, choice j of a prompt has
    the seed plus j.

    reply    function that makes an empty `Reply`; None: all text is content.
    scored   True to compute the log-probabilities of the prompts, with `params.logprobs` alternatives.
    """

    def __init__(
        self,
        service: Service,
        prompts: Seq[list[int]],
        params: SamplingParams,
        n: int,
        rule: str | None = None,
        prediction: Seq[int] = (),
        reply: Callable[[], Reply] | None = None,
        scored: bool = False,
    ):
        self.service, self.prompts, self.params, self.n = service, prompts, params, n
        self.scores: list[list[TokenLogprob]] | None = [] if scored else None
        """For each prompt, the log-probabilities of its tokens after the first; None unless `scored`."""
        seeded = [params if params.seed is None else replace(params, seed=params.seed + j) for j in range(n)]
        self.choices = [
            Choice(p * n + j, p, RequestSpec(prompt, seeded[j], rule, prediction), (reply or Reply)())
            for p, prompt in enumerate(prompts)
            for j in range(n)
        ]
        self.key = b""
        """The API key of the request, set before it runs."""
        self.first_token: float | None = None
        """Time of the first token (`time.monotonic`); None before."""
        self._predicted, self._marked = bool(prediction), reply is not None
        self._places = asyncio.Semaphore(max(1, service.facts.max_batch - 1))  # leaves one place to other requests
        self.arrived = time.monotonic()

    @property
    def usage(self) -> JsonObject:
        """Numbers of tokens so far, under OpenAI's names. Each prompt counts once, even with several choices."""
        prompt = sum(map(len, self.prompts))
        output = sum(len(choice.ids) for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices if choice.index % self.n == 0)
        usage: JsonObject = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._predicted:
            stats = [choice.stats for choice in self.choices if choice.stats is not None]
            accepted = sum(each.accepted for each in stats)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(each.proposed for each in stats) - accepted,
            }
        return usage

    async def run(self) -> AsyncGenerator[Part, None]:
        """Run all choices, and yield their parts. Closing the iterator aborts the choices. Raises ApiError 503 after a
        time limit, and the error that ended a choice."""
        if self.scores is not None:
            with self.service.admit(len(self.prompts), self.key):
                self.scores = await self._wait_in_time(_gather_all([self._score(prompt) for prompt in self.prompts]))
        if all(choice.finish for choice in self.choices):
            if self.scores is not None:
                self.service.metrics.prompt_tokens.inc(sum(map(len, self.prompts)))
            for choice in self.choices:
                yield Part(choice, "", 0, [], [], [], choice.finish)
            return
        self.service.metrics.params_n.observe(self.n)
        self.service.metrics.params_max.observe(self.params.max_tokens)
        merged: asyncio.Queue[Part | Exception] = asyncio.Queue(1)  # further parts wait in bounded queues
        with self.service.admit(len(self.choices), self.key):
            tasks = [asyncio.create_task(self._run(choice, merged)) for choice in self.choices]
            try:
                left = len(tasks)
                while left:
                    part = await self._wait_in_time(merged.get())
                    if isinstance(part, Exception):
                        raise part
                    self.first_token = self.first_token or time.monotonic()
                    left -= part.finish is not None
                    yield part
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_in_time(self, work: Awaitable[T]) -> T:
        limits = self.service.limits
        limit, name = limits.total_seconds, "total time"
        if self.first_token is None and limits.first_token_seconds < limit:
            limit, name = limits.first_token_seconds, "time to the first token"
        try:
            with fail_after(max(0.0, self.arrived + limit - time.monotonic())):
                return await work
        except TimeoutError as late:
            raise ApiError(503, f"the {name} exceeded {limit:g} seconds", code="timeout") from late

    async def _score(self, prompt: list[int]) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt's tokens after the first, which are decoded as a forced text."""
        if len(prompt) < 2:
            return []
        given = SamplingParams(
            max_tokens=len(prompt) - 1, ignore_eos=True, logprobs=self.params.logprobs,
            structured=Structured(tokens=prompt[1:]),
        )  # fmt: skip
        scores: list[TokenLogprob] = []
        spec = RequestSpec(prompt[:1], given, prediction=prompt)
        async with self._places, aclosing(self.service.streams.follow(spec)) as updates:
            async for update in updates:
                scores += update.logprobs or ()
        return scores

    async def _run(self, choice: Choice, merged: asyncio.Queue[Part | Exception]) -> None:
        metrics = self.service.metrics
        text = self.service.text_stream(tuple(self.params.stop), choice.spec.ids, self._marked)
        reason, last, first = "abort", 0.0, 0.0
        started = began = 0.0
        try:
            async with self._places, aclosing(self.service.streams.follow(choice.spec)) as updates:
                async for update in updates:
                    now = time.monotonic()
                    if last:
                        choice.decode_tokens += len(update.ids)
                        choice.decode_seconds = update.ended - began
                        for _ in update.ids:
                            metrics.between.observe((now - last) / len(update.ids))
                    else:
                        started, began, first = update.started, update.ended, now
                        self._count_first(choice, update, now)
                    last = now
                    pieces = text.add(update.ids, update.drafted, update.finish is not None, update.stop_cause)
                    part = self._take_update(choice, update, [piece.text for piece in pieces])
                    if update.finish is not None:
                        reason = update.finish
                        metrics.total.observe(now - self.arrived)
                        metrics.inference.observe(now - started)
                        metrics.decode.observe(now - first)
                        metrics.per_token.observe((now - first) / max(1, len(choice.ids) - 1))
                    await merged.put(part)
        except Exception as fault:
            reason = "error"
            await merged.put(fault)
        finally:
            metrics.count_choice(reason, len(choice.spec.ids), len(choice.ids), choice.stats)

    def _count_first(self, choice: Choice, update: Update, now: float) -> None:
        metrics = self.service.metrics
        choice.cached = update.cached
        metrics.prompt_tokens.inc(len(choice.spec.ids))
        metrics.first.observe(now - self.arrived)
        metrics.queue.observe(max(0.0, update.started - self.arrived))
        metrics.prefill.observe(now - update.started)

    def _take_update(self, choice: Choice, update: Update, pieces: list[str]) -> Part:
        choice.ids += update.ids
        choice.proposers += update.proposers
        choice.concurrent = max(choice.concurrent, self.service.admitted - 1)
        choice.logprobs += update.logprobs or ()
        offset = len(choice.text)
        text = "".join(pieces)
        choice.text += text
        first = len(choice.pieces)
        choice.pieces += pieces
        shown = len(choice.pieces)
        tokens = list(zip(pieces, choice.proposers[first:shown], strict=True))
        choice.finish, choice.stop_cause, choice.stats = update.finish, update.stop_cause, update.stats
        deltas = choice.reply.add(text, update.finish is not None)
        return Part(choice, text, offset, deltas, tokens, choice.logprobs[first:shown], update.finish)


async def _gather_all(work: Seq[Coroutine[object, object, T]]) -> list[T]:
    """Return the results of all coroutines. If one fails, or the caller is cancelled, cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
