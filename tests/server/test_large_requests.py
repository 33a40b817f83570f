"""One request, however large, does not stop the others: what takes long is done in threads, work in a step and in the
event loop has a bound, and a request of many choices leaves a place in the batch."""

import asyncio
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM
from slipstream.engine.messages import Streams
from slipstream.engine.request_checks import RequestChecks
from slipstream.server.completions import ChoicesWriter
from slipstream.server.fields import CHAT, COMPLETIONS, ENDPOINTS, MESSAGES, RESPONSES, fields_of
from slipstream.server.messages_api import MessagesWriter
from slipstream.server.responses_api import ResponsesWriter
from tests.server.hosting import Host

SMALL = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
PATH, CHATS_PATH = "/v1/completions", "/v1/chat/completions"
WORDS = ["".join(random.Random(n).choices("abcdefghij", k=8)) for n in range(4096)]
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("path", [PATH, CHATS_PATH, "/v1/responses", "/v1/messages"])
def test_requests_are_checked_and_answers_written_outside_of_the_event_loop(
    talker: Host, path: str, monkeypatch
) -> None:
    where = Counter[str]()

    def noted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def noting(*given: Any, **named: Any) -> Any:
            try:
                asyncio.get_running_loop()
                where[f"{name} in the loop"] += 1
            except RuntimeError:
                where[name] += 1
            return method(*given, **named)

        monkeypatch.setattr(kind, name, noting)

    for name in ("prompt", "params", "prediction"):
        noted(RequestChecks, name)
    for kind in (ChoicesWriter, ResponsesWriter, MessagesWriter):
        noted(kind, "write_whole")
    body = {"prompt": "a"} if path == PATH else {"input": "hi"} if path == "/v1/responses" else {"messages": [USER]}
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert talker.post(path, **body, **{length: 2}).status_code == 200
    assert set(where) == {"prompt", "params", "prediction", "write_whole"}


@pytest.mark.parametrize(("n", "together"), [(7, 7), (8, 7), (16, 7)])
def test_a_request_of_many_choices_leaves_a_place_in_the_batch(
    host: Host, pair: LLM, n: int, together: int, monkeypatch
) -> None:
    running, most, follow = 0, 0, Streams.follow

    async def counted(self, ask):
        nonlocal running, most
        running += 1
        most = max(most, running)
        async for update in follow(self, ask):
            running -= update.finish is not None
            yield update

    monkeypatch.setattr(Streams, "follow", counted)
    assert len(host.post(PATH, prompt="a", max_tokens=4, n=n).json()["choices"]) == n
    assert (most, pair.max_batch) == (together, 8)


BIG: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": (PATH, {"prompt": "a b " * 300_000}),
    "prompts": (PATH, {"prompt": ["a b"] * 128, "max_tokens": 1}),
    "ids": (PATH, {"prompt": [5] * 500_000}),
    "lists": (PATH, {"prompt": [["a"] * 200_000]}),
    "n": (PATH, {"prompt": "a", "n": 128, "max_tokens": 1, "logprobs": 20}),
    "stop": (PATH, {"prompt": "a", "stop": [("a" * 1000 + word)[-1024:] for word in WORDS[:64]], "max_tokens": 8}),
    "longer stop": (PATH, {"prompt": "a", "stop": [word * 10_000 for word in WORDS[:64]]}),
    "bad_words": (PATH, {"prompt": "a", "bad_words": WORDS, "max_tokens": 8}),
    "more bad_words": (PATH, {"prompt": "a", "bad_words": [[1, 2]] * 300_000}),
    "logit_bias": (PATH, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(4096)), 0.5), "max_tokens": 8}),
    "more logit_bias": (PATH, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(100_000)), 0.5)}),
    "stop_token_ids": (PATH, {"prompt": "a", "stop_token_ids": [7] * 300_000}),
    "prediction": (PATH, {"prompt": "a", "prediction": {"type": "content", "content": "a b " * 99_999}, "n": 2}),
    "longer prediction": (PATH, {"prompt": "a", "prediction": {"type": "content", "content": "a b " * 500_000}}),
    "echo": (PATH, {"prompt": [9] * 900, "echo": True, "logprobs": 20, "n": 32, "max_tokens": 1}),
    "choice": (PATH, {"prompt": "a", "structured_outputs": {"choice": [word * 4 for word in WORDS]}}),
    "regex": (PATH, {"prompt": "a", "structured_outputs": {"regex": "|".join(WORDS)}, "max_tokens": 8}),
    "json": (PATH, {"prompt": "a", "structured_outputs": {"json": {"properties": {word: {} for word in WORDS}}}}),
    "user": (PATH, {"prompt": "a", "user": "a" * 1_000_000, "max_tokens": 1}),
    "metadata": (CHATS_PATH, {"messages": [USER], "metadata": dict.fromkeys(WORDS, "a" * 100), "max_tokens": 1}),
    "messages": (CHATS_PATH, {"messages": [USER] * 5000}),
    "tools": (CHATS_PATH, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}] * 4096}),
    "unknown": (PATH, {"prompt": "a", **dict.fromkeys(WORDS, 1)}),
    "a wrong kind": (PATH, {"prompt": "a", "max_tokens": ["a"] * 200_000}),
    "tokenize": ("/tokenize", {"prompt": "a b " * 100_000, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [50] * 300_000}),
}  # fmt: skip


