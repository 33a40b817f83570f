"""Clients of the wild: the shapes of their requests (recorded, then shortened), and what browsers and probes ask."""

import json
import logging
from typing import Any

import pytest

from slipstream import LLM
from slipstream.cli.serve import ServerOptions
from slipstream.errors import ParameterError
from slipstream.server import api_error
from slipstream.server.app import create_app
from slipstream.server.service import Service
from tests.server.hosting import Host, hosted, refused
from tests.server.talking import CALL, TEMPLATE, TOOLS, USER, talking_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WEATHER = TOOLS[0]["function"]
CODEX: dict[str, Any] = {
    "input": [
        {"type": "message", "id": "m1", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "id": "m2", "role": "developer", "content": [{"type": "input_text", "text": "Ask."}]},
        {"type": "message", "id": "m3", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    ],
    "tools": [
        {"type": "function", "strict": False, **WEATHER}, {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "agents", "description": "-", "tools": [{"type": "function", **WEATHER}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "client_metadata": {"session_id": "a"},
    "text": {"verbosity": "low"},
}  # fmt: skip
CODEX_BACK: list[Any] = [
    {"type": "message", "status": "completed", "id": "m4", "role": "assistant",
     "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "status": "completed", "id": "f1", "name": "weather", "arguments": "{}", "call_id": "c1"},
    {"type": "function_call_output", "id": "o1", "call_id": "c1", "output": "Sun."},
]  # fmt: skip
CLAUDE: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: none."},
    ],
    "tools": [
        {"name": "weather", "description": "-", "input_schema": WEATHER["parameters"],
         "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ],
    "metadata": {"user_id": "a"}, "max_tokens": 200, "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}  # fmt: skip
CLAUDE_BACK: list[Any] = [
    {"role": "assistant", "content": [
        {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sun.", "is_error": False,
                                  "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip
OPENCODE: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, *USER],
    "tools": [{"type": "function", "function": WEATHER}], "max_tokens": 200, "tool_choice": "auto",
    "stream_options": {"include_usage": True},
    "prompt_cache_key": "a", "prompt_cache_retention": "24h",
}  # fmt: skip
OPENCODE_BACK: list[Any] = [
    {"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
]  # fmt: skip
REQUESTS = {
    "codex": (RESPONSES, CODEX, "input", CODEX_BACK), "claude code": (MESSAGES, CLAUDE, "messages", CLAUDE_BACK),
    "opencode": (CHAT, OPENCODE, "messages", OPENCODE_BACK),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_an_agent_calls_a_tool_and_gets_an_answer(talker: Host, name: str) -> None:
    path, body, turns, back = REQUESTS[name]
    for more, text in (([], f"I look.{CALL}"), (back, "It is sunny.")):
        given = body | {"structured_outputs": {"choice": [text]}, turns: [*body[turns], *more]}
        assert talker.post(path, **given, stream=True).status_code == 200
        answered = talker.post(path, **given)
        assert answered.status_code == 200, answered.text
        said = answered.json()
        blocks = said.get("output") or said.get("content") or [said["choices"][0]["message"]]
        assert text.removesuffix(CALL) in json.dumps(blocks)
        assert ('"weather"' in json.dumps(blocks)) == (not more)


def test_what_has_no_effect_is_said_once(talker: Host, caplog: pytest.LogCaptureFixture) -> None:
    api_error.has_no_effect.cache_clear()
    with caplog.at_level(logging.WARNING, "slipstream"):
        for _ in range(2):
            assert talker.post(RESPONSES, **CODEX, max_output_tokens=1).status_code == 200
            thinking = {"type": "enabled", "budget_tokens": 1024}
            assert talker.post(MESSAGES, **CLAUDE | {"max_tokens": 1, "thinking": thinking}).status_code == 200
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(said) == len(set(said))
    for name in (
        "include", "client_metadata", "prompt_cache_key", "reasoning.summary", "text.verbosity", "'web_search'",
        "'namespace'", "'custom'", "context_management", "reasoning_effort", "budget_tokens", "tools.cache_control",
    ):  # fmt: skip
        assert sum(name in line for line in said) == 1, name


def test_texts_are_joined_where_the_template_wants_roles_to_alternate(pair: LLM, tmp_path: Any) -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    )
    for folder, template in (("one", refusing + "{{ m.content }};{% endfor %}"), ("all", TEMPLATE)):
        (tmp_path / folder).mkdir()
        with hosted(pair, tokenizer=talking_tokenizer(tmp_path / folder, template)) as host:
            body = {"messages": CLAUDE["messages"], "system": "Be brief.", "max_tokens": 1}
            assert host.post(MESSAGES, **body).status_code == 200
            if folder == "one":
                roles = ("system", "user", "developer", "user", "assistant", "user")
                talk = [{"role": role, "content": "ABCDEF"[i]} for i, role in enumerate(roles)]
                ids = host.post("/tokenize", messages=talk).json()["tokens"]
                assert host.service.tokenizer.decode(ids).startswith("A\n\nC;B\n\nD;E;F;")


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_pages_of_allowed_origins_may_ask_and_others_may_not(talker: Host) -> None:
    """A browser asks without the key first."""
    from starlette.testclient import TestClient

    service: Service = talker.service
    for origins, origin, allowed in (
        (("*",), "http://a", True), (("http://a",), "http://a", True), (("http://a",), "http://b", False),
        ((), "http://a", False),
    ):  # fmt: skip
        page = TestClient(create_app(service, origins), headers={"Origin": origin})
        asked = page.options(CHAT, headers=PREFLIGHT)
        assert (asked.status_code == 200) == allowed
        for answered in (asked, page.get("/v1/models")):  # an error, too, must be readable
            assert ("access-control-allow-origin" in answered.headers) == allowed


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "http://a/b", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    assert ServerOptions(allowed_origins=["*", "null", "http://localhost:3000", "app://page"])
    with pytest.raises(ParameterError, match="origin"):
        ServerOptions(allowed_origins=[origin])


def test_head_is_answered_as_get_without_a_body(talker: Host) -> None:
    for path, status in (("/", 200), ("/health", 200), ("/ready", 200), ("/v1/models", 200), (CHAT, 405), ("/no", 404)):
        answered = talker.http.head(path)
        assert (answered.status_code, answered.content) == (status, b"")
    assert talker.http.head("/v1/models", headers={"Authorization": ""}).status_code == 401


def test_bytes_of_tokens_join_to_the_text_also_within_characters(talker: Host) -> None:
    text = "é 🙂 字"
    body = {"messages": USER, "structured_outputs": {"choice": [text]}, "logprobs": True, "max_tokens": 60}
    tokens = talker.post(CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    assert any("\ufffd" in token["token"] for token in tokens)
    written = b"".join(bytes(token["bytes"]) for token in tokens if token["token"] != "<|end|>")
    assert written.decode().strip() == text


def test_a_tool_that_is_left_out_cannot_be_chosen(talker: Host) -> None:
    body = {
        "messages": USER,
        "tools": [{"type": "web_search"}],
        "tool_choice": {"type": "function", "function": {"name": "web_search"}},
    }
    assert "not among the tools" in refused(talker.post(CHAT, **body), 400, "tool_choice")


@pytest.mark.parametrize(("kind", "begun"), [("enabled", True), ("disabled", False), ("adaptive", False)])
def test_thinking_reaches_a_template_that_reads_it(talker: Host, kind: str, begun: bool) -> None:
    body = {"messages": USER, "max_tokens": 100, "thinking": {"type": kind}}
    plain = talker.post(MESSAGES + "/count_tokens", messages=USER).json()["input_tokens"]
    used = talker.post(MESSAGES, **body, structured_outputs={"choice": ["Yes."]}).json()["usage"]
    assert (used["input_tokens"] + used["cache_read_input_tokens"] > plain) == begun
