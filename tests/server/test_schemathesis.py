"""Whatever is sent, right or wrong by /openapi.json: no error of the server, and errors in the form of the API."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from slipstream import LLM
from tests.server.hosting import Host, hosted

EXAMPLES = 12


@pytest.fixture(scope="module")
def small(pair: LLM) -> Iterator[Host]:
    """A server whose answers are short."""
    with hosted(pair) as made:
        made.service.facts = replace(made.service.facts, context=64)
        yield made


def check(host: Host, response: Any, path: str) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == ({"type", "message"} if path.startswith("/v1/messages") else FORM), response.text
        assert error["message"]


FORM = {"message", "type", "param", "code"}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_request_is_answered_with_an_error_of_the_server(small: Host, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{small.url}/openapi.json").json())
    tried = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if not operation.body:  # it takes nothing that could be wrong
            continue

        @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            check(small, case.call(base_url=small.url), case.path)
            tried.add(case.path)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ask()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= tried
    assert small.http.get("/health").status_code == 200
    assert small.service.admitted == 0