MOST_LINES = {"callback": 12_000, "add": 1000, "step": 8 * 100_000}
"""Lines of Python that may run at once. A step indexes `MOST_INDEXED` tokens of each prediction of its batch of 8."""


@pytest.fixture
def lines(talker: Host, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Most lines of Python that one callback of the event loop, one step and one new request of the engine have run.
    A loop within a line counts its rounds, too."""
    talker.post(PATH, **SMALL)  # FastAPI prepares its routes in the first request
    most = Counter[str]()

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            ran = 0

            def trace(frame: Any, event: str, _: Any) -> Any:
                nonlocal ran
                ran += event != "return"
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                return run(*given)
            finally:
                sys.settrace(before)
                most[name] = max(most[name], ran)

        return counting

    engine = talker.llm._thread.engine
    monkeypatch.setattr(asyncio.Handle, "_run", counted("callback", asyncio.Handle._run))
    for name in ("step", "add"):
        monkeypatch.setattr(engine, name, counted(name, getattr(engine, name)))
    return most


@pytest.mark.parametrize("name", BIG)
def test_a_small_request_waits_for_a_bounded_work_beside_a_large_one(
    talker: Host, name: str, lines: Counter[str]
) -> None:
    wanted = talker.post(PATH, **SMALL).json()["choices"]
    path, body = BIG[name]
    answers: list[Any] = []
    large = threading.Thread(target=lambda: answers.append(talker.post(path, **body)))
    large.start()
    assert talker.post(PATH, **SMALL).json()["choices"] == wanted
    large.join()
    assert answers[0].status_code in (200, 400)
    assert len(answers[0].text) < 3000 or answers[0].status_code == 200
    assert set(lines) == set(MOST_LINES)
    assert not {each: ran for each, ran in lines.items() if ran > MOST_LINES[each]}


LARGE: dict[str, Any] = {
    "text": "a" * 200_000, "ids": [5] * 20_000, "texts": ["a b"] * 20_000,
    "object": dict.fromkeys(map(str, range(15_000)), 1),
}  # fmt: skip
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    COMPLETIONS: (PATH, {"prompt": "a", "max_tokens": 1}), CHAT: (CHATS_PATH, {"messages": [USER], "max_tokens": 1}),
    RESPONSES: ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
    MESSAGES: ("/v1/messages", {"messages": [USER], "max_tokens": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("where", ENDPOINTS)
def test_no_field_of_any_kind_makes_others_wait_for_its_size(
    talker: Host, where: str, kind: str, lines: Counter[str]
) -> None:
    path, body = BODIES[where]
    read = [name for name, field in fields_of(where).items() if not field.refused and not field.ignored]
    for name in (*read, "a" * 200_000):
        answered = talker.post(path, **body | {name: LARGE[kind]})
        assert answered.status_code in (200, 400, 404), (name[:40], answered.text[:200])
        assert len(answered.text) < 6000 or name == "metadata", name[:40]
        assert lines["callback"] <= MOST_LINES["callback"], name[:40]
    assert lines["step"] <= MOST_LINES["step"]
    assert lines["add"] <= MOST_LINES["add"]
