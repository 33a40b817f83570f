"""What goes to an engine thread and what comes back: plain values, which may cross a pipe between two processes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats, TokenLogprob


@dataclass(frozen=True, slots=True)
class Ask:
    """A request.

    ids     the prompt, checked.
    params  checked and resolved (see `RequestChecks`).
    rule    name of the rule that verifies it; None: that of the model.
    prediction  tokens that the output is expected to hold (see `Sequence`).
    """

    ids: list[int]
    params: SamplingParams
    rule: str | None = None
    prediction: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What one step added to a request.

    key         of the request, as it was given to `EngineThread.submit`.
    ids         new output tokens; drafted, proposers (see `Sequence`) and logprobs (None unless asked for) have one
                entry for each.
    finish      "stop" or "length" in the last update, else None; `stop_cause` and `stats` come with it.
    error       what ended the request; then there is nothing else.
    started     when its first step began, in seconds of `time.monotonic`; ended: when this one ended.
    cached      prompt tokens whose KV was that of an earlier request.
    given       whether the ids are a text that was given to be scored (`Structured.tokens`), not output.
    lossless    whether the rule preserves the target's distribution.
    """

    key: int
    ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    proposers: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    stop_cause: int | str | None = None
    stats: SpecStats | None = None
    error: Exception | None = None
    started: float = 0.0
    ended: float = 0.0
    cached: int = 0
    lossless: bool = True
    given: bool = False


@dataclass(slots=True)
class Load:
    """What an engine holds and has counted.

    running, waiting  requests.
    kv_usage          share of the KV cache that requests hold, 0 to 1. Of a cache that grows: of the most that
                      `max_batch` requests of the full context need.
    steps, preemptions, errors  of the engine. prefix_queries, prefix_hits: see `SharedPrefixes`.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    preemptions: int = 0
    errors: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """One message a step. dead: why the engine has stopped for good, or None."""

    updates: list[Update]
    load: Load
    dead: Exception | None = None
