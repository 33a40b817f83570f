"""The small endpoints: models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from slipstream.server.api_error import ApiError
from slipstream.server.chat_requests import conversation
from slipstream.server.fields import CHAT, Field, body_schema, fields_of, flag
from slipstream.server.request_body import request_fields
from slipstream.server.service import Service

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


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    facts = service.facts
    described = {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "slipstream",
        "max_model_len": facts.context,
        "drafter": facts.drafter,
        "drafters": {} if facts.drafter == "none" else {facts.drafter: facts.draft_tokens},
        "draft_tokens": facts.draft_tokens,
        "rule": facts.rule,
        "backend": facts.backend,
        "weights": facts.weights,
    }

    @router.get("/v1/models", summary="The models of this server")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(described)

    @router.post("/tokenize", openapi_extra=body_schema(TOKENIZE, []), summary="Token ids of a prompt or of messages")
    async def tokenize(request: Request) -> Response:
        body = await request_fields(request, service, TOKENIZE)
        if ("prompt" in body) == ("messages" in body):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if "messages" in body:
            ids = (await asyncio.to_thread(conversation, service, body)).ids
        elif not isinstance(body["prompt"], str):
            raise ApiError(400, "prompt must be text", "prompt")
        else:
            ids = await asyncio.to_thread(service.tokenizer.encode, body["prompt"])
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": facts.context, "tokens": ids}
        if flag(body, "return_token_strs"):
            answer["token_strs"] = [service.token_text(token) for token in ids]
        return JSONResponse(answer)

    @router.post("/detokenize", openapi_extra=body_schema(DETOKENIZE, ["tokens"]), summary="Text of token ids")
    async def detokenize(request: Request) -> Response:
        body = await request_fields(request, service, DETOKENIZE)
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

    @router.post("/v1/load_lora_adapter", include_in_schema=False)
    @router.post("/v1/unload_lora_adapter", include_in_schema=False)
    async def adapters() -> Response:
        raise ApiError(400, "a LoRA adapter is merged when the model is loaded: start the server with --lora")

    return router
