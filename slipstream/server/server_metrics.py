"""`ServerMetrics`: what /metrics shows, under vLLM's names with `slipstream:` instead of `vllm:`.

docs/server.md defines each; tests compare the two.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slipstream.core.stats import SpecStats
from slipstream.engine.messages import Load, Report

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_COUNTED = {
    "num_preemptions": ("preemptions", "Requests that lost their KV cache for others and were read again."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "engine_steps": ("steps", "Steps of the engine."),
    "corrupted_requests": ("errors", "Requests that failed while they ran, for example by logits that are NaN."),
}
"""Metric -> (field of `Load`, help)."""


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model: str, context: int):
        self.registry = CollectorRegistry()
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slipstream:{name}", text, ("model_name", *labels), registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"slipstream:{name}", text, ("model_name",), registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"slipstream:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
            return made.labels(model)

        self.running = gauge("num_requests_running", "Requests in the batch, prompts that are being read included.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for room in the batch.")
        self.kv = gauge("kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.")
        self._loads = {name: counter(name, text).labels(model) for name, (_, text) in _COUNTED.items()}
        self._last = Load()
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of requests that gave a token, and of those only scored."
        ).labels(model)
        self.output_tokens = counter("generation_tokens", "Output tokens.").labels(model)
        self.refused = counter("requests_refused", "Requests refused because the queue was full.").labels(model)
        self._finished = counter("request_success", "Choices that ended, by finish reason.", "finished_reason")
        self.iteration_tokens = histogram("iteration_tokens_total", "Output tokens of one step.", TOKENS)
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.between = histogram(
            "inter_token_latency_seconds", "Time between two updates over the tokens of the later one.", SECONDS
        )
        self.total = histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self.inference = histogram("request_inference_time_seconds", "From the first step to the last token.", SECONDS)
        self.prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", SECONDS)
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a choice.", TOKENS)
        self.output_length = histogram("request_generation_tokens", "Output tokens of a choice.", TOKENS)
        self.params_n = histogram("request_params_n", "The parameter n.", (1, 2, 4, 8, 16, 32, 64, 128))
        self.params_max = histogram("request_params_max_tokens", "The parameter max_tokens.", TOKENS)
        self._drafts = counter("spec_decode_num_drafts", "Steps of finished choices in which tokens were drafted.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens of finished choices that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens of finished choices, accepted.")
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth, from 0.", "position"
        )
        for family in (self._drafts, self._drafted, self._accepted):
            family.labels(model)  # shown from the start

    def heard(self, report: Report) -> None:
        """Take the report of a step."""
        load, last = report.load, self._last
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv.set(load.kv_usage)
        for name, (part, _) in _COUNTED.items():  # an engine that has died counts nothing, and the next one anew
            self._loads[name].inc(max(0, getattr(load, part) - getattr(last, part)))
        self._last = load
        gained = sum(len(update.ids) for update in report.updates if not update.given)
        if gained:
            self.output_tokens.inc(gained)
            self.iteration_tokens.observe(gained)

    def ended(self, reason: str, prompt: int, output: int, stats: SpecStats | None) -> None:
        """Count a choice that ended: "stop", "length", "abort" or "error"."""
        self._finished.labels(self._model, reason).inc()
        if stats is None:
            return
        self.prompt_length.observe(prompt)
        self.output_length.observe(output)
        self._drafts.labels(self._model).inc(stats.steps - stats.undrafted)
        self._drafted.labels(self._model).inc(stats.proposed)
        self._accepted.labels(self._model).inc(stats.accepted)
        for depth, count in stats.accepted_at.items():
            self._per_position.labels(self._model, str(depth - 1)).inc(count)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)
