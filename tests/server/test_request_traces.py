"""A span for each request, with the attributes of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from slipstream import LLM
from slipstream.errors import ParameterError
from slipstream.server.request_traces import Tracing
from slipstream.server.service import Limits
from tests.server.hosting import eventually, hosted
from tests.server.talking import USER

PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"


def attributes(span: Any) -> Mapping[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_below_that_of_its_client(pair: LLM, stream: bool) -> None:
    exporter = InMemorySpanExporter()
    with hosted(pair, tracing=Tracing(SimpleSpanProcessor(exporter))) as host:
        body = {"messages": USER, "temperature": 0, "max_tokens": 8, "stop": ["§"], "n": 2, "stream": stream}
        parent = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-01"}
        assert host.http.post("/v1/chat/completions", json=body, headers=parent).status_code == 200
        eventually(exporter.get_finished_spans)
        (span,) = exporter.get_finished_spans()
        assert (span.name, span.kind) == ("chat embedded", SpanKind.SERVER)
        assert f"{span.context.trace_id:032x}" == PARENT
        found = attributes(span)
        prompt = len(host.post("/tokenize", messages=USER).json()["tokens"])
        assert found["gen_ai.usage.input_tokens"] == prompt
        assert found["gen_ai.usage.output_tokens"] == 16
        assert found["gen_ai.response.finish_reasons"] == ("length", "length")
        assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (8, 0)
        assert (found["gen_ai.request.choice.count"], found["gen_ai.request.stop_sequences"]) == (2, ("§",))
        assert found["gen_ai.response.time_to_first_chunk"] > 0
        assert found["slipstream.accepted_tokens"] <= found["slipstream.draft_tokens"]
        assert span.status.status_code == StatusCode.UNSET
        exporter.clear()
        host.post("/v1/completions", prompt="a", max_tokens=1)
        assert [each.name for each in exporter.get_finished_spans()] == ["text_completion embedded"]


def test_a_request_that_fails_is_a_span_with_an_error(pair: LLM) -> None:
    exporter = InMemorySpanExporter()
    with hosted(pair, Limits(total_seconds=1e-6), tracing=Tracing(SimpleSpanProcessor(exporter))) as host:
        assert host.post("/v1/completions", prompt="a").status_code == 503
        (span,) = exporter.get_finished_spans()
        assert span.status.status_code == StatusCode.ERROR
        assert attributes(span)["error.type"] == "ApiError"
        assert attributes(span)["gen_ai.usage.output_tokens"] == 0


def test_without_the_extra_an_endpoint_is_refused_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ParameterError, match=r"slipstream\[otel\]"):
        Tracing.to("http://127.0.0.1:4318")
