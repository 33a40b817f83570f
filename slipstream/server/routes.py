"""The small endpoints: models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from slipstream.server.api_error import ApiError
from slipstream.server.chat_completions import conversation
from slipstream.server.fields import flag
from slipstream.server.request_body import json_body
from slipstream.server.service import Service


def routes(service: Service) -> APIRouter:
    """All of them."""
    router = APIRouter()
    facts = service.facts
    described = {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "slipstream",
        "max_model_len": facts.context,
        "drafter": facts.drafter,
        "drafters": facts.drafters,
        "draft_tokens": facts.draft_tokens,
        "rule": facts.rule,
        "backend": facts.backend,
        "dtype": facts.dtype,
    }

    @router.get("/v1/models", summary="The models of this server")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(described)

    @router.post("/tokenize", summary="Token ids of a prompt or of messages")
    async def tokenize(request: Request) -> Response:
        body = await _body(request, ("model", "prompt", "messages", "return_token_strs"))
        if ("prompt" in body) == ("messages" in body):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if "messages" in body:
            ids = await asyncio.to_thread(conversation, service, body["messages"])
        elif not isinstance(body["prompt"], str):
            raise ApiError(400, "prompt must be text", "prompt")
        else:
            ids = await asyncio.to_thread(service.tokenizer.encode, body["prompt"])
        found: dict[str, Any] = {"count": len(ids), "max_model_len": facts.context, "tokens": ids}
        if flag(body, "return_token_strs"):
            found["token_strs"] = [service.token_text(token) for token in ids]
        return JSONResponse(found)

    @router.post("/detokenize", summary="Text of token ids")
    async def detokenize(request: Request) -> Response:
        body = await _body(request, ("model", "tokens"))
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < facts.vocab_size for each in ids):
            raise ApiError(400, f"tokens must be a list of ids from 0 to {facts.vocab_size - 1}", "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(service.tokenizer.decode, ids)})

    @router.get("/health", summary="200 while the engine lives")
    async def health() -> Response:
        if service.streams.dead is not None:
            service.check_up()
        return JSONResponse({"status": "ok"})

    @router.get("/ready", summary="200 while requests are taken")
    async def ready() -> Response:
        service.check_up()
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(request: Request, known: tuple[str, ...]) -> dict[str, Any]:
        body = {k: v for k, v in (await json_body(request, service.limits.body)).items() if v is not None}
        for name in body:
            if name not in known:
                raise ApiError(400, f"{name!r} is not a field of this request", name, "unknown_field")
        service.check_model(body.get("model"))
        return body

    return router
