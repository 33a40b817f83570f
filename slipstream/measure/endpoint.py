"""`Endpoint`: an OpenAI-compatible server, which completes text prompts with logprobs, as `verify` needs them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.strict import JsonObject, parse_json
from slipstream.errors import ParameterError, ServedError


@dataclass(frozen=True)
class Answer:
    """One completion. tokens: the text of each token. Without logprobs, `tokens`, `logprobs` and `top` are empty.

    logprobs  log-probability of each token.
    top       for each position, the most likely tokens with their log-probabilities.
    """

    text: str
    tokens: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    base_url  URL with the API's version, such as "http://localhost:8000/v1".
    model     name of the model; "" takes the first one that the server lists.
    timeout   seconds that one request may take.

    The API key is OPENAI_API_KEY of the environment, if there is one. Every method raises ServedError if the server
    cannot be reached or refuses the request.
    """

    base_url: str
    model: str = ""
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ParameterError(
                f"the URL is {self.base_url!r}, but must begin with http:// or https://",
                fix="write it as in http://localhost:8000/v1",
            )

    def resolve(self) -> Endpoint:
        """Return this endpoint with the name of its model filled in."""
        return self if self.model else replace(self, model=self.describe()["id"])

    def describe(self) -> JsonObject:
        """Return the server's description of its model."""
        answer = self._call("/models", None)
        listed = (answer.get("data") if isinstance(answer, dict) else None) or []
        matching = [each for each in listed if self.model in ("", each.get("id"))]
        if not matching:
            raise ServedError(
                f"{self.base_url}/models lists no model" + f" named {self.model}" * bool(self.model),
                fix="give the name of a listed model with --served-model",
            )
        return dict(matching[0])

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every request: the API key, if there is one."""
        key = os.environ.get("OPENAI_API_KEY", "")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def complete(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        logprobs: int,
        more: Mapping[str, object] | None = None,
    ) -> Answer:
        """Complete a text prompt. logprobs: number of alternatives to report; more: further parameters."""
        asked: JsonObject = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
            "logprobs": logprobs, **(more or {}),
        }  # fmt: skip
        answer = self._call("/completions", asked)
        try:
            choice = answer["choices"][0]
            seen = choice.get("logprobs") or {}
            return Answer(
                choice["text"], list(seen.get("tokens") or []), list(seen.get("token_logprobs") or []),
                [dict(each or {}) for each in seen.get("top_logprobs") or []],
            )  # fmt: skip
        except (KeyError, IndexError, TypeError) as fault:
            raise ServedError(
                f"{self.base_url} answered, but not with a completion: {json.dumps(answer)[:200]}",
                fix="give the URL of an OpenAI-compatible server; it usually ends in /v1",
            ) from fault

    def _call(self, path: str, body: JsonObject | None) -> Any:
        request = urllib.request.Request(
            self.base_url.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} | self.headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return parse_json(answer.read())
        except urllib.error.HTTPError as fault:
            said = fault.read().decode(errors="replace")[:300]
            raise ServedError(f"{self.base_url}{path} answered with HTTP status {fault.code}: {said}") from fault
        except (urllib.error.URLError, OSError) as fault:
            raise ServedError(
                f"{self.base_url} cannot be reached: {getattr(fault, 'reason', fault)}",
                fix="start the server, or check the URL",
            ) from fault
        except ValueError as fault:
            raise ServedError(f"{self.base_url}{path} did not answer with JSON") from fault
