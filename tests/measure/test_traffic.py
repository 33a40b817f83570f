"""Load on servers whose latencies are known exactly, in virtual time: the figures are those latencies."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from slipstream.errors import ParameterError, ServedError
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.measurements import ServedArm
from slipstream.measure.traffic import Traffic, TrafficArm, TrafficConfig, compute_served_arm, measure
from slipstream.measure.traffic_client import CHAT, TrafficRequest
from slipstream.measure.traffic_figures import TrafficPass, collect_warnings, estimate_speed
from tests.measure.virtual_time import Script, ScriptedServer, run

PLACE = Endpoint("http://server/v1", "words")


def figures(server: ScriptedServer, load: Traffic, rounds: int = 3, **config: float) -> ServedArm:
    """The figures of one arm on this server."""
    arm = TrafficArm("words", PLACE, load, lambda number, i: TrafficRequest(CHAT, {"number": number, "i": i}))
    run(measure([arm], TrafficConfig(rounds=rounds, **config), transport=server))
    return compute_served_arm(arm, [arm])


def test_latencies_of_requests_that_do_not_disturb_each_other_are_those_of_the_server() -> None:
    """The i-th request's first text comes after i + 1 hundredths, and its 10 further tokens after 5 times 0.02."""
    server = ScriptedServer(lambda i: Script(first=(i + 1) / 100, gap=0.02, pieces=6, tokens=2))
    result = figures(server, Traffic(concurrency=1, requests=100), rounds=1)
    assert [result.first[name] for name in ("p50", "p95", "p99")] == pytest.approx([0.505, 0.9505, 0.9901])
    assert [result.next[name] for name in ("p50", "p99")] == pytest.approx([0.1 / 11] * 2)
    assert [result.gap[name] for name in ("p50", "p99")] == pytest.approx([0.02] * 2)
    assert result.whole["max"] == pytest.approx(1.1)
    assert result.tokens_per_second.value == pytest.approx(1200 / (50.5 + 10))
    assert (result.answered, result.errors, result.output_tokens, result.prompt_tokens) == (100, {}, 1200, 700)


def test_a_stall_delays_the_requests_that_were_due_behind_it() -> None:
    """One place, one request a second in the mean. The tenth takes 100 seconds. Counted from when requests were sent by
    a client that waits for its turn, one of 60 would be late; counted from when they were due, most are."""
    load = Traffic(rate=1.0, requests=60)
    due = load.arrivals([0, 1])
    server = ScriptedServer(lambda i: Script(first=100.0 if i == 9 else 0.01, gap=0.0, pieces=1), places=1)
    result = figures(server, load, rounds=1)
    ends = np.zeros(60)
    for i, at in enumerate(due):
        ends[i] = max(at, ends[i - 1] if i else 0.0) + (100.0 if i == 9 else 0.01)
    assert result.cells["first"][0] == pytest.approx(list(ends - due))
    assert result.first["p50"] == pytest.approx(float(np.percentile(ends - due, 50)))
    assert result.first["p50"] > 30
    assert server.arrived == pytest.approx(list(due)), "requests are sent when they are due, whatever the server does"
    waiting = figures(ScriptedServer(server.script, places=1), Traffic(concurrency=1, requests=60), rounds=1)
    assert waiting.first["p95"] == pytest.approx(0.01), "what a client hides that waits with its requests"


def test_poisson_arrivals_have_the_rate_and_the_spread_of_their_distribution() -> None:
    gaps = np.diff(Traffic(rate=20.0, requests=20_000).arrivals([3, 1]))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)
    assert (Traffic(rate=1.0).arrivals([1, 1]) != Traffic(rate=1.0).arrivals([2, 1])).all()


def test_so_many_requests_are_in_flight_as_asked_for_and_each_is_due_when_the_one_before_has_ended() -> None:
    server = ScriptedServer(lambda i: Script(first=1.0, gap=1.0, pieces=2))
    result = figures(server, Traffic(concurrency=4, requests=12), rounds=1)
    assert server.arrived == pytest.approx([0] * 4 + [2] * 4 + [4] * 4)
    assert result.first["max"] == pytest.approx(1.0)
    assert result.tokens_per_second.value == pytest.approx(24 / 6)


def test_the_warm_up_does_not_count() -> None:
    server = ScriptedServer(lambda i: Script(first=50.0 if i < 3 else 0.5, pieces=1))
    result = figures(server, Traffic(concurrency=1, requests=2, warm_up=3))
    assert (result.answered, result.first["max"]) == (6, pytest.approx(0.5))
    assert [each["number"] for each in server.asked] == [-1, -1, -1, 0, 0, 1, 1, 2, 2]
    assert server.asked[0].items() >= {"model": "words", "stream": True, "path": "/v1/chat/completions"}.items()


