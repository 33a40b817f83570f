"""Requests that leave no token possible: refused before anything runs if that is so at once, else ended alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.hosting import Host, eventually, refused

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
V = 4096
ALL = list(range(V))
EVERY = dict.fromkeys(map(str, ALL), -100)
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": EVERY},
        {"bad_words": [[token] for token in ALL]},
        {"stop_token_ids": ALL, "min_tokens": 1},
        {"logit_bias": {str(token): -100 for token in ALL[::2]}, "bad_words": [[token] for token in ALL[1::2]]},
    ],
    ids=lambda fields: " and ".join(fields),
)
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0}, {"stream": True, "n": 2}, {"speculation": {"enabled": False}}]
)
def test_parameters_that_forbid_every_first_token_are_refused(host: Host, fields: Any, more: dict[str, Any]) -> None:
    before = host.llm.load.steps
    for path, prompt in ((PATH, {"prompt": ["a", "b"]}), (CHAT_PATH, {"messages": USER})):
        message = refused(host.post(path, max_tokens=4, **prompt, **fields, **more), 400)
        assert f"forbid all {V} tokens" in message
    assert host.llm.load.steps == before
    assert host.service.admitted == 0


def test_a_form_none_of_whose_first_tokens_is_allowed_is_refused(host: Host) -> None:
    beginning = [token for token in ALL if host.service.token_text(token).startswith("x")]
    body = {
        "prompt": "a",
        "structured_outputs": {"regex": "x+"},
        "logit_bias": dict.fromkeys(map(str, beginning), -100),
    }
    assert "as the first one" in refused(host.post(PATH, **body), 400)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_dead_end_in_the_middle_of_a_text_ends_its_request_alone(host: Host, temperature: float) -> None:
    """The form is x, then y, which is forbidden."""
    y = [token for token in ALL if "y" in host.service.token_text(token)]
    dead = {
        "prompt": "a",
        "structured_outputs": {"regex": "xy"},
        "bad_words": [[token] for token in y],
        "temperature": temperature,
    }
    well = {"prompt": "def add(a, b):", "max_tokens": 40, "temperature": 0}
    text = host.post(PATH, **well).json()["choices"][0]["text"]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(host.post, PATH, **well) for _ in range(2)]
        answered = host.post(PATH, **dead)
        assert "every token is forbidden" in refused(answered, 400)
        assert answered.json()["error"]["code"] == "dead_end"
        assert [each.result().json()["choices"][0]["text"] for each in futures] == [text, text]
    *_, last = [json.loads(event) for event in host.events(PATH, **dead)]
    assert last["error"]["code"] == "dead_end"
    eventually(lambda: host.service.admitted == 0 and not host.llm.load.running)
