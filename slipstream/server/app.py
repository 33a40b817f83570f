"""`create_app`: the HTTP application over a `Service`."""

from __future__ import annotations

import hmac
import logging

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.server.api_error import ApiError, api_error
from slipstream.server.chat_completions import chat_completions
from slipstream.server.completions import completions
from slipstream.server.event_stream import ClientGone
from slipstream.server.routes import routes
from slipstream.server.service import Service
from slipstream.server.web_page import is_open, web_page

log = logging.getLogger("slipstream")

OPEN = ("/health",)
"""Paths that need no API key, besides those of the page."""


def create_app(service: Service) -> FastAPI:
    """The application; it needs no lifespan."""
    app = FastAPI(title="Slipstream", version=__version__, redoc_url=None)
    for router in (completions(service), chat_completions(service), routes(service), web_page()):
        app.include_router(router)

    async def answered(request: Request, fault: Exception) -> Response:
        found = api_error(fault)
        if found.status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, fault, exc_info=found.code == "internal_error")
        return JSONResponse(found.body, found.status, headers=found.headers)

    async def routed(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        found = ApiError(fault.status_code, f"{request.method} {request.url.path}: {fault.detail}")
        return JSONResponse(found.body, found.status, headers=dict(fault.headers or {}))

    async def left(request: Request, fault: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(HTTPException, routed)
    app.add_exception_handler(ClientGone, left)
    for kind in (ApiError, SlipstreamError, Exception):
        app.add_exception_handler(kind, answered)
    if service.keys:
        app.add_middleware(KeyCheck, keys=service.keys)
    return app


class KeyCheck:
    """Refuses requests without one of the keys, before their body is read."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] != "http" or scope["path"] in OPEN or is_open(scope["path"])
        if not open_to_all and not self._knows(scope):
            found = ApiError(401, "no valid API key was given: send Authorization: Bearer KEY", code="invalid_api_key")
            await JSONResponse(found.body, found.status, headers=found.headers)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and any(hmac.compare_digest(key.strip(), each) for each in self.keys)
