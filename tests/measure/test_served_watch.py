"""A server of known truth is followed: what is said is right, changes are said, and restarts."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.errors import ServedError
from slipstream.measure import served_watch
from slipstream.measure.counters import Counters, read_counters
from slipstream.measure.diagnosis_served import PARTS
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.served_watch import COSTS, LOST, PAYS, RESTARTED, UNDECIDED, PayWatch, follow, line_of
from tests.measure.simulated_servers import Engine, Served, page

FREE = Served(requests=4, share=0.5, alpha=0.85, varies=0.95, row=0.0, longest=8, ragged=True)
DEAR = replace(FREE, requests=32, share=0.4, alpha=0.4, row=0.2)


class Server:
    """One that changes while it is followed."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.base = dict[str, float]()
        self.last: Counters | None = None
        self.truth = 1.0

    def samples(self, served: Served, windows: int) -> list[Counters]:
        """Counters while it is as described, on top of what it counted before."""
        if self.last is not None:
            self.base = dict(self.last.values)
        engine, seen = Engine(served, self.rng), list[Counters]()
        for i in range(1, windows * PARTS + 1):
            engine.run(i * served.seconds / PARTS)
            now = read_counters(page([engine]))
            assert now is not None
            summed = {
                key: n if key in ("running", "began", "engines") else n + self.base.get(key, 0.0)
                for key, n in now.values.items()
            }
            seen.append(replace(now, values=summed))
        self.last, self.truth = seen[-1], engine.plain / engine.now
        return seen


def events(watch: PayWatch, samples: list[Counters | None]) -> list[dict[str, Any]]:
    return [event for sample in samples if (event := watch.add(sample)) is not None]


def test_it_is_said_once_when_speculation_stops_paying_and_when_it_pays_again() -> None:
    server, watch, said = Server(), PayWatch(0.05), []
    for served in (FREE, DEAR, FREE):
        said += events(watch, [*server.samples(served, 4)])
    assert [event["event"] for event in said if event["event"] != UNDECIDED] == [PAYS, COSTS, PAYS]
    paid, costly, again = said[-3:]
    assert paid["running"] < 8 < costly["running"]
    assert paid["measured"]["low"] > 1 > costly["measured"]["high"]
    assert costly["fix"]
    assert again["tokens_per_step"] > costly["tokens_per_step"]


def test_one_window_is_no_change() -> None:
    server, watch = Server(1), PayWatch(0.05)
    events(watch, [*server.samples(FREE, 4)])
    assert watch.state == PAYS
    assert not events(watch, [*server.samples(DEAR, 1)])
    assert watch.state == PAYS


LOADS = (1, 8, 32, 128)
TRUTHS = [
    replace(FREE, requests=n, share=share, alpha=alpha, row=row, seconds=20.0 if n > 8 else 40.0)
    for n in LOADS
    for share, alpha, row in ((0.05, 0.6, 0.05), (0.4, 0.4, 0.2), (0.6, 0.85, 0.0), (1.0, 0.7, 0.02), (1.0, 0.03, 0.05))
]


@pytest.mark.parametrize("served", TRUTHS, ids=lambda each: f"{each.requests} at once, {each.share}, {each.alpha}")
def test_no_server_of_known_truth_is_called_the_wrong_thing(served: Served) -> None:
    server, watch = Server(2), PayWatch(0.05)
    said = events(watch, [*server.samples(served, 2)])
    assert said
    for event in said:
        if event["event"] == PAYS:
            assert server.truth > 0.98
        elif event["event"] == COSTS:
            assert server.truth < 1.06


def test_a_load_that_decides_nothing_is_compared_with_loads_that_did() -> None:
    """A head drafts in every step: the times of its steps do not tell what they would take without drafts."""
    server, watch = Server(3), PayWatch(0.05)
    always = replace(DEAR, share=1.0, varies=0.0, ragged=False, alpha=0.12, requests=48)
    alone = PayWatch(0.05)
    assert [event["event"] for event in events(alone, [*Server(3).samples(always, 3)])] == [UNDECIDED]
    said = events(watch, [*server.samples(DEAR, 3), *server.samples(FREE, 4), *server.samples(always, 4)])
    assert [event["event"] for event in said] == [COSTS, PAYS, COSTS]
    assert server.truth < 1


def test_a_restart_and_a_server_that_is_gone_are_said_and_begin_anew() -> None:
    server, watch = Server(4), PayWatch(0.05)
    seen = server.samples(FREE, 3)
    events(watch, [*seen])
    fresh = Server(5).samples(FREE, 3)
    assert [event["event"] for event in events(watch, [*fresh])][:1] == [RESTARTED]
    assert watch.state == PAYS
    gone = events(watch, [None, None, None])
    assert [event["event"] for event in gone] == [LOST], "once"
    assert [event["event"] for event in events(watch, [*Server(6).samples(FREE, 3)])][-1] == PAYS


def test_an_idle_server_changes_nothing() -> None:
    server, watch = Server(7), PayWatch(0.05)
    last = server.samples(FREE, 3)[-1]
    idle = replace(last, values={**last.values, "running": 0.0})
    assert not events(watch, [idle] * (3 * PARTS))


def test_of_llama_server_the_value_to_send_is_named() -> None:
    served = Served("llamacpp", 4, share=0.03, alpha=0.6, seconds=60)
    (event,) = events(PayWatch(0.05), [*Server(8).samples(served, 2)])
    assert event["event"] == COSTS
    assert line_of({"at": "now", **event}).endswith('Send "speculative.n_max": 0')


def test_a_server_that_restarts_before_anything_was_said_is_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a server that never had counters is none to follow."""

    async def run(samples: list[Counters | None]) -> list[str]:
        read = iter(samples)

        class Client:
            def __init__(self, *_: object) -> None: ...
            async def __aenter__(self) -> "Client":
                return self

            async def __aexit__(self, *_: object) -> None: ...
            async def counters(self) -> Counters | None:
                return next(read)

        monkeypatch.setattr(served_watch, "TrafficClient", Client)
        said = []
        with contextlib.suppress(RuntimeError):  # no more samples
            async for event in follow(Endpoint("http://localhost:1/v1"), 0.0, 0.05, 0.0):
                said.append(event["event"])
        return said

    before, after = Server(4).samples(FREE, 1)[:2], Server(5).samples(FREE, 3)
    assert asyncio.run(run([*before, None, None, *after]))[:2] == [LOST, PAYS]
    with pytest.raises(ServedError, match="reports no counters"):
        asyncio.run(run([None]))
