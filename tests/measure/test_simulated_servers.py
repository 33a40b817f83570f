"""`tune --base-url` on servers of known truth: every verdict is right, or says that it cannot be told."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.measure.counters import read_counters
from slipstream.measure.diagnosis import ACCEPTANCE, FINE, LENGTH, NOTHING, UNKNOWN
from slipstream.measure.diagnosis_served import COSTLY, OFF, SELDOM, judge, write_lead
from tests.measure.simulated_servers import Engine, Served, page, watched

LOADS = (1, 2, 8, 32, 128)
VLLM = {
    f"{name}, {n} at once": Served(requests=n, seconds=20.0 if n > 8 else 40.0, **more)  # type: ignore[arg-type]
    for n in LOADS
    for name, more in {
        "seldom": {"share": 0.05, "alpha": 0.6, "varies": 0.8, "ragged": True},
        "often, free rows": {"share": 0.5, "alpha": 0.85, "varies": 0.95, "row": 0.0, "ragged": True, "longest": 8},
        "often, dear rows": {"share": 0.4, "alpha": 0.4, "varies": 0.95, "row": 0.2, "ragged": True, "longest": 8},
        "always": {"share": 1.0, "alpha": 0.7, "draft": 0.1},
        "hardly accepted": {"share": 1.0, "alpha": 0.03, "draft": 0.02},
    }.items()
}
OTHERS = {
    "the chats of a real server: drafts in 3 % of the steps, and no asynchronous scheduling": Served(
        requests=8, share=0.03, alpha=0.65, varies=0.9, overhead=1.1, ragged=True
    ),
    "hidden overhead": Served(requests=8, share=0.3, alpha=0.6, varies=0.95, overhead=1.3, row=0.0, ragged=True),
    "rows are free up to a knee": Served(requests=4, share=0.9, varies=0.3, row=0.3, knee=12, longest=8, ragged=True),
    "too long": Served(share=1.0, alpha=0.2, longest=8, draft=0.1),
    "restarted": Served(requests=8, share=0.5, varies=0.9, ragged=True, restart=9),
    "restarted, always": Served(requests=2, alpha=0.7, restart=15),
    "a load that changes with the text": Served(requests=16, share=0.5, varies=0.9, surge=0.8, ragged=True, row=0.1),
    "a busy machine": Served(requests=4, share=0.3, varies=0.9, ragged=True, noise=0.5),
    "four engines": Served(requests=4, share=0.05, alpha=0.5, varies=0.5, engines=4),
    **{f"SGLang, {n}": Served("sglang", n, alpha=0.7, draft=0.1, seconds=60) for n in (1, 16, 64)},
    "SGLang, hardly accepted": Served("sglang", 16, alpha=0.02, draft=0.1, seconds=60),
    "SGLang, four engines": Served("sglang", 4, alpha=0.6, engines=4, seconds=60),
    "SGLang, restarted": Served("sglang", 16, alpha=0.6, restart=10, seconds=60),
    **{f"llama-server, {n}": Served("llamacpp", n, share=0.4, alpha=0.6, seconds=60) for n in (1, 4)},
    "llama-server, seldom": Served("llamacpp", 4, share=0.03, alpha=0.6, seconds=60),
}
SERVERS = VLLM | OTHERS


@functools.cache
def diagnosed(served: Served, **more: Any) -> tuple[dict[str, Any], float]:
    samples, truth = watched(served, **more)
    return judge(samples, 0.05).diagnosis, truth


@pytest.mark.parametrize("name", SERVERS)
def test_no_verdict_on_a_server_of_known_truth_is_wrong(name: str) -> None:
    served = SERVERS[name]
    diagnosis, truth = diagnosed(served)
    cause, known = diagnosis.cause, diagnosis.forecast
    assert known.most > 0.97 * truth, "at most means at most"
    if known.measured and served.overhead == 1 and not served.surge:
        assert known.measured.value == pytest.approx(truth, rel=0.06), "its own steps are those of plain decoding"
    if cause in (ACCEPTANCE, SELDOM):
        assert truth < FINE + 0.01
    elif cause == COSTLY:
        assert truth < 1
    elif cause == NOTHING:
        assert truth > 1
    elif cause == LENGTH:
        shorter = watched(replace(served, longest=known.best_length))[1]
        assert shorter > truth
    else:
        assert (cause, "at most" in diagnosis.reason) == (UNKNOWN, True)
        assert "--concurrency" in diagnosis.fix


def test_most_servers_that_gain_or_lose_much_get_a_verdict() -> None:
    """Where every step drafts as many tokens, as with a head, only a server without speculation tells what it gains."""
    decided = {name for name, served in SERVERS.items() if diagnosed(served)[0].cause != UNKNOWN}
    assert len(decided) >= 20
    assert {f"hardly accepted, {n} at once" for n in LOADS} <= decided
    assert {f"often, dear rows, {n} at once" for n in LOADS[1:]} <= decided


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("n", [1, 64])
def test_a_server_without_speculation_is_not_told_to_switch_it_on(kind: str, n: int) -> None:
    served = Served(kind, n, share=0.0, seconds=30)
    diagnosis = diagnosed(served, speculates=False)[0]
    assert diagnosis.cause == OFF
    assert f"about {n} request" in diagnosis.reason
    assert f"--concurrency {n}" in write_lead(diagnosis)


def test_a_page_of_two_models_a_router_and_a_restart_are_named() -> None:
    engines = [Engine(Served(), np.random.default_rng(seed)) for seed in (0, 1)]
    pages = []
    for until in (1.0, 9.0):
        for engine in engines:
            engine.run(until)
        pages.append("".join(page([engine], model) for engine, model in zip(engines, "ab", strict=True)))
    both = judge([seen for text in pages if (seen := read_counters(text))], 0.05).diagnosis
    assert both.reason == "/metrics adds up several models: a, b"
    router = 'vllm:num_requests_running{server="http://a"} 4.0\nvllm:current_qps{server="http://a"} 2.0\n'
    seen = read_counters(router)
    assert seen is not None
    assert "router" in judge([seen, seen], 0.05).diagnosis.reason
    again = diagnosed(OTHERS["restarted"])[0].evidence
    assert "the server was restarted while it was watched" in again
