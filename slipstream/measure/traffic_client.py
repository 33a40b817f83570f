"""Makes the requests of a load test, sends them to an OpenAI-compatible server, and times the streamed answers.

While requests run, arriving bytes are only stored with their times. `read_stream` parses them afterwards, so that the
client disturbs a server on the same machine as little as possible.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count, pairwise
from time import time_ns
from typing import TYPE_CHECKING

from slipstream.core.strict import JsonMapping, JsonObject, parse_json
from slipstream.errors import ParameterError
from slipstream.measure.counters import Counters, read_counters
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.prompts import Entry
from slipstream.measure.provenance import text_digest

if TYPE_CHECKING:
    import httpx

COMPLETIONS, CHAT = "/completions", "/chat/completions"
EARLY = "stream ended early"
TEXT = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Members of a delta that hold output tokens."""
NO_EFFECT: JsonMapping = {"top_k": 0, "top_p": 1.0, "ignore_eos": False}
"""Field -> value without effect, which is not sent, because some servers do not know the field."""


@dataclass(frozen=True)
class TrafficRequest:
    """A request. path: COMPLETIONS or CHAT. body: all fields but `model`, `stream` and `stream_options`."""

    path: str
    body: JsonMapping


@dataclass(frozen=True)
class TrafficPrompts:
    """entries   prompts: questions go to /chat/completions and text to continue to /completions, unless `template` says
              "chat" or "raw" for all. Prompts are used in turn; each pass begins with another prompt.
    tokens    largest number of new tokens.
    sampling  temperature, top_k, top_p, ignore_eos. Each request has its own seed if the temperature is above 0.
    distinct  True to begin each prompt with a unique line, so that no prefix cache holds it.
    """

    entries: Seq[Entry]
    tokens: int
    sampling: JsonMapping
    seed: int = 0
    template: str = "auto"
    distinct: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: count(time_ns()), init=False, repr=False)

    @property
    def settings(self) -> JsonObject:
        """Return the settings for the result file."""
        texts = text_digest(*(entry.text for entry in self.entries))
        names = ("tokens", "sampling", "template", "distinct")
        return {"prompts": texts} | {name: getattr(self, name) for name in names}

    def request(self, number: int, i: int) -> TrafficRequest:
        entry = self.entries[(i + number + 1) % len(self.entries)]
        text = f"# {next(self._numbers)}\n{entry.text}" if self.distinct else entry.text
        sampling = {name: value for name, value in self.sampling.items() if NO_EFFECT.get(name) != value}
        body: JsonObject = {"max_tokens": self.tokens, **sampling}
        if sampling["temperature"] > 0:
            body["seed"] = (self.seed + number + 1) * 100_003 + i
        if self.template == "chat" or (self.template == "auto" and entry.request):
            return TrafficRequest(CHAT, body | {"messages": [{"role": "user", "content": text}]})
        return TrafficRequest(COMPLETIONS, body | {"prompt": text})


@dataclass
class Timed:
    """The times and the answer of a request. Times are seconds on the clock of the event loop.

    scheduled  when the request was due; sent: when it was sent (later if the client lags); ended: end of the answer.
    pieces     (time, bytes) of each piece that arrived.
    fault      what went wrong, e.g. "status 429" or "timeout", or "". said: the answer to a refused request.
    """

    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    fault: str = ""
    said: str = ""


