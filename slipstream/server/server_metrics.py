"""`ServerMetrics`: the metrics of /metrics, with vLLM's names and labels, and our prefix or vLLM's.

docs/server.md defines each metric; tests compare this file with that page.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slipstream.core.stats import SpecStats
from slipstream.engine.messages import EngineStats, Report
from slipstream.settings import METRICS_PREFIXES

T = TypeVar("T")
PREFIX = METRICS_PREFIXES[0]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

NOT_OF_VLLM = frozenset({"engine_steps", "requests_refused", "corrupted_requests", "iteration_tokens_total"})
"""Metrics that vLLM does not have, or that count something else in vLLM: they always have our prefix."""


@dataclass
class Work:
    """Tokens since the last call of `describe_work`. Reading Prometheus counters instead would collect all metrics."""

    output: int = 0
    drafted: int = 0
    accepted: int = 0


_COUNTED = {
    "num_preemptions": (
        "preemptions",
        "Preemptions: times a request lost its KV cache to other requests and was prefilled again.",
    ),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "engine_steps": ("steps", "Steps of the engine."),
    "corrupted_requests": ("errors", "Requests that failed while they ran, for example because of NaN logits."),
}
"""Metric -> (field of `EngineStats`, help)."""


class ServerMetrics:
    """All metrics of a server, in their own registry. prefix: see `METRICS_PREFIXES`; kv_blocks: see `EngineFacts`."""

    def __init__(self, model: str, prefix: str = PREFIX, kv_blocks: tuple[int, int] | None = None):
        self.registry = CollectorRegistry()
        self._labels = model, "0"  # names of the model and of the only engine
        self._work = Work()

        def add_metric(kind: Callable[..., T], name: str, text: str, *labels: str, **more: object) -> T:
            full = f"{PREFIX if name in NOT_OF_VLLM else prefix}:{name}"
            return kind(full, text, ("model_name", "engine", *labels), registry=self.registry, **more)

        def add_counter(name: str, text: str) -> Counter:
            return add_metric(Counter, name, text).labels(*self._labels)

        def add_gauge(name: str, text: str) -> Gauge:
            return add_metric(Gauge, name, text).labels(*self._labels)

        def add_histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return add_metric(Histogram, name, text, buckets=buckets).labels(*self._labels)

        self.running = add_gauge("num_requests_running", "Requests in the batch, including requests in prefill.")
        self.waiting = add_gauge("num_requests_waiting", "Requests that wait for a place in the batch.")
        self.kv = add_gauge("kv_cache_usage_perc", "Share of the KV cache that requests use, 0 to 1.")
        if kv_blocks is not None:
            labels = ("block_size", "num_gpu_blocks", "engine")
            text = "Always 1. Its labels are the tokens in a block of the KV cache, and the number of blocks."
            Gauge(f"{prefix}:cache_config_info", text, labels, registry=self.registry).labels(*kv_blocks, "0").set(1)
        self._counts = {name: add_counter(name, text) for name, (_, text) in _COUNTED.items()}
        self._last = EngineStats()
        self.prompt_tokens = add_counter(
            "prompt_tokens", "Prompt tokens of requests that generated a token or scored their prompt."
        )
        self.output_tokens = add_counter("generation_tokens", "Output tokens.")
        self.refused = add_counter("requests_refused", "Requests refused because the queue was full.")
        self._finished = add_metric(
            Counter, "request_success", "Choices that ended, by finish reason.", "finished_reason"
        )
        self.iteration_tokens = add_histogram("iteration_tokens_total", "Output tokens of one step.", TOKENS)
        self.first = add_histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.between = add_histogram(
            "inter_token_latency_seconds", "Time between updates of a choice, divided by the new tokens.", SECONDS
        )
        self.per_token = add_histogram(
            "request_time_per_output_token_seconds", "Time of a choice after its first token, per token.", SECONDS
        )
        self.total = add_histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self.queue = add_histogram("request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self.inference = add_histogram(
            "request_inference_time_seconds", "From the first step to the last token.", SECONDS
        )
        self.prefill = add_histogram("request_prefill_time_seconds", "From the first step to the first token.", SECONDS)
        self.decode = add_histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self.prompt_length = add_histogram("request_prompt_tokens", "Prompt tokens of a choice.", TOKENS)
        self.output_length = add_histogram("request_generation_tokens", "Output tokens of a choice.", TOKENS)
        self.params_n = add_histogram("request_params_n", "The parameter n.", (1, 2, 4, 8, 16, 32, 64, 128))
        self.params_max = add_histogram("request_params_max_tokens", "The parameter max_tokens.", TOKENS)
        self._drafts = add_counter("spec_decode_num_drafts", "Steps with a draft, of finished choices.")
        self._drafted = add_counter(
            "spec_decode_num_draft_tokens", "Draft tokens of finished choices that were verified."
        )
        self._accepted = add_counter("spec_decode_num_accepted_tokens", "Accepted draft tokens of finished choices.")
        self._per_position = add_metric(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position, from 0.", "position"
        )

    def take_report(self, report: Report) -> None:
        stats, last = report.stats, self._last
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv.set(stats.kv_usage)
        for name, (part, _) in _COUNTED.items():  # an engine that has died counts nothing
            self._counts[name].inc(max(0, getattr(stats, part) - getattr(last, part)))
        self._last = stats
        gained = sum(len(update.ids) for update in report.updates if not update.given)
        if gained:
            self.output_tokens.inc(gained)
            self._work.output += gained
            self.iteration_tokens.observe(gained)

    def count_choice(self, reason: str, prompt: int, output: int, stats: SpecStats | None) -> None:
        """Count a choice that ended. reason: "stop", "length", "abort" or "error"."""
        self._finished.labels(*self._labels, reason).inc()
        if stats is None:
            return
        self.prompt_length.observe(prompt)
        self.output_length.observe(output)
        self._drafts.inc(stats.steps - stats.undrafted)
        self._drafted.inc(stats.proposed)
        self._accepted.inc(stats.accepted)
        self._work.drafted += stats.proposed
        self._work.accepted += stats.accepted
        for depth, count in stats.accepted_at.items():
            self._per_position.labels(*self._labels, str(depth - 1)).inc(count)

    def describe_work(self, seconds: float) -> str:
        """Return a line about the work since the last call, `seconds` ago: throughput, acceptance rate of the choices
        that ended, and queue. Returns "" if no request ran or waited."""
        work, last = self._work, self._last
        self._work = Work()
        if not (work.output or last.running or last.waiting):
            return ""
        rate = f", acceptance rate {work.accepted / work.drafted:.0%}" if work.drafted else ""
        return f"{work.output / seconds:.0f} tokens/s{rate}, {last.running} running, {last.waiting} waiting"

    def render(self) -> bytes:
        return generate_latest(self.registry)
