"""Odd combinations of fields and odd values are never answered with an error of the server."""

import random
from typing import Any

import pytest

from slipstream.server.fields import CHAT, ENDPOINTS, fields_of
from tests.server.hosting import Host

V = 4096
LETTERS = {
    "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "temperature": [0, 1e-300, 1e-30, 0.7, 100, 100.0],
    "top_p": [1, 5e-324, 1e-9, 0.5],
    "top_k": [-1, 0, 1, 2, V, 10**30],
    "min_p": [0, 1, 0.3],
    "repetition_penalty": [1, 1e-300, 100, 1.3],
    "frequency_penalty": [-2, 2, 0.0],
    "presence_penalty": [-2, 2],
    "logit_bias": [{}, {"0": -100, str(V - 1): 100}, dict.fromkeys(map(str, range(V - 1)), -100), {"7": -99.999},
                   dict.fromkeys(map(str, range(V)), 100)],
    "bad_words": [[], "a", [[token] for token in range(2, V)], ["a", [1, 2, 3], "the"], [" "]],
    "min_tokens": [0, 1, 3, 10**30],
    "stop": ["a", [" ", "e"], ["\n"] * 64, "\u4e2d\u6587"],
    "stop_token_ids": [[], [0], list(range(V))],
    "ignore_eos": [True, False],
    "seed": [0, -1, 2**63, 10**30, -(2**63)],
    "logprobs": [0, 20],
    "echo": [True],
    "n": [1, 3],
    "structured_outputs": [
        *({"regex": regex} for regex in ("a*", "[0-9]+", "(x|y){3}", ".")),
        *({"choice": choice} for choice in (["a", "ab", "abc"], ["\u4e2d"])),
        *({"json": schema} for schema in (LETTERS, True)),
    ],
    "speculation": [{"enabled": False}, {"draft_tokens": 0}, {"draft_tokens": 256}, {"rule": "coupled"},
                    {"rule": "greedy"}, {"rule": "block"}, {"rule": []}, {"rule": "none"},
                    {"drafter": "suffix"}, {"rule": "coupled", "draft_tokens": 2}],
    "prediction": [{"type": "content", "content": "a b c d"}, {"type": "content", "content": ""}],
    "statistics": [True],
    "stream": [True],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_no_combination_is_answered_with_an_error_of_the_server(host: Host, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        names = draw.sample(sorted(VALUES), draw.randint(2, 7))
        body = {"prompt": draw.choice(["a", "def f(", ["x", "y"], [1, 2, 3]]), "max_tokens": draw.choice([0, 1, 4])}
        body |= {name: draw.choice(VALUES[name]) for name in names}
        answered = host.post("/v1/completions", **body)
        assert answered.status_code in (200, 400), (body, answered.text)
        assert '"type":"server_error"' not in answered.text, body
    assert host.service.admitted == 0
    assert host.http.get("/ready").status_code == 200


ODD: list[Any] = [True, -1, 0.5, 10**30, "x", [], ["x"], [[]], [{"type": "text"}], {}, {"type": "x"}, {"a": [None]}]


@pytest.mark.parametrize("where", ENDPOINTS)
def test_no_value_of_a_field_is_answered_with_an_error_of_the_server(host: Host, where: str) -> None:
    user = [{"role": "user", "content": "hi"}]
    base = {"completions": {"prompt": "a"}, "responses": {"input": user}}.get(where, {"messages": user})
    base["max_output_tokens" if where == "responses" else "max_tokens"] = 2
    for name in fields_of(where):
        for value in ODD:
            answered = host.post("/v1/chat/completions" if where == CHAT else f"/v1/{where}", **base | {name: value})
            assert answered.status_code in (200, 400, 404), (name, value, answered.text)
            if answered.status_code != 200:
                assert answered.json()["error"]["message"], (name, value)
    assert host.service.admitted == 0
