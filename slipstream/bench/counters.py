"""Counters that servers show at /metrics, for Prometheus, in our definitions (`slipstream.core.stats`).

`NAMES` is the only place that knows how a server calls them; docs/server.md shows the same table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ParameterError

SERVERS = ("slipstream", "vllm", "sglang", "llamacpp")
"""Prefixes of the names. Slipstream may have vLLM's for most, and its own for others."""
NAMES = {
    "drafts": ("spec_decode_num_drafts_total", "spec_verify_calls_total", "spec_decode_num_drafts_total"),
    "draft_tokens": ("spec_decode_num_draft_tokens_total", "", "spec_decode_num_draft_tokens_total"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens_total", "", "spec_decode_num_accepted_tokens_total"),
    "output_tokens": ("generation_tokens_total", "generation_tokens_total", "tokens_predicted_total"),
    "requests": ("request_success_total", "num_requests_total", ""),
}
"""Quantity -> its names without prefix: of vLLM and Slipstream, of SGLang, of llama-server; "": not reported."""


def name_of(quantity: str, server: str) -> str:
    """What a server calls it; "" if it does not report it."""
    return NAMES[quantity][{"sglang": 1, "llamacpp": 2}.get(server, 0)]


@dataclass(frozen=True)
class Counters:
    """server: one of `SERVERS`. values: by quantity; none for what is not reported."""

    server: str
    values: Mapping[str, float]

    def since(self, before: Counters) -> Counters:
        """By how much they have grown. One that fell began anew: the server was restarted."""
        former = {name: before.values.get(name, 0.0) for name in self.values}
        grown = {name: n - former[name] if n >= former[name] else n for name, n in self.values.items()}
        return Counters(self.server, grown)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; None for what is not reported.

        acceptance_rate         accepted draft tokens over verified ones.
        mean_acceptance_length  tokens of a step in which tokens were drafted, the bonus token included.
        tokens_per_step         output tokens over all steps: a step gives one token and those that it accepts.
        """
        figures: dict[str, Any] = {name: self.values.get(name) for name in NAMES}
        drafts, drafted, accepted, output, requests = figures.values()
        if accepted is None and drafts and None not in (output, requests):
            # A request's first token is its prefill's, and each verification adds one to those that it accepts.
            accepted = figures["accepted_tokens"] = max(0.0, output - drafts - requests)
        steps = (output or 0) - (accepted or 0)
        return figures | {
            "server": self.server,
            "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
            "mean_acceptance_length": 1 + accepted / drafts if drafts and accepted is not None else None,
            "tokens_per_step": output / steps if output and steps > 0 else None,
        }


def total(parts: Iterable[Counters | None]) -> Counters | None:
    """Those of several passes; None if one has none."""
    every = list(parts)
    known = [part for part in every if part]
    if not known or len(known) < len(every):
        return None
    names = known[-1].values
    return Counters(known[-1].server, {name: sum(part.values.get(name, 0.0) for part in known) for name in names})


def read_counters(text: str) -> Counters | None:
    """The counters of a page in Prometheus's text format; None if it is not one of a known server. Those of several
    engines are added."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as fault:
        raise ParameterError("prometheus-client is not installed", fix="pip install 'slipstream[bench]'") from fault
    prefixes, sums = set[str](), defaultdict[str, float](float)
    try:
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            prefix, _, name = sample.name.partition(":")
            if prefix in SERVERS and not sample.labels.get("priority"):
                prefixes.add(prefix)
                sums[name] += sample.value
    except ValueError:  # a page of another kind
        return None
    server = next((prefix for prefix in SERVERS if prefix in prefixes), None)
    if server is None:
        return None
    names = {quantity: name_of(quantity, server) for quantity in NAMES}
    return Counters(server, {quantity: sums[name] for quantity, name in names.items() if name in sums})
