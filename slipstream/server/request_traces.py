"""`Tracing`: a span of OpenTelemetry for each request, with the attributes of its conventions for generative AI.

Needs the extra `otel`. Without `--otlp-endpoint` nothing is traced, and nothing of this is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from slipstream import __version__
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
"""Parameters that have attributes `gen_ai.request.NAME`."""


class Tracing:
    """processor: what takes the spans."""

    def __init__(self, processor: SpanProcessor):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=Resource.create({"service.name": "slipstream"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("slipstream", __version__)

    @staticmethod
    def to(endpoint: str) -> Tracing:
        """Sends spans by OTLP over HTTP, in a thread. Raises ParameterError if the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as fault:
            raise ParameterError(
                f"traces cannot be sent to {endpoint}: {fault}", fix="pip install 'slipstream[otel]'"
            ) from fault
        return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))

    def begin(self, model: str, operation: str, n: int, params: SamplingParams, headers: Mapping[str, str]) -> Span:
        """The span of a request for n choices, below that of the client if its headers name one (W3C trace context)."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.choice.count": n,
        }
        for each in SAMPLING:
            if (value := getattr(params, each)) is not None:
                attributes[f"gen_ai.request.{each}"] = value
        if params.stop:
            attributes["gen_ai.request.stop_sequences"] = list(params.stop)
        return self._tracer.start_span(
            f"{operation} {model}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def end(
        self,
        span: Span,
        usage: Mapping[str, Any],
        ended: Seq[tuple[str, SpecStats | None]],
        wait: float | None,
        fault: BaseException | None,
    ) -> None:
        """End the span with what is known of the answer. ended: finish reason and statistics of each choice that ended;
        wait: seconds to the first token, None if there was none."""
        from opentelemetry.trace import Status, StatusCode

        stats = [each for _, each in ended if each is not None]
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "gen_ai.response.finish_reasons": [finish for finish, _ in ended],
                "slipstream.draft_tokens": sum(each.proposed for each in stats),
                "slipstream.accepted_tokens": sum(each.accepted for each in stats),
            }
        )
        if wait is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", wait)
        if fault is not None:
            span.set_attribute("error.type", type(fault).__name__)
            span.set_status(Status(StatusCode.ERROR, str(fault)))
        span.end()

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()
