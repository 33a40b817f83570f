"""Statistics that were asked for, and what they say of predicted outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream import LLM
from tests.server.hosting import Host, hosted

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x = [1, 2, 3]\nx = [1, 2, 3]\nx =", "temperature": 0, "max_tokens": 32}


@pytest.mark.parametrize("stop", [None, "\n", "3]\n"])
def test_each_piece_of_a_stream_says_which_drafter_proposed_its_tokens(host: Host, stop: str | None) -> None:
    parts = host.parts(PATH, **BODY, stop=stop, statistics=True)
    for part in parts:
        assert "".join(token["text"] for token in part["tokens"]) == part["text"]
    names = [token["drafter"] for part in parts for token in part["tokens"]]
    *before, last = parts
    assert not any("statistics" in part for part in before)
    stats = last["statistics"]
    assert names == stats["drafted_by"]
    assert set(names) == {None, "model"}
    assert sum(name is not None for name in names) == stats["accepted"]
    assert len(names) == stats["tokens"]
    assert stats["decode_tokens"] == stats["tokens"] - 1, "the first step reads the prompt, and gives one token"
    assert 0 < stats["decode_seconds"] < 60


def test_tokens_without_text_of_their_own_are_counted_in_a_stream(host: Host) -> None:
    body = BODY | {"temperature": 1, "seed": 1, "max_tokens": 120, "structured_outputs": {"regex": "(é|漢|🙂){12}"}}
    parts = host.parts(PATH, **body, statistics=True)
    tokens = [token for part in parts for token in part["tokens"]]
    assert len(tokens) == parts[-1]["statistics"]["tokens"] > 12
    assert len("".join(token["text"] for token in tokens)) == 12


@contextmanager
def drafting(pair: LLM, draft: object) -> Iterator[Host]:
    """A server of the pair with another drafter."""
    pair.use(draft)
    try:
        with hosted(pair) as host:
            yield host
    finally:
        pair.use("embedded")


def test_a_stack_names_its_members(pair: LLM) -> None:
    with drafting(pair, ["suffix", "embedded"]) as host:
        parts = host.parts(PATH, **BODY | {"max_tokens": 64}, statistics=True)
    names = {token["drafter"] for part in parts for token in part["tokens"]}
    assert names >= {None, "suffix"}
    assert names <= {None, "suffix", "model"}


def test_statistics_tell_whether_other_choices_ran_at_the_same_time(host: Host) -> None:
    alone = host.post(PATH, **BODY, statistics=True).json()["choices"]
    assert alone[0]["statistics"]["others"] == 0
    three = host.post(PATH, **BODY, n=3, statistics=True).json()["choices"]
    assert [each["statistics"]["others"] for each in three] == [2, 2, 2]


STACK: dict[str, Any] = {
    "prompt": "class Stack:\n    def push(self", "temperature": 0, "max_tokens": 64, "statistics": True,
}  # fmt: skip


@pytest.mark.parametrize("draft", ["embedded", "suffix", None])
def test_a_right_prediction_gives_the_same_text_in_fewer_steps(pair: LLM, draft: str | None) -> None:
    with drafting(pair, draft) as host:
        plain = host.post(PATH, **STACK).json()["choices"][0]
        expected = {"type": "content", "content": plain["text"]}
        answer = host.post(PATH, **STACK, prediction=expected).json()
    choice = answer["choices"][0]
    assert choice["text"] == plain["text"]
    assert choice["statistics"]["steps"] <= 16 < plain["statistics"]["tokens"]
    assert choice["statistics"]["steps"] < plain["statistics"]["steps"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == choice["statistics"]["accepted"] >= 48
    rejected = choice["statistics"]["proposed"] - choice["statistics"]["accepted"]
    assert details["rejected_prediction_tokens"] == rejected


def test_a_wrong_prediction_gives_the_same_text_and_is_not_read_where_speculation_is_off(host: Host) -> None:
    plain = host.post(PATH, **STACK).json()["choices"][0]
    wrong = {"type": "content", "content": [{"type": "text", "text": "    return self.items.pop()\n" * 20}]}
    assert host.post(PATH, **STACK, prediction=wrong).json()["choices"][0]["text"] == plain["text"]
    off = {"speculation": {"enabled": False}, "prediction": {"type": "content", "content": "a b c"}}
    assert host.post(PATH, **STACK, **off).json()["choices"][0]["statistics"]["proposed"] == 0
