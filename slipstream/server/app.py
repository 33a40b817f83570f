"""`create_app`: the HTTP application of a `Service`: routes, errors, the page at `/`, and the check of API keys."""

import asyncio
import hmac
import logging
from collections.abc import Sequence as Seq
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream import __version__
from slipstream.core.strict import JsonObject
from slipstream.errors import SlipstreamError
from slipstream.server.api_error import ApiError, as_api_error
from slipstream.server.chat_requests import read_conversation
from slipstream.server.completions import prepare_chat, prepare_completion
from slipstream.server.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Field, describe_body, fields_of, read_flag
from slipstream.server.messages_api import COUNTED, count_prompt_tokens, prepare_message
from slipstream.server.response_writer import ClientGone, add_endpoint, read_fields, read_key
from slipstream.server.responses_api import prepare_response
from slipstream.server.service import Service

log = logging.getLogger("slipstream")

OPEN = ("/health", "/ready")
"""Paths that need no API key, in addition to the paths of the page."""

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
"""Headers of the page: it loads and requests nothing from other hosts, and no text can become HTML (Trusted Types)."""

ENDPOINTS = (
    (COMPLETIONS, "/v1/completions", "Complete a text", prepare_completion),
    (CHAT, "/v1/chat/completions", "Answer a conversation", prepare_chat),
    (RESPONSES, "/v1/responses", "Answer in the form of OpenAI's Responses", prepare_response),
    (MESSAGES, "/v1/messages", "Answer in the form of Anthropic's Messages", prepare_message),
)
_OF_CHATS = {name: fields_of(CHAT)[name] for name in ("model", "messages", "tools", "chat_template_kwargs")}
TOKENIZE = {
    **_OF_CHATS,
    "prompt": Field("prompt", "Text, instead of messages.", {"type": "string"}),
    "return_token_strs": Field("return_token_strs", "Add the text of each token.", {"type": "boolean"}, unset=(False,)),
}
DETOKENIZE = {
    "model": _OF_CHATS["model"],
    "tokens": Field("tokens", "Token ids.", {"type": "array", "items": {"type": "integer"}}),
}


def create_app(service: Service, origins: Seq[str] = ()) -> FastAPI:
    """Make the application. origins: origins of other web pages that may send requests; "*" allows all pages."""
    app = FastAPI(title="Slipstream", version=__version__, redoc_url=None)
    router = make_router(service)
    for where, path, summary, prepare in ENDPOINTS:
        add_endpoint(router, service, where, path, summary, prepare)
    app.include_router(router)
    app.include_router(make_page_router())
    app.add_middleware(HeadAsGet)

    async def answer_fault(request: Request, fault: Exception) -> Response:
        error = as_api_error(fault)
        if error.status >= 500 and error.status != 503:  # 503: the end of the engine is logged elsewhere
            log.warning("%s %s: %s", request.method, request.url.path, fault, exc_info=error.code == "internal_error")
        return error.answer(request.url.path)

    async def answer_routing_fault(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        error = ApiError(fault.status_code, f"{request.method} {request.url.path}: {fault.detail}")
        error.headers |= fault.headers or {}
        return error.answer(request.url.path)

    async def answer_nobody(request: Request, fault: Exception) -> Response:
        return Response(status_code=499)  # the client has closed the connection

    app.add_exception_handler(HTTPException, answer_routing_fault)
    app.add_exception_handler(ClientGone, answer_nobody)
    for kind in (ApiError, SlipstreamError, Exception):
        app.add_exception_handler(kind, answer_fault)
    if service.keys:
        app.add_middleware(KeyCheck, keys=service.keys)
    if origins:  # the outermost middleware: browsers send their CORS preflight requests without a key
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


class HeadAsGet:
    """Answers HEAD requests like GET requests; uvicorn leaves out the body."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if is_head else scope, receive, send)


class KeyCheck:
    """Refuses requests without one of the keys, before their body is read. The page itself needs no key: it asks the
    user for the key and sends it to the API."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/", *OPEN) or scope["path"].startswith("/page/"):
            return await self.app(scope, receive, send)
        key = read_key(scope)
        if any(hmac.compare_digest(key, each) for each in self.keys):
            return await self.app(scope, receive, send)
        error = ApiError(401, "no valid API key was given: send Authorization: Bearer KEY", code="invalid_api_key")
        await error.answer(scope["path"])(scope, receive, send)


def make_page_router() -> APIRouter:
    """Make the routes of the page, which sends requests to this server's API. The files are read once, here: the path
    of a request never reaches the file system."""
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


def make_router(service: Service) -> APIRouter:
    router = APIRouter()
    facts = service.facts
    described = {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "slipstream",
        "max_model_len": facts.context,
        **{name: getattr(facts, name) for name in ("drafter", "draft_tokens", "rule", "backend", "weights")},
    }

    @router.get("/v1/models", summary="The models of this server")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(described)

    @router.post("/tokenize", openapi_extra=describe_body(TOKENIZE, []), summary="Token ids of a prompt or of messages")
    async def tokenize(request: Request) -> Response:
        body = await read_fields(request, service, TOKENIZE)
        if ("prompt" in body) == ("messages" in body):
            raise ApiError(400, "give either prompt or messages, not both", "prompt")
        if "messages" in body:
            ids = (await asyncio.to_thread(read_conversation, service, body)).ids
        elif not isinstance(body["prompt"], str):
            raise ApiError(400, "prompt must be text", "prompt")
        else:
            ids = await asyncio.to_thread(service.tokenizer.encode, body["prompt"])
        answer: JsonObject = {"count": len(ids), "max_model_len": facts.context, "tokens": ids}
        if read_flag(body, "return_token_strs"):
            answer["token_strs"] = await asyncio.to_thread(lambda: [*map(service.token_text, ids)])
        return JSONResponse(answer)

    @router.post("/detokenize", openapi_extra=describe_body(DETOKENIZE, ["tokens"]), summary="Text of token ids")
    async def detokenize(request: Request) -> Response:
        ids = (await read_fields(request, service, DETOKENIZE)).get("tokens")

        def decode() -> str:
            if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < facts.vocab_size for each in ids):
                raise ApiError(400, f"tokens must be a list of ids from 0 to {facts.vocab_size - 1}", "tokens")
            return str(service.tokenizer.decode(ids))

        return JSONResponse({"prompt": await asyncio.to_thread(decode)})

    counted = describe_body(COUNTED, ["messages"])

    @router.post("/v1/messages/count_tokens", openapi_extra=counted, summary="Number of tokens of a conversation")
    async def count_tokens(request: Request) -> Response:
        body = await read_fields(request, service, COUNTED)
        return JSONResponse({"input_tokens": await asyncio.to_thread(count_prompt_tokens, service, body)})

    @router.get("/health", summary="200 while the engine runs")
    async def health() -> Response:
        if service.streams.dead is not None:
            service.check_up()
        return JSONResponse({"status": "ok"})

    @router.get("/ready", summary="200 while new requests are accepted")
    async def ready() -> Response:
        service.check_up()
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
