"""`slipstream tune --base-url URL --follow`: when speculation stops paying on a running server, and when it pays again.

The counters are read again and again. Each window of them is judged as by `tune --base-url` (see `diagnosis_served`); a
change is said when two windows in a row agree. A window that decides nothing alone is compared with earlier ones:

    pays      it paid under at least this load, with no more tokens a step than now
    does not  it did not pay under at most this load, with at least as many tokens a step
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.counters import SERVERS, Counters
from slipstream.bench.endpoint import Endpoint
from slipstream.bench.tables import counted, times
from slipstream.bench.traffic_client import TrafficClient
from slipstream.errors import ServedError
from slipstream.plan.diagnosis import ACCEPTANCE, NOTHING
from slipstream.plan.diagnosis_served import COSTLY, OFF, PARTS, SELDOM, judge

PAYS, COSTS, UNDECIDED = "speculation pays", "speculation does not pay", "whether speculation pays cannot be told"
RESTARTED, LOST = "the server was restarted: its counters went backwards", "the server reports no counters"
VERDICTS = {NOTHING: PAYS, ACCEPTANCE: COSTS, SELDOM: COSTS, COSTLY: COSTS}
CONFIRMED = 2
"""Windows in a row that have to agree before a change is said: one alone may be a moment."""
LIKE = 1.02
"""Windows with so much of the tokens a step of another one have as many: they are estimates."""


@dataclass(frozen=True)
class Window:
    """The judgement of one window. running: requests at once; tokens: of a decode step of a request."""

    verdict: str
    running: float
    tokens: float
    diagnosis: dict[str, Any]
    server: str


@dataclass
class PayWatch:
    """Turns samples of counters into events. c: see `diagnose_served`. state: what was said last."""

    c: float
    state: str | None = None
    _samples: list[Counters] = field(default_factory=list)
    _agreeing: list[str] = field(default_factory=list)  # verdicts of the last windows that decided something
    _known: list[Window] = field(default_factory=list)  # windows that decided something by themselves

    def add(self, sample: Counters | None) -> dict[str, Any] | None:
        """Add what the server reports now, None if nothing. Return the event that this is, if it is one."""
        if sample is None:
            return self._begin_again(LOST)
        if self._samples and sample.restarted(self._samples[-1]):
            event = self._begin_again(RESTARTED)
            self._samples = [sample]
            return event
        self._samples.append(sample)
        if len(self._samples) <= PARTS:
            return None
        judged, self._samples = judge(self._samples, self.c), self._samples[-1:]
        return self._decided(judged)

    def _begin_again(self, why: str) -> dict[str, Any] | None:
        """Forget what was seen: another setting may run now."""
        self._samples, self._agreeing, self._known = [], [], []
        said, self.state = self.state == why, why
        return None if said else {"event": why}

    def _decided(self, judged: dict[str, Any]) -> dict[str, Any] | None:
        counters, diagnosis = judged["counters"], judged["diagnosis"]
        if not counters["output_tokens"] and not counters["running"]:
            return None  # nobody asks: nothing changes
        alone = VERDICTS.get(diagnosis["cause"], UNDECIDED)
        window = Window(
            alone, counters["running"] or 0.0, counters["tokens_per_step"] or 1.0, diagnosis, counters["server"]
        )
        verdict = alone
        if alone != UNDECIDED:
            self._known.append(window)
        elif diagnosis["cause"] != OFF:
            verdict = next((each.verdict for each in reversed(self._known) if _decides(each, window)), UNDECIDED)
        if verdict == UNDECIDED:
            return self._say(verdict, window) if self.state not in (PAYS, COSTS, UNDECIDED) else None
        self._agreeing = [*self._agreeing, verdict][-CONFIRMED:]
        if verdict == self.state or (self.state in (PAYS, COSTS) and self._agreeing != [verdict] * CONFIRMED):
            return None
        return self._say(verdict, window)

    def _say(self, verdict: str, window: Window) -> dict[str, Any]:
        self.state, known = verdict, window.diagnosis["forecast"] or {}
        event = {
            "event": verdict,
            "running": round(window.running, 1),
            "tokens_per_step": round(window.tokens, 3),
            "at_most": known.get("most"),
            "measured": known.get("measured"),
            "reason": window.diagnosis["reason"],
            "fix": window.diagnosis["fix"],
        }
        if window.server == "llamacpp" and verdict != UNDECIDED:  # the only one whose requests say how much is drafted
            event["send"] = {"speculative.n_max": 0 if verdict == COSTS else known.get("best_length")}
        return event


def _decides(known: Window, now: Window) -> bool:
    """Return whether a window that was judged decides another one: a step gains less the more requests share it, and
    the fewer tokens it gives."""
    if known.verdict == PAYS:
        return now.running <= known.running and now.tokens * LIKE >= known.tokens
    return now.running >= known.running and now.tokens <= LIKE * known.tokens


def line_of(event: dict[str, Any]) -> str:
    """Write an event for people."""
    said = f"{event['at']} {event['event']}"
    if "running" not in event:
        return said
    load = f"{counted(max(1, round(event['running'])), 'request')} at once, {times(event['tokens_per_step'])[:-1]}"
    said += f", with {load} tokens a step: {event['reason']}"
    if "send" in event:
        return f'{said}. Send "speculative.n_max": {event["send"]["speculative.n_max"]}'
    return f"{said}. Fix: {event['fix']}" if event["fix"] else said


async def follow(place: Endpoint, window: float, c: float, limit: float) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a server, each with the time "at". window: seconds of each judgement; limit: seconds after
    which to stop; 0: never. Raises ServedError if there are no counters at the beginning."""
    watched, began = PayWatch(c), time.monotonic()
    async with TrafficClient(place, place.timeout) as client:
        sample = await client.counters()
        if sample is None:
            servers = ", ".join(SERVERS.values())
            raise ServedError(
                f"{place.base_url} reports no counters of {servers}", fix="start it with its metrics, as the docs say"
            )
        while True:
            event = watched.add(sample)
            if event is not None:
                yield {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event}
            if limit and time.monotonic() - began >= limit:
                return
            await asyncio.sleep(window / PARTS)
            sample = await client.counters()
