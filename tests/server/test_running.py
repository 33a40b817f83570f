"""Clients that go, wait, flood or read slowly, and requests that leave no token possible, harm nobody else."""

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from slipstream import LLM, SamplingParams
from slipstream.server.response_writer import EventStream
from slipstream.server.service import Limits
from tests.server.hosting import Host, break_engine, eventually, hosted, refused, request_by_hand

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\nHost: a\nContent-Type: application/json\n"
LONG = {"prompt": "def f(", "max_tokens": 900, "temperature": 1, "ignore_eos": True}


def idle(host: Host) -> bool:
    return host.load() == (0, 0, 0) and host.service.admitted == 0


@pytest.mark.parametrize("stream", [True, False])
def test_of_two_hundred_clients_that_hang_up_nothing_is_left(host: Host, stream: bool) -> None:
    body = json.dumps(LONG | {"stream": stream}).encode()
    connections = [request_by_hand(host.url, HEAD, body) for _ in range(200)]
    eventually(lambda: host.load()[0] == 8 and host.service.admitted > 150)
    for each in connections:
        each.close()
    eventually(lambda: idle(host))
    assert host.post(PATH, prompt="def f(", max_tokens=4).status_code == 200


def test_through_random_requests_and_hang_ups_each_text_is_that_of_the_request_alone(host: Host, pair: LLM) -> None:
    draw = random.Random(7)
    prompts = [f"def f{i}(a, b):\n" + "    a = b\n" * draw.randint(0, 30) for i in range(6)]
    alone = [each.text for each in pair.generate(prompts, SamplingParams(max_tokens=20))]

    def whole(i: int, stream: bool) -> tuple[str, str]:
        body = {"prompt": prompts[i], "temperature": 0, "max_tokens": 20}
        if not stream:
            return alone[i], host.post(PATH, **body).json()["choices"][0]["text"]
        parts = [part["text"] for part in host.parts(PATH, **body)]
        return alone[i], "".join(parts)

    def hang_up(i: int, events: int) -> tuple[str, str]:
        with host.http.stream("POST", PATH, json=LONG | {"prompt": prompts[i], "stream": True, "n": 2}) as answered:
            for _, _ in zip(range(events), answered.iter_lines(), strict=False):
                pass
        return "", ""

    with ThreadPoolExecutor(12) as pool:
        futures = []
        for _ in range(30):
            i = draw.randrange(6)
            if draw.random() < 0.5:
                futures.append(pool.submit(hang_up, i, draw.randint(1, 30)))
            else:
                futures.append(pool.submit(whole, i, draw.random() < 0.5))
        assert all(expected == text for expected, text in (each.result() for each in futures))
    eventually(lambda: idle(host))


def test_a_client_that_goes_before_or_within_its_prompt_leaves_nothing(host: Host) -> None:
    body = json.dumps(LONG | {"prompt": "word " * 600, "max_tokens": 100}).encode()
    for cut in (len(body) // 2, len(body)):
        with request_by_hand(host.url, HEAD, body) as connection:
            connection.settimeout(5)
        head = HEAD.replace(b"Content-Type", b"X-Cut: %d\nContent-Type" % cut)
        connection = request_by_hand(host.url, head, body[:cut])
        connection.close()
    eventually(lambda: idle(host))


def test_a_full_queue_refuses_further_requests_at_once(pair: LLM) -> None:
    with hosted(pair, Limits(waiting=2)) as host, ThreadPoolExecutor(10) as pool:
        running = [pool.submit(host.post, PATH, **LONG | {"max_tokens": 100}) for _ in range(10)]
        eventually(lambda: host.service.admitted == 10)
        for _ in range(8):
            answered = host.post(PATH, **LONG, stream=True)
            assert answered.status_code == 429
            assert int(answered.headers["Retry-After"]) >= 1
            assert answered.json()["error"]["type"] == "rate_limit_error"
        assert host.service.admitted == 10
        assert [each.result().status_code for each in running] == [200] * 10
        assert host.post(PATH, prompt="a", n=11).status_code == 429
        assert host.post(PATH, prompt="a", n=10, max_tokens=1).status_code == 200


def test_one_key_cannot_take_all_places(pair: LLM) -> None:
    with hosted(pair, Limits(per_key=2), ("first", "second")) as host, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(host.post, PATH, **LONG | {"max_tokens": 300}) for _ in range(2)]
        eventually(lambda: host.service.admitted == 2)
        answered = host.post(PATH, **LONG, stream=True)
        assert (answered.status_code, answered.json()["error"]["code"]) == (429, "key_limit")
        assert "Retry-After" in answered.headers
        other = {"Authorization": "Bearer second"}
        assert host.http.post(PATH, json={"prompt": "a", "max_tokens": 1, "n": 2}, headers=other).status_code == 200
        assert host.http.post(PATH, json={"prompt": "a", "max_tokens": 1, "n": 3}, headers=other).status_code == 429
        assert [each.result().status_code for each in running] == [200] * 2
        assert host.post(PATH, prompt="a", max_tokens=1, n=2).status_code == 200


def test_time_limits_end_a_request_and_free_what_it_holds(pair: LLM) -> None:
    with hosted(pair, Limits(first_token_seconds=1e-6)) as host:
        late = host.post(PATH, **LONG, stream=True)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        assert "Retry-After" in late.headers
        eventually(lambda: idle(host))
    with hosted(pair, Limits(total_seconds=1.0)) as host:
        assert host.post(PATH, **LONG, n=32).status_code == 503
        *_, last = host.events(PATH, **LONG, n=32)
        assert last["error"]["code"] == "timeout"
        eventually(lambda: idle(host))


