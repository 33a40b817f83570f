"""`slipstream tune --base-url`: on a server of our own, and on servers that fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from slipstream import LLM
from slipstream.bench import load_client
from slipstream.bench.endpoint import Endpoint
from slipstream.bench.results import read
from tests.bench.virtual_time import ScriptedServer
from tests.checkpoints import Tiny
from tests.server.hosting import Host, hosted

PLACE = "http://server/v1"


@pytest.fixture(scope="module")
def host(tiny: Tiny) -> Iterator[Host]:
    llm = LLM(str(tiny.target), draft=str(tiny.draft), draft_tokens=3, max_batch=4, executor="torch", device="cpu")
    with hosted(llm) as made:
        yield made


class Counting(ScriptedServer):
    """Its counters grow with every look at them, as if requests ran; `metrics` says how."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        self.asked.append({})
        return answer


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedServer], None]:
    """Puts a server in place of the network."""

    def put(server: ScriptedServer) -> None:
        monkeypatch.setattr(Endpoint, "described", lambda self: {"id": "words"})
        monkeypatch.setattr(load_client, "_http", lambda endpoint, transport: httpx.AsyncClient(transport=server))

    return put


def vllm(server: ScriptedServer) -> str:
    """Of each request four drafts of two tokens, one of which is accepted."""
    asked = len(server.asked)
    names = {"drafts": 4, "draft_tokens": 8, "accepted_tokens": 4}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {each * asked}' for name, each in names.items()]
    for position, each in ((0, 3), (1, 1)):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {each * asked}')
    return "\n".join([*lines, f'vllm:generation_tokens_total{{engine="0"}} {8 * asked}', ""])


def test_a_server_of_our_own_is_examined(cli, host, tmp_path, monkeypatch):
    """Between the two looks at its counters it answers a request."""
    look, looks = load_client.LoadClient.counters, []

    async def counters(self: load_client.LoadClient) -> object:
        looks.append(await look(self))
        if len(looks) == 1:
            body = {"model": "embedded", "prompt": "for", "max_tokens": 12, "ignore_eos": True}
            answer = await self._http.post(f"{host.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        return looks[-1]

    monkeypatch.setattr(load_client.LoadClient, "counters", counters)
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    result = cli("tune", "--base-url", f"{host.url}/v1", "--watch", "0", "--out", out)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("What Slipstream reports, 0 s watched", "prefix hits", "Tokens were drafted in",
                 "spec_decode_num_accepted_tokens_per_pos_total"):  # fmt: skip
        assert part in said
    assert any(verdict in said for verdict in ("Cause: ", "Nothing is wrong: "))
    assert max(map(len, result.out.splitlines())) <= 80
    found = read(out, "tune-served").data
    known = found["counters"]
    assert known["server"] == "slipstream"
    assert known["drafts"] <= known["draft_tokens"] <= 3 * known["drafts"]
    assert (known["requests"], known["output_tokens"]) == (1, 12)
    assert found["diagnosis"]["forecast"]["longest"] == 3
    assert cli("report", out, "-o", page).code == 0
    assert "Does speculation pay on this server?" in page.read_text()


def test_watching_sends_nothing(cli, host):
    result = cli("tune", "--base-url", f"{host.url}/v1", "--watch", "0", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)["data"]
    assert found["counters"]["output_tokens"] == 0
    assert found["diagnosis"]["reason"] == "no request ran"


def test_the_advice_follows_the_counters(cli, scripted):
    scripted(Counting(metrics=vllm))
    result = cli("tune", "--base-url", PLACE, "--watch", "0", "--c", "0.5", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)["data"]
    assert data["counters"]["accepted_at"] == [0.75, 0.25]
    assert data["diagnosis"]["fix"] == 'draft 1 token: "num_speculative_tokens": 1 in --speculative-config'


def test_without_counters_there_is_no_diagnosis(cli, scripted):
    scripted(Counting())
    result = cli("tune", "--base-url", PLACE)
    assert result.code == 0, result.err
    assert "the server reports no counters at /metrics" in " ".join(result.out.split())


def test_a_server_without_speculation_is_told_so(cli, scripted):
    scripted(Counting(metrics=lambda s: f"vllm:generation_tokens_total {8 * len(s.asked)}\n"))
    result = cli("tune", "--base-url", PLACE, "--watch", "0")
    assert (result.code, result.err.count("error")) == (0, 0)
    assert "Cause: nothing is drafted. Fix: switch speculation on" in " ".join(result.out.split())


def test_bad_input_is_refused_in_one_message(cli, texts):
    nobody = ["--base-url", "http://127.0.0.1:9/v1"]
    for given, said in (
        ([*nobody, "--watch", "1"], "http://127.0.0.1:9/v1 cannot be reached"),
        (["--base-url", "localhost:8000"], "must begin with http:// or https://"),
        ([*nobody, "--drafter", "ngram"], "drafter would be ignored: a server brings its own settings"),
        ([*nobody, "--batch", "4"], "--batch would be ignored: it has no meaning for servers"),
        ([*nobody, "--concurrency", "1"], "concurrency would be ignored"),
        ([*nobody, "--temperature", "1"], "temperature would be ignored"),
        ([texts, *nobody], "prompts would be ignored"),
        ([*nobody, "--rounds", "2"], "--rounds would be ignored"),
        (["--watch", "3"], "watch is given without a server. Fix: name one: --base-url URL"),
    ):
        result = cli("tune", *given)
        assert (result.code, result.out, result.said.count("error: ")) == (2, "", 1), given
        assert said in result.said
    result = cli("tune", *nobody, "--write", "x.json", "--confirm", "2")
    assert (result.code, "--confirm, --write would be ignored" in result.said) == (2, True)


def test_a_server_that_stops_answering_while_it_is_watched_is_an_error(cli, scripted):
    class Leaving(Counting):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.metrics = None if self.asked else vllm
            return await super().handle_async_request(request)

    scripted(Leaving())
    result = cli("tune", "--base-url", PLACE, "--watch", "0")
    assert (result.code, result.out) == (2, "")
    assert "http://server/v1 reports no counters any more" in result.said
