"""A short soak; `make soak` is the long one."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.checkpoints import Tiny
from tests.server.soak import FAILING, GROWTH, KINDS, WAITING, differing, ended, server, soak


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_at_twice_saturation_every_request_ends_once_and_memory_stays(tiny: Tiny) -> None:
    with server(str(tiny.target)) as (url, processes):
        made = asyncio.run(soak(url, processes, seconds=24.0, warm_up=9.0))
    assert not made.wrong, made.wrong[:5]
    assert made.texts
    assert not differing(made.texts, str(tiny.target), most=20)
    assert max(made.growth) <= GROWTH, made.memory
    outcomes = {outcome for _, outcome in made.outcomes}
    assert outcomes == {"done", "left", "failed", "wrong", "refused"}, made.summary()
    assert {kind for kind, _ in made.outcomes} == set(KINDS)
    assert made.counters["corrupted_requests_total"] == sum(made.outcomes[kind, "failed"] for kind in FAILING)
    assert WAITING == 429


def test_a_greedy_text_that_the_target_alone_does_not_give_is_noticed(tiny: Tiny) -> None:
    assert len(differing({("def", 4): {"no text of this model"}}, str(tiny.target))) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ["[DONE]"],
        ['{"choices": [{"finish_reason": "length"}]}'],
        ['{"choices": [{"finish_reason": "length"}]}', "[DONE]", "[DONE]"],
        ['{"choices": [{"finish_reason": "length"}]}', '{"choices": [{"finish_reason": "length"}]}', "[DONE]"],
        ['{"error": {}}', "[DONE]"],
    ],
)
def test_a_stream_without_exactly_one_final_event_is_noticed(lines: list[str]) -> None:
    with pytest.raises(AssertionError):
        ended("stream", {"stream": True}, lines)