def test_limits_of_time_do_not_follow_the_clock_on_the_wall(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 1e7)
    assert host.post(PATH, prompt="def f(", max_tokens=20).status_code == 200


def test_a_reader_that_is_too_slow_loses_its_request_and_no_other(pair: LLM) -> None:
    with hosted(pair, Limits(send_seconds=0.3)) as host:
        body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 8, "max_tokens": 500}).encode()
        with request_by_hand(host.url, HEAD, body) as reader:  # megabytes that nobody reads
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            eventually(lambda: host.service.admitted == 8)
            assert host.post(PATH, prompt="def f(", max_tokens=8).status_code == 200
            eventually(lambda: idle(host))


def test_a_dead_engine_shows_in_health_and_ends_streams_with_an_error(pair, monkeypatch):
    with hosted(pair) as host, httpx.Client(base_url=host.url, timeout=30, verify=False) as other:
        assert other.get("/health").status_code == other.get("/ready").status_code == 200
        break_engine(monkeypatch, host.llm, steps=3)
        first, *_, error, _, done, _ = other.post(PATH, json=LONG | {"stream": True}).text.splitlines()
        assert json.loads(first.removeprefix("data: "))["choices"]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert done == "data: [DONE]"
        for path in ("/health", "/ready"):
            assert other.get(path).status_code == 503
        assert other.post(PATH, json=LONG).status_code == 503


def test_a_server_that_stops_takes_no_more_requests(pair: LLM) -> None:
    with hosted(pair) as host:
        host.service.draining = True
        for answered in (host.post(PATH, **LONG), host.post(PATH, **LONG, stream=True), host.http.get("/ready")):
            assert answered.status_code == 503
            assert "Retry-After" in answered.headers
        assert host.http.get("/health").status_code == 200


MANY = 1000


@pytest.mark.parametrize("later", range(10))
def test_a_client_that_goes_while_a_piece_is_sent_ends_its_stream(later: int) -> None:
    """`asyncio.wait_for` of Python 3.10 and 3.11 forgets that it was cancelled if what it waited for has just ended;
    then the stream would go on for nobody. later: turns of the event loop from a piece that was sent to the news that
    the client has gone."""
    sent, ended = [], []

    async def run() -> None:
        news = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                for _ in range(MANY):
                    await asyncio.sleep(0)
                    yield b"piece"
            finally:
                ended.append(True)

        async def send(message: object) -> None:
            sent.append(message)
            if len(sent) == 5:
                news.set()

        async def receive() -> dict[str, str]:
            await news.wait()
            for _ in range(later):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        stream = events()
        await EventStream(stream, stream, 10.0)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert ended == [True]
    assert len(sent) < MANY / 10


V = 4096
ALL = list(range(V))
EVERY = dict.fromkeys(map(str, ALL), -100)
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": EVERY}, {"bad_words": [[token] for token in ALL]}, {"stop_token_ids": ALL, "min_tokens": 1},
        {"logit_bias": {str(token): -100 for token in ALL[::2]}, "bad_words": [[token] for token in ALL[1::2]]},
    ],
    ids=lambda fields: " and ".join(fields),
)  # fmt: skip
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0}, {"stream": True, "n": 2}, {"speculation": {"enabled": False}}]
)
def test_parameters_that_forbid_every_first_token_are_refused(host: Host, fields: Any, more: dict[str, Any]) -> None:
    before = host.llm.stats.steps
    for path, prompt in ((PATH, {"prompt": ["a", "b"]}), (CHAT_PATH, {"messages": USER})):
        message = refused(host.post(path, max_tokens=4, **prompt, **fields, **more), 400)
        assert f"forbid all {V} tokens" in message
    assert host.llm.stats.steps == before
    assert host.service.admitted == 0


def test_a_form_none_of_whose_first_tokens_is_allowed_is_refused(host: Host) -> None:
    beginning = [token for token in ALL if host.service.token_text(token).startswith("x")]
    body = {
        "prompt": "a", "structured_outputs": {"regex": "x+"}, "logit_bias": dict.fromkeys(map(str, beginning), -100),
    }  # fmt: skip
    assert "as its first token" in refused(host.post(PATH, **body), 400)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_dead_end_in_the_middle_of_a_text_ends_its_request_alone(host: Host, temperature: float) -> None:
    """The form is x, then y, which is forbidden."""
    y = [token for token in ALL if "y" in host.service.token_text(token)]
    dead = {
        "prompt": "a", "structured_outputs": {"regex": "xy"}, "bad_words": [[token] for token in y],
        "temperature": temperature,
    }  # fmt: skip
    well = {"prompt": "def add(a, b):", "max_tokens": 40, "temperature": 0}
    text = host.post(PATH, **well).json()["choices"][0]["text"]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(host.post, PATH, **well) for _ in range(2)]
        answered = host.post(PATH, **dead)
        assert "forbid every token" in refused(answered, 400)
        assert answered.json()["error"]["code"] == "dead_end"
        assert [each.result().json()["choices"][0]["text"] for each in futures] == [text, text]
    *_, last = host.events(PATH, **dead)
    assert last["error"]["code"] == "dead_end"
    eventually(lambda: host.service.admitted == 0 and not host.llm.stats.running)
