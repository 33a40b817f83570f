"""`create_app`: the HTTP application over a `Service`."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.server.api_error import ApiError, api_error
from slipstream.server.api_keys import KeyCheck
from slipstream.server.chat_completions import chat_completions
from slipstream.server.completions import completions
from slipstream.server.event_stream import ClientGone
from slipstream.server.messages_api import messages
from slipstream.server.responses_api import responses
from slipstream.server.routes import routes
from slipstream.server.service import Service
from slipstream.server.web_page import web_page

log = logging.getLogger("slipstream")


def create_app(service: Service) -> FastAPI:
    """The application; it needs no lifespan."""
    app = FastAPI(title="Slipstream", version=__version__, redoc_url=None)
    for made in (completions, chat_completions, responses, messages, routes):
        app.include_router(made(service))
    app.include_router(web_page())

    async def answered(request: Request, fault: Exception) -> Response:
        found = api_error(fault)
        if found.status >= 500 and found.status != 503:  # the end of the engine is logged once, where it is noticed
            log.warning("%s %s: %s", request.method, request.url.path, fault, exc_info=found.code == "internal_error")
        return found.answer(request.url.path)

    async def routed(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        found = ApiError(fault.status_code, f"{request.method} {request.url.path}: {fault.detail}")
        found.headers |= fault.headers or {}
        return found.answer(request.url.path)

    async def left(request: Request, fault: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(HTTPException, routed)
    app.add_exception_handler(ClientGone, left)
    for kind in (ApiError, SlipstreamError, Exception):
        app.add_exception_handler(kind, answered)
    if service.keys:
        app.add_middleware(KeyCheck, keys=service.keys)
    return app
