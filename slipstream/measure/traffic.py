"""Measures OpenAI-compatible servers under load: `slipstream bench --serve`, and `make bench-serve`.

An arm is one server under one load. Passes over the arms interleave, as in `bench`: in each pass every arm gets the
same requests, and, with a rate, the same arrival times. Latencies are counted from the time at which a request was due,
not from the time at which it was sent: if a server stalls, the client sends later requests late, and times from sending
would hide this delay (coordinated omission). With a fixed number of requests in flight, a request is due as soon as the
previous request has ended, so such a load cannot overload a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from slipstream.core.params import Strict, integer, number, option
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError, ServedError
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.estimates import FEWEST_PASSES
from slipstream.measure.measurements import ServedArm, TrafficData
from slipstream.measure.provenance import note_conditions, public_values
from slipstream.measure.results import Result, record
from slipstream.measure.traffic_client import Timed, TrafficClient, TrafficPrompts, TrafficRequest, read_stream
from slipstream.measure.traffic_figures import TrafficPass, collect_warnings, compute_passes

if TYPE_CHECKING:
    import httpx

Ask: TypeAlias = "Callable[[TrafficRequest, float], Awaitable[Timed]]"
"""Function that sends a request, which is due at the given time, and waits for its end."""
LEAST = 16
"""Fewest requests of a pass by default. With many requests in flight, the default is twice their number."""


@dataclass(frozen=True)
class Traffic(Strict):
    """How requests arrive: a fixed number in flight, or at random times with a rate (Poisson arrivals).

    concurrency  number of requests in flight; None: requests arrive with `rate`.
    rate         mean number of requests per second.
    requests     number of requests of a pass.  warm_up: requests before the first pass, which do not count.
    """

    concurrency: int | None = option(None, check=integer(1))
    rate: float | None = option(None, check=number(0.0, 1e6, open_low=True))
    requests: int = option(LEAST, check=integer(1))
    warm_up: int = option(0, check=integer(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.concurrency is None) == (self.rate is None):
            raise ParameterError("concurrency and rate were given together, or none of them", fix="give one of them")

    @property
    def label(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"

    def arrivals(self, seed: Seq[int]) -> np.ndarray:
        """Draw the times at which the requests of a pass are due, in seconds from its beginning; only with a rate."""
        assert self.rate is not None
        return np.random.default_rng(seed).exponential(1 / self.rate, self.requests).cumsum()


@dataclass(eq=False)
class TrafficArm:
    """One server under one load, and its passes so far.

    name      name of the server, or of the variant of its requests.
    requests  function (pass, number) -> request; the warm-up is pass -1.
    against   the arm with which this arm is compared; None: no comparison.
    """

    name: str
    endpoint: Endpoint
    traffic: Traffic
    requests: Callable[[int, int], TrafficRequest]
    against: TrafficArm | None = None
    passes: list[TrafficPass] = field(default_factory=list)


def line_up_servers(servers: Mapping[str, Endpoint], loads: Seq[Traffic], asked: TrafficPrompts) -> list[TrafficArm]:
    """Make the arms: each server under each load. Further servers are compared with the first server."""
    arms: list[TrafficArm] = []
    for each in loads:
        base: TrafficArm | None = None
        for name, place in servers.items():
            arms.append(TrafficArm(name, place, each, asked.request, base))
            base = base or arms[-1]
    return arms


@dataclass(frozen=True)
class TrafficConfig(Strict):
    """rounds    passes over each arm.
    seconds   measuring stops after this time, but not before three passes over all prompts.
    timeout   seconds that one request may take.
    """

    rounds: int = option(3, check=integer(1))
    seconds: float = option(1e9, check=number(0.0, 1e9))
    timeout: float = option(300.0, check=number(0.0, 1e9, open_low=True))
    seed: int = option(0, check=integer(0))


def count_requests(arms: Seq[TrafficArm], config: TrafficConfig) -> int:
    """Return how often `measure_traffic` calls `advance`."""
    return sum(arm.traffic.warm_up + config.rounds * arm.traffic.requests for arm in arms)


def measure_traffic(
    arms: Seq[TrafficArm],
    config: TrafficConfig,
    settings: JsonObject | None = None,
    out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Measure all arms, and write the result to `out` after every pass. After an interruption, the file and the
    attribute `result` of the exception hold the passes so far.

    Raises ServedError if a server cannot be reached, or if no request of an arm's warm-up or of a pass succeeds.
    """
    known = {place: place.describe() for place in dict.fromkeys(arm.endpoint for arm in arms)}
    for arm in arms:
        arm.endpoint = replace(arm.endpoint, model=known[arm.endpoint]["id"])
    servers = [{"url": place.base_url, "model": public_values(about)} for place, about in known.items()]
    result = Result(
        "bench-served", {**asdict(config), **(settings or {})}, note_conditions(config.seed, servers=servers)
    )

    def collect() -> TrafficData:
        ready = [arm for arm in arms if arm.passes and (arm.against or arm).passes]
        data = TrafficData([compute_served_arm(arm, ready) for arm in ready])
        result.warnings = collect_warnings(data.arms)
        return data

    with record(result, out, collect) as save:
        asyncio.run(measure(arms, config, save, advance))
    return result


