"""Reads a request: its API key, and its body: bounded, UTF-8, JSON, an object with known fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.types import Scope

from slipstream.server.api_error import ApiError
from slipstream.server.fields import Field, given_fields
from slipstream.server.service import Service

MOST_DEPTH = 64
"""Most nested lists and objects."""


async def request_fields(request: Request, service: Service, known: Mapping[str, Field]) -> dict[str, Any]:
    """The fields of a request that are set. Raises ApiError: see `json_body`, `given_fields` and `check_model`."""
    given = given_fields(await json_body(request, service.limits.body), known)
    service.check_model(given.get("model"))
    return given


async def json_body(request: Request, most: int) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError 413 past `most` bytes, and 400 for anything else that is wrong."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the content type is {kind or 'missing'}, must be application/json")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most)
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
        if len(read) > most:
            raise _too_large(most)
    try:
        body = json.loads(read.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as fault:
        raise ApiError(400, f"the body is not JSON in UTF-8: {fault}", code="invalid_json") from fault
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}, must be an object", code="invalid_json")
    for name, value in body.items():
        _check(name, name)
        _check(name, value)
    return body


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _check(field: str, value: Any, depth: int = 0) -> None:
    """Raise ApiError for texts that cannot be encoded, and for deep nesting."""
    if depth > MOST_DEPTH:
        raise ApiError(400, f"{field} is nested more than {MOST_DEPTH} deep", field, "invalid_json")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            if not isinstance(each, (int, float)):  # most are ids of tokens
                _check(field, each, depth + 1)
    elif isinstance(value, str):
        if "\0" in value:
            raise ApiError(400, f"{field} holds the character NUL", field, "invalid_text")
        try:
            value.encode()
        except UnicodeEncodeError as fault:
            raise ApiError(400, f"{field} holds half of a surrogate pair", field, "invalid_text") from fault


def given_key(scope: Scope) -> bytes:
    """The API key that a request names, as OpenAI's clients do, or as Anthropic's; empty if it names none."""
    headers = dict(scope["headers"])
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return bytes(key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b""))
