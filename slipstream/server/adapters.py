"""What /v1/responses and /v1/messages share: their fields become those of a chat, whose generation they answer with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.server.adapter_fields import ADAPTER_FIELDS, REQUIRED
from slipstream.server.api_error import ApiError
from slipstream.server.chat_requests import chat_generation
from slipstream.server.delivery import scripted
from slipstream.server.fields import body_schema, flag, given_fields
from slipstream.server.generation import Generation
from slipstream.server.reply_blocks import Script
from slipstream.server.request_body import json_body
from slipstream.server.service import Service

Object = dict[str, Any]


def adapter(
    service: Service,
    where: str,
    summary: str,
    translated: Callable[[Object], Object],
    script: Callable[[Generation, Object], Script],
    names: Mapping[str, str],
) -> APIRouter:
    """The route of one of them.

    where       key of `ADAPTER_FIELDS`, and the end of its path.
    translated  its fields -> those of a chat. script: writes the answer.
    names       field of a chat -> the one that it comes from, for errors.
    """
    router = APIRouter()
    known = ADAPTER_FIELDS[where]

    @router.post(f"/v1/{where}", openapi_extra=body_schema(known, REQUIRED[where]), summary=summary, name=where)
    async def create(request: Request) -> Response:
        given = given_fields(await json_body(request, service.limits.body), known)
        service.check_model(given.get("model"))
        streamed = flag(given, "stream")
        for name in REQUIRED[where]:
            if name not in given:
                raise ApiError(400, f"{name} is missing", name)
        try:
            generation = await chat_generation(service, translated(given))
        except ApiError as fault:
            raise renamed(fault, names) from fault
        return await scripted(request, script(generation, given), streamed)

    return router


def renamed(fault: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with the names of the adapter's own fields."""
    if fault.param is None or fault.param.split(".")[0].split("[")[0] not in names:
        return fault
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    message, param = (pattern.sub(lambda found: names[found[0]], each) for each in (fault.message, fault.param))
    return ApiError(fault.status, message, param, fault.code)


def texts(content: Any, kinds: tuple[str, ...], where: str) -> str:
    """Text, or parts of text of these kinds, which are joined. Raises ApiError 400."""
    parts = [{"type": kinds[0], "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ApiError(400, f"{where} is {content!r}, must be text or a list of parts", where)
    found = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where} has a part that is not text ({', '.join(kinds)})", where)
        found.append(part["text"])
    return "".join(found)


def checked(value: Any, where: str) -> Object:
    """A value that must be an object, those of its members that are null left out. Raises ApiError 400."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} is {value!r}, must be an object", where)
    return {name: each for name, each in value.items() if each is not None}
