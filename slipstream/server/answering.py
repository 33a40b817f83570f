"""What both kinds of completions share: from a checked generation to an answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import Request
from starlette.responses import Response

from slipstream.core.params import SamplingParams
from slipstream.server.api_error import api_error
from slipstream.server.delivery import Parts, delivered
from slipstream.server.event_stream import DONE, event
from slipstream.server.fields import SPECULATION, check_drafter, flag, members, prediction_text
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.service import Service

log = logging.getLogger("slipstream")

Object = dict[str, Any]


class Form(ABC):
    """How an endpoint writes its answers. chunk_name, name: the values of `object`; prefix: of ids."""

    name = chunk_name = prefix = ""

    def choice(self, choice: Choice, logprobs: Object | None, finish: str | None) -> Object:
        """What a choice, or a part of one, has at both endpoints."""
        return {
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": stop_text(choice, finish),
        }

    @abstractmethod
    def whole(self, generation: Generation, choice: Choice) -> Object:
        """A choice of a whole answer."""

    @abstractmethod
    def first(self, generation: Generation, choice: Choice) -> Object | None:
        """What comes before the first part of a choice in a stream, if anything does."""

    @abstractmethod
    def part(self, generation: Generation, part: Part) -> Object:
        """A part of a choice in a stream."""


async def generation_of(
    service: Service, prompts: list[list[int]], params: SamplingParams, n: int, given: Mapping[str, Any], **more: Any
) -> Generation:
    """The choices of a request, with its rule and its prediction. more: as of `Generation`. Raises ApiError 400."""
    rule = members(given, "speculation", SPECULATION).get("rule")
    check_drafter(given, service.facts.drafter)
    text = prediction_text(given)
    prediction = await asyncio.to_thread(service.checks.prediction, text)
    return Generation(service, prompts, params, n, rule, prediction, **more)


async def answer(request: Request, form: Form, generation: Generation, given: Mapping[str, Any]) -> Response:
    """The answer to a request."""
    service = generation.service
    head = {"id": f"{form.prefix}-{uuid4().hex}", "created": service.now(), "model": service.name}
    statistics = flag(given, "statistics")
    options = members(given, "stream_options", ("include_usage", "continuous_usage_stats"))
    include_usage = flag(options, "include_usage")
    continuous = flag(options, "continuous_usage_stats") and include_usage

    def whole() -> Object:
        choices = [_with(form.whole(generation, choice), choice, statistics) for choice in generation.choices]
        body = head | {"object": form.name, "choices": choices, "usage": generation.usage}
        return body | (_metrics(generation) if statistics else {})

    def events(parts: Parts) -> AsyncGenerator[bytes, None]:
        return _events(form, generation, head, parts, include_usage, continuous, statistics)

    return await delivered(request, generation, flag(given, "stream"), lambda part: None, whole, events)


async def _events(
    form: Form,
    generation: Generation,
    head: Object,
    parts: Parts,
    include_usage: bool,
    continuous: bool,
    statistics: bool,
) -> AsyncGenerator[bytes, None]:
    """include_usage: one more chunk with the usage; continuous: the usage so far in each chunk, too."""

    def chunk(choices: list[Object], last: bool = False) -> bytes:
        body = head | {"object": form.chunk_name, "choices": choices}
        usage = generation.usage if last or continuous else None
        body |= {"usage": usage} if include_usage else {}
        return event(body | (_metrics(generation) if last and statistics else {}))

    async with aclosing(parts):
        try:
            for choice in generation.choices:
                if (before := form.first(generation, choice)) is not None:
                    yield chunk([before])
            async for part in parts:
                if part.text or part.deltas or part.logprobs or part.finish or (statistics and part.tokens):
                    written = form.part(generation, part)
                    if statistics:
                        written["tokens"] = [{"text": text, "drafter": drafter} for text, drafter in part.tokens]
                    yield chunk([_with(written, part.choice, statistics and part.finish is not None)])
            if include_usage:
                yield chunk([], last=True)
        except Exception as fault:
            log.warning("a stream ended with an error: %s", fault)
            yield event(api_error(fault).body)
    yield DONE


def stop_text(choice: Choice, finish: str | None) -> str | None:
    """The stop string that ended a choice, in its last part."""
    return choice.stop_cause if finish and isinstance(choice.stop_cause, str) else None


def _metrics(generation: Generation) -> Object:
    """What vLLM answers under --per-request-spec-decode-metrics summary, of a request that has one choice."""
    first, *more = generation.choices
    facts, stats = generation.service.facts, first.stats
    most = facts.draft_tokens
    if more or stats is None or not most:
        return {}
    most, steps = max(most, *stats.histogram), stats.steps - stats.undrafted
    found = {
        "mean_acceptance_length": 1 + stats.accepted / max(1, steps),
        "draft_acceptance_rate": stats.acceptance_rate or 0.0,
        "acceptance_histogram": [stats.histogram[i] - (0 if i else stats.undrafted) for i in range(most + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.proposed,
        "num_spec_tokens": most,
    }
    return {"metrics": {"speculative_decoding": found}}


def _with(written: Object, choice: Choice, statistics: bool) -> Object:
    """The choice, with its statistics if they were asked for."""
    if statistics and choice.stats is not None:
        written["statistics"] = choice.stats.as_dict() | {
            "drafted_by": choice.proposers,
            "others": choice.others,
            "decode_tokens": choice.decode_tokens,
            "decode_seconds": choice.decode_seconds,
        }
    return written
