"""Predicted outputs: the same text in fewer steps."""

from __future__ import annotations

import pytest

from slipstream import LLM
from tests.server.hosting import Host, hosted

PATH = "/v1/completions"
BODY = {"prompt": "class Stack:\n    def push(self", "temperature": 0, "max_tokens": 64, "statistics": True}


@pytest.mark.parametrize("draft", ["embedded", "suffix", None])
def test_a_right_prediction_gives_the_same_text_in_fewer_steps(pair: LLM, draft: str | None) -> None:
    pair.use(draft)
    try:
        with hosted(pair) as host:
            plain = host.post(PATH, **BODY).json()["choices"][0]
            expected = {"type": "content", "content": plain["text"]}
            answer = host.post(PATH, **BODY, prediction=expected).json()
    finally:
        pair.use("embedded")
    choice = answer["choices"][0]
    assert choice["text"] == plain["text"]
    assert choice["statistics"]["steps"] <= 16 < plain["statistics"]["tokens"]
    assert choice["statistics"]["steps"] < plain["statistics"]["steps"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == choice["statistics"]["accepted"] >= 48
    assert details["rejected_prediction_tokens"] == (
        choice["statistics"]["proposed"] - choice["statistics"]["accepted"]
    )


def test_a_wrong_prediction_gives_the_same_text(host: Host) -> None:
    plain = host.post(PATH, **BODY).json()["choices"][0]
    wrong = {"type": "content", "content": [{"type": "text", "text": "    return self.items.pop()\n" * 20}]}
    assert host.post(PATH, **BODY, prediction=wrong).json()["choices"][0]["text"] == plain["text"]


def test_speculation_that_is_off_reads_no_prediction(host: Host) -> None:
    off = {"speculation": {"enabled": False}, "prediction": {"type": "content", "content": "a b c"}}
    assert host.post(PATH, **BODY, **off).json()["choices"][0]["statistics"]["proposed"] == 0


@pytest.mark.parametrize("value", ["text", {"content": "a"}, {"type": "content"}, {"type": "content", "content": 5}])
def test_a_prediction_in_another_form_is_refused(host: Host, value: object) -> None:
    answered = host.post(PATH, **BODY, prediction=value)
    assert answered.status_code == 400
    assert answered.json()["error"]["param"] == "prediction"