def compute_served_arm(arm: TrafficArm, arms: Seq[TrafficArm]) -> ServedArm:
    """Compute the figures of an arm, and the index in `arms` of the arm with which it is compared."""
    base = arm.against
    return ServedArm(
        name=arm.name,
        url=arm.endpoint.base_url,
        load=arm.traffic.label,
        **asdict(arm.traffic),
        against=None if base is None else arms.index(base),
        **compute_passes(arm.passes, None if base is None else base.passes),
    )


async def measure(
    arms: Seq[TrafficArm],
    config: TrafficConfig,
    each_pass: Callable[[], None] = lambda: None,
    advance: Callable[[], None] = lambda: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> None:
    """Warm up all arms, then run their passes in turns. Each pass is added to its arm when it ends."""
    async with AsyncExitStack() as stack:
        clients: dict[Endpoint, TrafficClient] = {}
        for place in dict.fromkeys(arm.endpoint for arm in arms):
            clients[place] = await stack.enter_async_context(TrafficClient(place, config.timeout, transport))
        for arm in arms:
            if arm.traffic.warm_up:
                warm = replace(arm.traffic, requests=arm.traffic.warm_up)
                _check_answered(arm, await run_pass(arm, warm, -1, clients[arm.endpoint], config.seed, advance))
        clock = asyncio.get_running_loop().time
        began = clock()
        for number in range(config.rounds):
            if number >= FEWEST_PASSES and clock() - began > config.seconds:
                break
            for arm in rotate(arms, number):
                done = await run_pass(arm, arm.traffic, number, clients[arm.endpoint], config.seed, advance)
                _check_answered(arm, done)
                arm.passes.append(done)
            each_pass()


def rotate(arms: Seq[TrafficArm], number: int) -> list[TrafficArm]:
    """Return the order of the arms in a pass. The order rotates, so that no arm is always first. Every other pass is
    reversed, because a server that has just answered one arm may be slower or faster for the next arm."""
    first = number // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[::-1] if number % 2 else order


async def run_pass(
    arm: TrafficArm, traffic: Traffic, number: int, client: TrafficClient, seed: int, advance: Callable[[], None]
) -> TrafficPass:
    """Run all requests of one pass to their ends."""
    clock = asyncio.get_running_loop().time
    asked = [arm.requests(number, i) for i in range(traffic.requests)]
    before = await client.counters()

    async def ask(request: TrafficRequest, scheduled: float) -> Timed:
        timed = await client.ask(request, scheduled)
        advance()
        return timed

    began = clock()
    if traffic.rate is None:
        assert traffic.concurrency is not None
        done = await _in_flight(asked, traffic.concurrency, ask)
    else:
        done = await _arrive(asked, began + traffic.arrivals([seed, number + 1]), ask)
    ended = max(each.ended for each in done)
    after = await client.counters()
    gained = after.since(before) if before and after else None
    said = next((each.said for each in done if each.fault), "")
    return TrafficPass(ended - began, [read_stream(each) for each in done], gained, said)


async def _in_flight(asked: Seq[TrafficRequest], many: int, ask: Ask) -> list[Timed]:
    clock, waiting, done = asyncio.get_running_loop().time, iter(asked), []

    async def slot() -> None:
        for request in waiting:
            done.append(await ask(request, clock()))

    await asyncio.gather(*(slot() for _ in range(min(many, len(asked)))))
    return done


async def _arrive(asked: Seq[TrafficRequest], due: np.ndarray, ask: Ask) -> list[Timed]:
    async def later(request: TrafficRequest, at: float) -> Timed:
        await asyncio.sleep(at - asyncio.get_running_loop().time())
        return await ask(request, at)

    return list(await asyncio.gather(*(later(*each) for each in zip(asked, due.tolist(), strict=True))))


def _check_answered(arm: TrafficArm, done: TrafficPass) -> None:
    if not done.good:
        raise ServedError(
            f"no request of {arm.name} at {arm.endpoint.base_url} succeeded: {done.answers[0].fault}"
            + f", {done.said[:300]}" * bool(done.said),
            fix="send a request to the server by hand, or read its log",
        )
