"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.core.sequence import TokenLogprob
from slipstream.errors import PromptError
from slipstream.server.answering import Form, Object, answer, generation_of
from slipstream.server.api_error import ApiError
from slipstream.server.fields import COMPLETIONS, body_schema, count, flag, given_fields, sampling_params
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.request_body import json_body
from slipstream.server.service import Service

LENGTHS = ("max_tokens", "max_completion_tokens")


class CompletionForm(Form):
    """echo: the text of each prompt that comes before its choices; empty without."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, echo: list[str]):
        self.echo = echo

    def whole(self, generation: Generation, choice: Choice) -> Object:
        before = self.echo[choice.prompt] if self.echo else ""
        logprobs = self._logprobs(generation, choice.logprobs, len(before))
        return self.choice(choice, logprobs, choice.finish) | {"text": before + choice.text}

    def first(self, generation: Generation, choice: Choice) -> Object | None:
        return self.choice(choice, None, None) | {"text": self.echo[choice.prompt]} if self.echo else None

    def part(self, generation: Generation, part: Part) -> Object:
        logprobs = self._logprobs(generation, part.logprobs, part.offset)
        return self.choice(part.choice, logprobs, part.finish) | {"text": part.text}

    def _logprobs(self, generation: Generation, found: list[TokenLogprob], offset: int) -> Object | None:
        if generation.params.logprobs is None:
            return None
        text = generation.service.token_text
        tokens = [text(each.id) for each in found]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{text(token): logprob for token, logprob in each.top} for each in found],
            "text_offset": offsets,
        }


def completions(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=body_schema(COMPLETIONS), summary="Complete a text")
    async def complete(request: Request) -> Response:
        given = given_fields(await json_body(request, service.limits.body), COMPLETIONS)
        service.check_model(given.get("model"))
        prompts = await asyncio.to_thread(_prompts, service, given.get("prompt"))
        n = count(given, "n", 1, service.limits.choices, 1)
        if n * len(prompts) > service.limits.choices:
            raise ApiError(
                400, f"{len(prompts)} prompts times n={n} are more than {service.limits.choices} choices", "n"
            )
        echo = flag(given, "echo")
        if echo and given.get("logprobs") is not None:
            raise ApiError(400, "echo with logprobs is not supported: those of prompts are not computed", "echo")
        nothing = any(type(given.get(name)) is int and given[name] == 0 for name in LENGTHS)
        if nothing:  # the specification allows it
            given = {name: value for name, value in given.items() if name not in LENGTHS}
        room = service.facts.context - max(map(len, prompts))
        params = service.checked(sampling_params(given, COMPLETIONS, room))
        generation = await generation_of(service, prompts, params, n, given)
        if nothing:
            if flag(given, "stream"):
                raise ApiError(400, "max_tokens is 0, and a stream of nothing was asked for", "max_tokens")
            generation.finish_empty()
        form = CompletionForm([service.text(prompt) for prompt in prompts] if echo else [])
        return await answer(request, form, generation, given)

    return router


def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    """The ids of each prompt: text, ids, or a list of either. Raises ApiError 400."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], (str, list))):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, f"prompt is {prompt!r}, must be text, token ids, or a list of these, not empty", "prompt")
    if len(prompt) > service.limits.choices:
        raise ApiError(400, f"prompt holds {len(prompt)} prompts, at most {service.limits.choices}", "prompt")
    try:
        return [service.checks.prompt(each) for each in prompt]
    except PromptError as fault:
        raise service.prompt_error(fault, "prompt") from fault
