"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter

from slipstream.core.token_logprob import TokenLogprob
from slipstream.server.chat_requests import chat_generation
from slipstream.server.choice_script import ChoiceScript
from slipstream.server.fields import CHAT
from slipstream.server.generation import Choice, Part
from slipstream.server.reply import ARGUMENTS, CALL, CONTENT, REASONING
from slipstream.server.script import Object, endpoint
from slipstream.server.service import Service


class ChatScript(ChoiceScript):
    """Messages, and deltas in streams."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, choice: Choice) -> Object:
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
        return self._choice(choice, choice.logprobs, choice.finish) | {"message": message}

    def first(self, choice: Choice) -> Object | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, part: Part) -> Object:
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
        return self._choice(part.choice, part.logprobs, part.finish) | {"delta": delta}

    def _choice(self, choice: Choice, logprobs: list[TokenLogprob], finish: str | None) -> Object:
        written = self.common(choice, self._logprobs(logprobs), finish)
        return written | ({"finish_reason": "tool_calls"} if finish == "stop" and choice.reply.calls else {})

    def _logprobs(self, found: list[TokenLogprob]) -> Object | None:
        if self.generation.params.logprobs is None:
            return None

        def token(token_id: int, logprob: float) -> Object:
            text = self.generation.service.token_text(token_id)
            written = None if "\ufffd" in text else list(text.encode())  # of a part of a character they are unknown
            return {"token": text, "logprob": logprob, "bytes": written}

        content = [token(each.id, each.logprob) | {"top_logprobs": [token(*top) for top in each.top]} for each in found]
        return {"content": content, "refusal": None}


def _reasoning(text: str) -> Object:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def chat_completions(service: Service) -> APIRouter:
    """The route."""
    return endpoint(service, CHAT, "/v1/chat/completions", "Answer a conversation", _chat)


async def _chat(service: Service, given: Object) -> ChatScript:
    return ChatScript(await chat_generation(service, given), given)
