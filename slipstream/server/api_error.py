"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}, all four keys always.

If a part of a request has no effect, this is not an error; it is logged once."""

import logging
from functools import lru_cache

from starlette.responses import JSONResponse

from slipstream.core.strict import JsonObject
from slipstream.errors import DeadEndError, EngineError, RequestError, RuleError, SlipstreamError

log = logging.getLogger("slipstream")

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
"""HTTP status -> type of the error. Other statuses: "invalid_request_error" below 500, "server_error" from 500."""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> type of the error in Anthropic's API."""

RETRY = (429, 503)
MOST_SHOWN = 2000


class ApiError(Exception):
    """An error that is the answer to a request. param: the wrong field; retry_after: seconds, sent with 429 and 503."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int = 1
    ):
        message = message if len(message) <= MOST_SHOWN else f"{message[:MOST_SHOWN]}..."  # may quote the request
        self.status, self.message, self.param, self.code = status, message, param and param[:MOST_SHOWN], code
        self.headers = {"Retry-After": str(retry_after)} if status in RETRY else {}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        super().__init__(message)

    @property
    def body(self) -> JsonObject:
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic(self) -> JsonObject:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def answer(self, path: str) -> JSONResponse:
        body = self.anthropic if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status, headers=self.headers)


def as_api_error(fault: Exception) -> ApiError:
    """Turn an exception into an `ApiError`. The answer to an unexpected exception names only its type."""
    if isinstance(fault, ApiError):
        return fault
    if isinstance(fault, (RequestError, RuleError)):
        return ApiError(400, str(fault))
    if isinstance(fault, DeadEndError):
        return ApiError(400, str(fault), code="dead_end")
    if isinstance(fault, EngineError):
        return ApiError(503, str(fault), code="engine_unavailable", retry_after=10)
    if isinstance(fault, SlipstreamError):
        return ApiError(500, str(fault), code="request_failed")
    return ApiError(500, f"internal error ({type(fault).__name__})", code="internal_error")


@lru_cache(maxsize=256)
def has_no_effect(what: str) -> None:
    """Log once that a part of a request has no effect."""
    log.warning("%s of a request has no effect here; this is logged only once", what)


def drop_members(given: JsonObject, where: str, *names: str) -> JsonObject:
    """Remove members that have no effect from an object of a request, and log them once."""
    for name in names:
        if given.pop(name, None) is not None:
            has_no_effect(f"{where}.{name}")
    return given
