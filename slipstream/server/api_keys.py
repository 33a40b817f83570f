"""API keys: who may ask."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.server.api_error import ApiError
from slipstream.server.web_page import is_open

OPEN = ("/health", "/ready")
"""Paths that need no API key, besides those of the page."""


class KeyCheck:
    """Refuses requests without one of the keys, before their body is read."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] != "http" or scope["path"] in OPEN or is_open(scope["path"])
        if not open_to_all and not self._knows(scope):
            found = ApiError(401, "no valid API key was given: send Authorization: Bearer KEY", code="invalid_api_key")
            await found.answer(scope["path"])(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        key = given_key(scope)
        return any(hmac.compare_digest(key, each) for each in self.keys)


def given_key(scope: Scope) -> bytes:
    """The API key that a request names, as OpenAI's clients do, or as Anthropic's; empty if it names none."""
    headers = dict(scope["headers"])
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return bytes(key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b""))
