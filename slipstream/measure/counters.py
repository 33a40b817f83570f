"""Reads the counters of servers at /metrics (Prometheus), and converts them to the terms of `slipstream.core.stats`.

`NAMES` is the only place with the servers' own names of these counters; docs/server.md shows the same table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, chain
from math import ceil
from operator import add, sub

from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError

SERVERS = {"slipstream": "Slipstream", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama-server"}
"""Prefix of the names -> server. Slipstream may use vLLM's prefix for most names, and its own for the others."""
NAMES = {
    "drafts": ("spec_decode_num_drafts_total", "spec_verify_calls_total", "spec_decode_num_drafts_total"),
    "draft_tokens": ("spec_decode_num_draft_tokens_total", "", "spec_decode_num_draft_tokens_total"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens_total", "", "spec_decode_num_accepted_tokens_total"),
    "accepted_at": (
        "spec_decode_num_accepted_tokens_per_pos_total", "", "spec_decode_num_accepted_tokens_per_pos_total"
    ),
    "output_tokens": ("generation_tokens_total", "generation_tokens_total", "tokens_predicted_total"),
    "requests": ("request_success_total", "num_requests_total", ""),
    "preemptions": ("num_preemptions_total", "num_retracted_requests_total", ""),
    "prefix_queries": (
        "prefix_cache_queries_total", "prompt_tokens_total", "prompt_tokens_total + prompt_tokens_cached_total"
    ),
    "prefix_hits": ("prefix_cache_hits_total", "cached_tokens_total", "prompt_tokens_cached_total"),
    "running": ("num_requests_running", "num_running_reqs", "requests_processing"),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "requests_deferred"),
    "kv_usage": ("kv_cache_usage_perc", "token_usage", ""),
    "accept_length": ("", "spec_accept_length", ""),
    "first_tokens": ("time_to_first_token_seconds_count", "", ""),
    "decode_seconds": ("inter_token_latency_seconds_sum", "", ""),
    "engine_steps": ("iteration_tokens_total_count", "", ""),
}  # fmt: skip
"""Quantity -> (name of vLLM and Slipstream, of SGLang, of llama-server), without prefix; "": not reported."""
OF_SLIPSTREAM = {"output_tokens": "request_generation_tokens_sum", "first_tokens": "request_success_total",
                 "decode_seconds": "request_decode_time_seconds_sum", "engine_steps": ""}  # fmt: skip
"""Quantity -> name in Slipstream, where it differs from vLLM. Slipstream counts drafts when a choice ends, so tokens
and times that are compared with drafts must come from choices that have ended, too."""
NOW = ("running", "waiting", "kv_usage", "accept_length", "engines", "began")
"""Quantities that are valid at one moment; all others count from the start of the server. engines: number of engines
that report requests; began: time at which the process was started, 0 if the page does not show it."""
MEANS = ("kv_usage", "accept_length")
"""Quantities for which the largest value of several engines is taken, not the sum."""
NOT_REPORTED = "not reported"


def name_of(quantity: str, server: str) -> str:
    """Return the name of a quantity on the page of a server; "" if the server does not report it."""
    if server == "slipstream" and quantity in OF_SLIPSTREAM:
        return OF_SLIPSTREAM[quantity]
    return NAMES[quantity][{"sglang": 1, "llamacpp": 2}.get(server, 0)]


@dataclass(frozen=True)
class Counters:
    """The counters of a server. server: key of `SERVERS`. values: quantity -> value, only for reported quantities;
    "accepted_at 1" is position 1. models: names of the models whose counters are on the page."""

    server: str
    values: Mapping[str, float]
    models: tuple[str, ...] = ()

    def has_restarted(self, before: Counters) -> bool:
        """Return True if the server was restarted since `before`: its start time differs, or a counter fell."""
        fell = (self.values.get(key, 0.0) < n for key, n in before.values.items() if key not in NOW)
        return self.values.get("began") != before.values.get("began") or any(fell)

    def since(self, before: Counters) -> Counters:
        """Return by how much the counters have grown since `before`, or since a later restart of the server."""
        return self if self.has_restarted(before) else self._with(before, sub)

    def __add__(self, later: Counters) -> Counters:
        return later._with(self, add)

    def _with(self, former: Counters, join: Callable[[float, float], float]) -> Counters:
        joined = {key: n if key in NOW else join(n, former.values.get(key, 0.0)) for key, n in self.values.items()}
        return replace(self, values=joined)

    def as_dict(self) -> JsonObject:
        """Return plain JSON values; None for a figure that is not reported.

        accepted_at             for position 1, 2, ...: share of the drafts whose token there was accepted.
        acceptance_rate         accepted draft tokens over verified ones.
        mean_acceptance_length  mean output tokens of a step that drafted, the bonus token included.
        tokens_per_step         output tokens over all steps: a step gives one token and the accepted draft tokens.
        """
        figures: JsonObject = {name: self.values.get(name) for name in NAMES}
        drafts, drafted, accepted, _, output, requests, *_ = figures.values()
        if accepted is None and drafts and None not in (output, requests):
            # Prefill gives a request's first token; each verification adds one to its accepted draft tokens.
            accepted = figures["accepted_tokens"] = max(0.0, output - drafts - requests)
        positions = sum(key.startswith("accepted_at ") for key in self.values)
        at = [self.values.get(f"accepted_at {i}", 0.0) for i in range(1, positions + 1)]
        if drafts and drafted and (at or not accepted):
            at += [0.0] * (ceil(drafted / drafts) - len(at))
            figures["accepted_at"] = list(accumulate((min(1.0, n / drafts) for n in at), min))
        steps = (output or 0) - (accepted or 0)
        return figures | {
            "server": self.server,
            "models": list(self.models),
            "engines": self.values.get("engines"),
            "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
            "mean_acceptance_length": 1 + accepted / drafts if drafts and accepted is not None else None,
            "tokens_per_step": output / steps if output and steps > 0 else None,
        }


def add_counters(parts: Iterable[Counters | None]) -> Counters | None:
    """Add the counters of several passes; None if a pass has none."""
    every = list(parts)
    return reduce(add, every) if every and all(every) else None


def read_counters(text: str) -> Counters | None:
    """Read the counters of a page in Prometheus's text format; None for an unknown server. Counters of several engines
    or models are added. The KV cache is reported for the fullest engine."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as fault:
        raise ParameterError("prometheus-client is not installed", fix="pip install 'slipstream[bench]'") from fault
    prefixes, seen, models, began = set(), defaultdict(list), set(), 0.0
    try:
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            prefix, _, name = sample.name.partition(":")
            if prefix in SERVERS and not sample.labels.get("priority"):
                prefixes.add(prefix)
                seen[name].append((sample.labels.get("position"), sample.value))
                models |= {sample.labels["model_name"]} if "model_name" in sample.labels else set()
            began = sample.value if sample.name == "process_start_time_seconds" else began
    except ValueError:  # a page in another format
        return None
    server = next((prefix for prefix in SERVERS if prefix in prefixes), None)
    if server is None:
        return None
    values: dict[str, float] = defaultdict(float)
    for quantity in NAMES:
        names = name_of(quantity, server).split(" + ")
        for position, value in chain(*(seen[name] for name in names)) if all(seen.get(n) for n in names) else ():
            key = quantity if position is None else f"{quantity} {int(position) + 1}"
            values[key] = max(values[key], value) if key in MEANS else values[key] + value
    values |= {"engines": len(seen[name_of("running", server)]), "began": began}
    return Counters(server, dict(values), tuple(sorted(models)))