@dataclass(frozen=True)
class Answered:
    """The answer to a request. Times are seconds from when the request was due, so that waiting in the client counts.

    first    time to the first text; None if there was no text.
    rest     time from the first text to the last; None if all text came at once.
    gaps     times between two neighbouring pieces of text; a piece may hold several tokens.
    whole    time to the end of the stream.  late: time until the request was sent.
    tokens   output tokens by the server's `usage`; without `usage`, the number of pieces, and `counted` is false.
    prompt_tokens, cached_tokens  by `usage`, 0 if it does not have them.
    """

    first: float | None
    rest: float | None
    gaps: list[float]
    whole: float
    late: float
    tokens: int
    counted: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fault: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds per output token after the first (TPOT)."""
        return None if self.rest is None or self.tokens < 2 else self.rest / (self.tokens - 1)


class TrafficClient:
    """Connections to one server: an asynchronous context manager.

    timeout    longest time of a request after sending, in seconds.
    transport  used in place of the network, for tests.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, transport: httpx.AsyncBaseTransport | None = None):
        try:
            import httpx
        except ImportError as fault:
            raise ParameterError("httpx is not installed", fix="pip install 'slipstream[bench]'") from fault
        self.endpoint, self._timeout = endpoint, timeout
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Accept-Encoding": "identity"} | endpoint.headers
        self._http = httpx.AsyncClient(timeout=None, limits=unlimited, headers=headers, transport=transport)

    async def __aenter__(self) -> TrafficClient:
        return self

    async def __aexit__(self, *given: object) -> None:
        await self._http.aclose()

    async def ask(self, request: TrafficRequest, scheduled: float) -> Timed:
        """Send a request now and wait for its end. Errors are stored in the result, not raised."""
        import httpx

        clock = asyncio.get_running_loop().time
        timed = Timed(scheduled, clock())
        try:
            await asyncio.wait_for(self._stream(request, timed), self._timeout)
        except asyncio.TimeoutError:
            timed.fault = "timeout"
        except httpx.HTTPError as fault:
            timed.fault, timed.said = f"connection ({type(fault).__name__})", str(fault)
        timed.ended = clock()
        return timed

    async def _stream(self, request: TrafficRequest, timed: Timed) -> None:
        asked = {"model": self.endpoint.model, "stream": True, "stream_options": {"include_usage": True}}
        clock = asyncio.get_running_loop().time
        address = self.endpoint.base_url.rstrip("/") + request.path
        async with self._http.stream("POST", address, json=asked | dict(request.body)) as answer:
            if answer.status_code != 200:
                timed.fault = f"status {answer.status_code}"
                timed.said = (await answer.aread()).decode(errors="replace")
                return
            async for piece in answer.aiter_raw():
                timed.pieces.append((clock(), piece))

    async def counters(self) -> Counters | None:
        """Read the counters of the server's /metrics; None if the server has no such page or no known counters."""
        import httpx

        root = re.sub(r"/v\d+/?$", "", self.endpoint.base_url)
        try:
            answer = await asyncio.wait_for(self._http.get(f"{root.rstrip('/')}/metrics"), self._timeout)
        except (httpx.HTTPError, asyncio.TimeoutError):
            return None
        return read_counters(answer.text) if answer.status_code == 200 else None


def read_stream(timed: Timed) -> Answered:
    """Parse the pieces of a stream, and compute times and tokens."""
    texts: list[float] = []
    usage: JsonMapping = {}
    fault, ended = timed.fault, False
    try:
        for at, chunk in _chunks(timed.pieces) if not fault else ():
            if chunk is None:
                ended = True
                continue
            if "error" in chunk:
                fault = fault or "error in the stream"
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                ended = ended or bool(choice.get("finish_reason"))
                if choice.get("text") or any((choice.get("delta") or {}).get(name) for name in TEXT):
                    texts.append(at)
    except (ValueError, AttributeError):  # the event is not JSON, or not a chunk of an answer
        fault = "not a stream of completions"
    details = usage.get("prompt_tokens_details") or {}
    return Answered(
        first=texts[0] - timed.scheduled if texts else None,
        rest=texts[-1] - texts[0] if len(texts) > 1 else None,
        gaps=[b - a for a, b in pairwise(texts)],
        whole=timed.ended - timed.scheduled,
        late=timed.sent - timed.scheduled,
        tokens=int(usage.get("completion_tokens") or len(texts)),
        counted="completion_tokens" in usage,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        fault=fault or ("" if ended else EARLY),
    )


def _chunks(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, JsonObject | None]]:
    """Yield (time of arrival, JSON value) of each event; None for [DONE]. An event is one line of data."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                yield at, None if data == b"[DONE]" else parse_json(data)
