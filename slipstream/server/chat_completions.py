"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.core.token_logprob import TokenLogprob
from slipstream.server.answering import Form, Object, answer
from slipstream.server.chat_requests import chat_generation
from slipstream.server.fields import CHAT, body_schema, fields_of, given_fields
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.reply import ARGUMENTS, CALL, CONTENT, REASONING
from slipstream.server.request_body import json_body
from slipstream.server.service import Service

FIELDS = fields_of(CHAT)


class ChatForm(Form):
    """Messages, and deltas in streams."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, generation: Generation, choice: Choice) -> Object:
        reply = choice.reply
        message: Object = {"role": "assistant", "content": reply.content or None, "refusal": None}
        if not (reply.calls or reply.reasoning):
            message["content"] = reply.content
        if reply.reasoning:
            message |= _reasoning(reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        return self._choice(generation, choice, choice.logprobs, choice.finish) | {"message": message}

    def first(self, generation: Generation, choice: Choice) -> Object | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, generation: Generation, part: Part) -> Object:
        delta: Object = {}
        calls: dict[int, Object] = {}
        for each in part.deltas:
            if each.kind == CONTENT:
                delta["content"] = delta.get("content", "") + each.text
            elif each.kind == REASONING:
                delta |= _reasoning(each.text)
            elif each.kind == CALL:
                call = {"id": part.choice.reply.calls[each.index].id, "type": "function"}
                calls[each.index] = {"index": each.index, **call, "function": {"name": each.text, "arguments": ""}}
            elif each.kind == ARGUMENTS:
                calls.setdefault(each.index, {"index": each.index, "function": {"arguments": ""}})
                calls[each.index]["function"]["arguments"] += each.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return self._choice(generation, part.choice, part.logprobs, part.finish) | {"delta": delta}

    def _choice(
        self, generation: Generation, choice: Choice, logprobs: list[TokenLogprob], finish: str | None
    ) -> Object:
        called = finish == "stop" and choice.reply.calls
        written = self.choice(choice, self._logprobs(generation, logprobs), finish)
        return written | {"finish_reason": "tool_calls" if called else finish}

    def _logprobs(self, generation: Generation, found: list[TokenLogprob]) -> Object | None:
        if generation.params.logprobs is None:
            return None

        def token(token_id: int, logprob: float) -> Object:
            text = generation.service.token_text(token_id)
            written = None if "\ufffd" in text else list(text.encode())  # of a part of a character they are unknown
            return {"token": text, "logprob": logprob, "bytes": written}

        content = [token(each.id, each.logprob) | {"top_logprobs": [token(*top) for top in each.top]} for each in found]
        return {"content": content, "refusal": None}


def _reasoning(text: str) -> Object:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def chat_completions(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    schema = body_schema(FIELDS, ["messages"])

    @router.post("/v1/chat/completions", openapi_extra=schema, summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        given = given_fields(await json_body(request, service.limits.body), FIELDS)
        generation = await chat_generation(service, given)
        return await answer(request, ChatForm(), generation, given)

    return router