def test_passes_give_the_interval_of_the_speed() -> None:
    server = ScriptedServer(lambda i: Script(first=1.0 + 0.1 * (i // 4), gap=0.0, pieces=1, tokens=10))
    result = figures(server, Traffic(concurrency=1, requests=4))
    speed = result.tokens_per_second
    assert speed.value == pytest.approx(10 / (1.0 * 1.1 * 1.2) ** (1 / 3))
    assert speed.low < 10 / 1.2
    assert speed.high > 10
    assert result.rounds == 3
    assert figures(ScriptedServer(), Traffic(concurrency=1, requests=4), rounds=9, seconds=10.0).rounds == 3


def test_errors_are_counted_apart_no_answer_at_all_ends_the_test_and_pieces_count_without_usage() -> None:
    scripts = [Script(), Script(status=429), Script(first=99.0), Script(cut=True), Script(), Script()]
    server = ScriptedServer(lambda i: scripts[i])
    result = figures(server, Traffic(concurrency=1, requests=6), rounds=1, timeout=10.0)
    assert result.errors == {"status 429": 1, "timeout": 1, "stream ended early": 1}
    assert (result.answered, result.first["max"], result.output_tokens) == (3, pytest.approx(0.5), 15)
    (few, failed) = collect_warnings([result])
    assert "not enough passes" in few
    assert '3 requests failed (1 x status 429, 1 x timeout, 1 x stream ended early): {"error":' in failed
    with pytest.raises(ServedError, match=r"no request of words at http://server/v1 succeeded: status 503, .*no room"):
        figures(ScriptedServer(lambda i: Script(status=503)), Traffic(concurrency=2, requests=4))
    result = figures(ScriptedServer(lambda i: Script(usage=False, tokens=3)), Traffic(concurrency=1, requests=4))
    assert (result.output_tokens, result.counted) == (3 * 4 * 5, False)
    assert any("chunks of the stream were counted, not tokens" in said for said in collect_warnings([result]))


@pytest.mark.parametrize("prefix", ["vllm", "slipstream"])
def test_acceptance_is_that_of_the_passes_by_the_servers_counters(prefix: str) -> None:
    """Each request: 10 steps that drafted, 40 draft tokens, 25 accepted; and much from before."""

    def metrics(server: ScriptedServer) -> str:
        asked = len(server.asked)
        return "".join(
            f"# HELP {prefix}:{name}_total text\n"
            f'{prefix}:spec_decode_num_{name}_total{{engine="{engine}",model_name="a b"}} {1e6 + each * asked}\n'
            for name, each in (("drafts", 5), ("draft_tokens", 20), ("accepted_tokens", 12.5))
            for engine in "01"
        )  # fmt: skip

    result = figures(ScriptedServer(metrics=metrics), Traffic(concurrency=2, requests=6, warm_up=2))
    assert (result.acceptance_rate, result.mean_acceptance_length) == (pytest.approx(25 / 40), pytest.approx(3.5))
    silent = figures(ScriptedServer(), Traffic(concurrency=2, requests=6))
    assert (silent.acceptance_rate, silent.mean_acceptance_length) == (None, None)


def test_arms_take_turns_and_are_compared_within_passes() -> None:
    """The second arm's texts take half as long; each pass is slower than the one before, for both."""
    server = ScriptedServer(lambda i: Script(first=(1.0, 0.5, 1.0, 0.6, 1.2, 1.8)[i // 2], gap=0.0, pieces=1))
    base = TrafficArm(
        "slow", PLACE, Traffic(concurrency=1, requests=2), lambda number, i: TrafficRequest(CHAT, {"arm": "slow"})
    )
    fast = TrafficArm("fast", PLACE, base.traffic, lambda number, i: TrafficRequest(CHAT, {"arm": "fast"}), base)
    run(measure([base, fast], TrafficConfig(rounds=3), transport=server))
    order = [each["arm"] for each in server.asked[::2]]
    assert order == ["slow", "fast", "fast", "slow", "fast", "slow"]
    result = compute_served_arm(fast, [base, fast])
    assert result.ratio.value == pytest.approx((1.0 / 0.5 * 0.6 / 1.0 * 1.8 / 1.2) ** (1 / 3))
    assert result.against == 0


def test_a_late_client_and_a_warm_cache_are_told() -> None:
    measured = figures(ScriptedServer(), Traffic(concurrency=1, requests=4))
    arm = replace(measured, late={"p99": 0.2}, first={"p50": 0.5}, prompt_tokens=100, cached_tokens=80)
    client, cache = collect_warnings([arm])
    assert "sent requests up to 200 ms late" in client
    assert "80% of the prompt tokens came from a prefix cache" in cache
    assert not collect_warnings([replace(arm, late={"p99": 0.04}, cached_tokens=20)])


def test_impossible_loads_are_refused_and_a_pass_without_tokens_has_no_speed() -> None:
    for wrong in ({}, {"concurrency": 1, "rate": 1.0}, {"concurrency": 0}, {"rate": 0.0}, {"rate": 1.0, "requests": 0}):
        with pytest.raises(ParameterError):
            Traffic(**wrong)
    assert estimate_speed([TrafficPass(1.0, [])]) is None
    assert all(b >= a for a, b in pairwise(Traffic(rate=5.0).arrivals([0, 0])))
