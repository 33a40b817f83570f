"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from jinja2 import TemplateError
from starlette.responses import Response

from slipstream.core.sequence import TokenLogprob
from slipstream.errors import PromptError
from slipstream.server.answering import Form, Object, answer, generation_of
from slipstream.server.api_error import ApiError
from slipstream.server.fields import CHAT, body_schema, count, given_fields, plain_text, sampling_params
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.request_body import json_body
from slipstream.server.service import Service

ROLES = ("system", "developer", "user", "assistant")


class ChatForm(Form):
    """Messages, and deltas in streams."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, generation: Generation, choice: Choice) -> Object:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self.choice(choice, self._logprobs(generation, choice.logprobs), choice.finish) | {"message": message}

    def first(self, generation: Generation, choice: Choice) -> Object | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, generation: Generation, part: Part) -> Object:
        delta = {"content": part.text} if part.text else {}
        return self.choice(part.choice, self._logprobs(generation, part.logprobs), part.finish) | {"delta": delta}

    def _logprobs(self, generation: Generation, found: list[TokenLogprob]) -> Object | None:
        if generation.params.logprobs is None:
            return None

        def token(token_id: int, logprob: float) -> Object:
            text = generation.service.token_text(token_id)
            written = None if "\ufffd" in text else list(text.encode())  # of a part of a character they are unknown
            return {"token": text, "logprob": logprob, "bytes": written}

        content = [token(each.id, each.logprob) | {"top_logprobs": [token(*top) for top in each.top]} for each in found]
        return {"content": content, "refusal": None}


def chat_completions(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=body_schema(CHAT), summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        given = given_fields(await json_body(request, service.limits.body), CHAT)
        service.check_model(given.get("model"))
        prompt = await asyncio.to_thread(conversation, service, given.get("messages"))
        n = count(given, "n", 1, service.limits.choices, 1)
        params = service.checked(sampling_params(given, CHAT, service.facts.context - len(prompt)))
        generation = await generation_of(service, [prompt], params, n, given)
        return await answer(request, ChatForm(), generation, given)

    return router


def conversation(service: Service, messages: Any) -> list[int]:
    """The ids of a conversation. Raises ApiError 400."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is missing or empty, must be a list of messages", "messages")
    plain = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        return service.checks.prompt(service.checks.chat(plain))
    except PromptError as fault:
        raise service.prompt_error(fault, "messages") from fault
    except TemplateError as fault:
        raise ApiError(400, f"the model's chat template refuses this conversation: {fault}", "messages") from fault


def _message(message: Any, where: str) -> dict[str, str]:
    """A message of plain text: parts of text are joined, and the role "developer" is the system's newer name."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} is {message!r}, must be an object", where)
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in ("role", "content"):
            raise ApiError(400, f"{where}.{name} is not supported: messages have a role and text", f"{where}.{name}")
    role, content = given.get("role"), given.get("content", "")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is {role!r}, must be one of {', '.join(ROLES)}", f"{where}.role")
    text = plain_text(content, f"{where}.content", f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": text}
