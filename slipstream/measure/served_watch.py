"""`slipstream tune --base-url URL --follow`: reports when speculation stops or starts to pay on a running server.

The counters are read repeatedly. `diagnosis_served` judges each window of time between two readings; a change is
reported when two windows in a row agree. A window without a verdict of its own is compared with earlier windows:

    pays      speculation paid in a window with at least this load, and with no more tokens per step than now
    does not  speculation did not pay in a window with at most this load, and with at least as many tokens per step
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from slipstream.core.strict import JsonObject
from slipstream.errors import ServedError
from slipstream.measure.counters import SERVERS, Counters
from slipstream.measure.diagnosis import ACCEPTANCE, NOTHING
from slipstream.measure.diagnosis_served import COSTLY, OFF, PARTS, SELDOM, ServedDiagnosis, judge
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.tables import spell
from slipstream.measure.traffic_client import TrafficClient

PAYS, COSTS, UNDECIDED = "speculation pays", "speculation does not pay", "it is uncertain whether speculation pays"
RESTARTED, LOST = "the server was restarted: its counters went backwards", "the server reports no counters"
VERDICTS = {NOTHING: PAYS, ACCEPTANCE: COSTS, SELDOM: COSTS, COSTLY: COSTS}
LIKE = 1.02
"""Tokens per step of two windows count as equal if they differ by less than this factor, because they are estimates."""

Event = JsonObject
"""An event of the server: its kind, under "event", and, for a verdict, the figures behind the verdict."""


@dataclass
class PayWatch:
    """Turns samples of counters into events. c: see `diagnose_served`. state: the last verdict."""

    c: float
    state: str | None = None
    _samples: list[Counters] = field(default_factory=list)
    _last: str | None = None  # verdict of the last window that had one
    _known: list[Event] = field(default_factory=list)  # verdicts of windows that decided something by themselves

    def add(self, sample: Counters | None) -> Event | None:
        """Add a reading of the counters, None if the server reports none. Returns an event if something has changed."""
        if sample is None or (self._samples and sample.has_restarted(self._samples[-1])):
            said, self.state = self.state, LOST if sample is None else RESTARTED  # settings may have changed
            self._samples, self._last, self._known = [sample] if sample else [], None, []
            return None if said == self.state else {"event": self.state}
        self._samples.append(sample)
        if len(self._samples) <= PARTS:
            return None
        judged, self._samples = judge(self._samples, self.c), self._samples[-1:]
        counters, diagnosis = judged.counters or {}, judged.diagnosis or ServedDiagnosis()
        if not counters["output_tokens"] and not counters["running"]:
            return None  # without requests nothing changes
        event, decided = self._verdict(counters, diagnosis), self.state in (PAYS, COSTS)
        if event["event"] == UNDECIDED:
            is_said = self.state != UNDECIDED and not decided
        else:
            is_said = event["event"] != self.state and (not decided or event["event"] == self._last)
            self._last = event["event"]
        if is_said:
            self.state = event["event"]
        return event if is_said else None

    def _verdict(self, counters: JsonObject, diagnosis: ServedDiagnosis) -> Event:
        known = {} if diagnosis.forecast is None else asdict(diagnosis.forecast)
        event = {
            "event": VERDICTS.get(diagnosis.cause, UNDECIDED),
            "running": round(counters["running"] or 0, 1),
            "tokens_per_step": round(counters["tokens_per_step"] or 1, 3),
            "at_most": known.get("most"),
            "measured": known.get("measured"),
            "reason": diagnosis.reason,
            "fix": diagnosis.fix,
        }
        if event["event"] != UNDECIDED:
            self._known.append(event)
        elif diagnosis.cause != OFF:
            event["event"] = next((each["event"] for each in self._known[::-1] if _decides(each, event)), UNDECIDED)
        if counters["server"] == "llamacpp" and event["event"] != UNDECIDED:  # each request sets the draft length
            event["send"] = {"speculative.n_max": 0 if event["event"] == COSTS else known.get("best_length")}
        return event


def _decides(known: Event, now: Event) -> bool:
    """Return True if the verdict of window `known` also holds for window `now`: a step gains less if more requests
    share it, and if it gives fewer tokens."""
    less, more = (known, now) if known["event"] == COSTS else (now, known)
    return less["running"] <= more["running"] and more["tokens_per_step"] <= LIKE * less["tokens_per_step"]


def line_of(event: Event) -> str:
    """Write an event as a line of text."""
    said = f"{event['at']} {event['event']}"
    if "running" in event:
        load = f"{spell(max(1, round(event['running'])), 'request')} at once"
        said += f", with {load}, {event['tokens_per_step']:.2f} tokens a step: {event['reason']}"
    if "send" in event:
        return f'{said}. Send "speculative.n_max": {event["send"]["speculative.n_max"]}'
    return f"{said}. Fix: {event['fix']}" if event.get("fix") else said


async def follow(place: Endpoint, window: float, c: float, limit: float) -> AsyncIterator[Event]:
    """Yield the events of a server, each with its time under "at". window: seconds of a window; limit: stop after this
    many seconds, 0: never. Raises ServedError if the server shows no counters at the beginning."""
    watched, began, is_server = PayWatch(c), time.monotonic(), False
    async with TrafficClient(place, place.timeout) as client:
        while True:
            sample = await client.counters()
            is_server = is_server or sample is not None
            if not is_server:
                what = f"{place.base_url} reports no counters of {', '.join(SERVERS.values())}"
                raise ServedError(what, fix="give the URL of such a server, and start it with its metrics on")
            if (event := watched.add(sample)) is not None:
                yield {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event}
            if limit and time.monotonic() - began >= limit:
                return
            await asyncio.sleep(window / PARTS)
