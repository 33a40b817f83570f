"""`create_app`: the HTTP application over a `Service`: its routes, its errors, the page at `/`, and who may ask."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.server.api_error import ApiError, api_error
from slipstream.server.completions import completions
from slipstream.server.event_stream import ClientGone
from slipstream.server.messages_api import messages
from slipstream.server.request_body import given_key
from slipstream.server.responses_api import responses
from slipstream.server.routes import routes
from slipstream.server.service import Service

log = logging.getLogger("slipstream")

OPEN = ("/health", "/ready")
"""Paths that need no API key, besides those of the page."""

FILES = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing from elsewhere is loaded or asked. No text can become a script: Trusted Types refuse it as HTML."""


def create_app(service: Service) -> FastAPI:
    """The application; it needs no lifespan."""
    app = FastAPI(title="Slipstream", version=__version__, redoc_url=None)
    for router in (completions, responses, messages, routes):
        app.include_router(router(service))
    app.include_router(web_page())

    async def answered(request: Request, fault: Exception) -> Response:
        error = api_error(fault)
        if error.status >= 500 and error.status != 503:  # the end of the engine is logged once, where it is noticed
            log.warning("%s %s: %s", request.method, request.url.path, fault, exc_info=error.code == "internal_error")
        return error.answer(request.url.path)

    async def routed(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        error = ApiError(fault.status_code, f"{request.method} {request.url.path}: {fault.detail}")
        error.headers |= fault.headers or {}
        return error.answer(request.url.path)

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
    """Refuses requests without one of the keys, before their body is read. The page needs none: it has nothing of the
    model, and asks for the key that the API needs."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/", *OPEN) or scope["path"].startswith("/page/"):
            return await self.app(scope, receive, send)
        key = given_key(scope)
        if any(hmac.compare_digest(key, each) for each in self.keys):
            return await self.app(scope, receive, send)
        error = ApiError(401, "no valid API key was given: send Authorization: Bearer KEY", code="invalid_api_key")
        await error.answer(scope["path"])(scope, receive, send)


def web_page() -> APIRouter:
    """The page, which asks the API of this server. The files are read once; no path of a request reaches the file
    system."""
    router = APIRouter(include_in_schema=False)
    files = {
        path.name: Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=HEADERS)
        for path in FILES.iterdir()
    }

    @router.get("/")
    async def index() -> Response:
        return files["index.html"]

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return files[name]

    return router
