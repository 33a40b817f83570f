"""`slipstream tune --base-url`: on a server of our own, and on servers that fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from slipstream import LLM
from slipstream.bench import load_client
from slipstream.bench.endpoint import Endpoint
from slipstream.bench.results import read
from tests.bench.virtual_time import Script, ScriptedServer
from tests.checkpoints import Tiny
from tests.server.hosting import Host, hosted

QUICK = ["-n", "6", "--rounds", "2", "--concurrency", "1,2"]
PLACE = "http://server/v1"


@pytest.fixture(scope="module")
def host(tiny: Tiny) -> Iterator[Host]:
    llm = LLM(str(tiny.target), draft=str(tiny.draft), draft_tokens=3, max_batch=4, executor="torch", device="cpu")
    with hosted(llm) as made:
        yield made


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


QUICKLY = Script(first=0.0, gap=0.0)


def test_a_server_of_our_own_is_examined(cli, host, texts, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    result = cli("tune", texts, "--base-url", f"{host.url}/v1", *QUICK, "--out", out, "--page", page)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("Loads", "1 at once", "2 at once", "What Slipstream reports, 2 at once", "prefix hits",
                 "Tokens were drafted in", "spec_decode_num_accepted_tokens_per_pos_total"):  # fmt: skip
        assert part in said
    assert any(verdict in said for verdict in ("Cause: ", "Nothing is wrong: "))
    assert max(map(len, result.out.splitlines())) <= 80
    found = read(out, "tune-served").data
    for arm in found["arms"]:
        known = arm["counters"]
        assert known["server"] == "slipstream"
        assert known["drafts"] <= known["draft_tokens"] <= 3 * known["drafts"]
        assert known["requests"] == arm["answered"]
        assert known["output_tokens"] == arm["output_tokens"]
    assert [f["longest"] for f in found["diagnosis"]["forecasts"]] == [3, 3]
    assert "Does speculation pay on this server?" in page.read_text()


def test_watching_sends_nothing(cli, host, texts):
    result = cli("tune", texts, "--base-url", f"{host.url}/v1", "--watch", "0", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)["data"]
    assert found["arms"][0]["counters"]["output_tokens"] == 0
    assert found["diagnosis"]["reason"] == "no request ran"


def test_the_advice_follows_the_counters(cli, texts, scripted):
    scripted(ScriptedServer(lambda i: QUICKLY, metrics=vllm))
    result = cli("tune", texts, "--base-url", PLACE, *QUICK, "--concurrency", "1", "--c", "0.5", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)["data"]
    assert [arm["counters"]["accepted_at"] for arm in data["arms"]] == [[0.75, 0.25]]
    assert data["diagnosis"]["fix"] == 'draft 1 token: "num_speculative_tokens": 1 in --speculative-config'


def test_without_counters_the_times_are_shown(cli, texts, scripted):
    scripted(ScriptedServer(lambda i: QUICKLY))
    result = cli("tune", texts, "--base-url", PLACE, *QUICK)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    assert "the server reports no counters at /metrics" in said
    assert "not reported" in said
    assert "tok/s" in said


def test_a_server_without_speculation_is_told_so(cli, texts, scripted):
    scripted(ScriptedServer(lambda i: QUICKLY, metrics=lambda s: f"vllm:generation_tokens_total {8 * len(s.asked)}\n"))
    result = cli("tune", texts, "--base-url", PLACE, *QUICK)
    assert (result.code, result.err.count("error")) == (0, 0)
    assert "Cause: nothing is drafted. Fix: switch speculation on" in " ".join(result.out.split())


def test_what_was_measured_before_the_server_failed_is_kept_and_shown(cli, texts, scripted, tmp_path: Path):
    """Warm-ups of 1 and 2, passes of 4 and 6 requests: it fails in the second round."""
    scripted(ScriptedServer(lambda i: QUICKLY if i < 13 else Script(status=503), metrics=vllm))
    out = tmp_path / "r.json"
    result = cli("tune", texts, "--base-url", PLACE, *QUICK, "--out", out)
    assert result.code == 2
    assert result.said.count("error: ") == 1
    assert "no request of the server at http://server/v1 succeeded: status 503" in result.said
    assert "the run was interrupted" in result.said
    assert "1 at once" in result.out
    found = read(out)
    assert (found.complete, [arm["rounds"] for arm in found.data["arms"]]) == (False, [1, 1])


def test_failures_of_some_requests_are_a_warning(cli, texts, scripted):
    scripted(ScriptedServer(lambda i: Script(status=500) if i == 5 else QUICKLY, metrics=vllm))
    result = cli("tune", texts, "--base-url", PLACE, *QUICK)
    assert result.code == 0
    assert "1 request failed (1 x status 500)" in result.said


def test_bad_input_is_refused_in_one_message(cli, texts, scripted, monkeypatch):
    nobody = ["--base-url", "http://127.0.0.1:9/v1"]
    for given, said in (
        ([*nobody], "http://127.0.0.1:9/v1 cannot be reached"),
        ([*nobody, "--watch", "1"], "http://127.0.0.1:9/v1 cannot be reached"),
        (["--base-url", "localhost:8000"], "must begin with http:// or https://"),
        ([*nobody, "--drafter", "ngram"], "drafter would be ignored: a server brings its own settings"),
        ([*nobody, "--batch", "4"], "--batch would be ignored: it has no meaning for servers"),
        ([*nobody, "--concurrency", "0"], "concurrency is 0"),
        (["--watch", "3"], "watch is given without a server. Fix: name one: --base-url URL"),
    ):
        result = cli("tune", texts, *given)
        assert (result.code, result.out, result.said.count("error: ")) == (2, "", 1), given
        assert said in result.said
    result = cli("tune", texts, *nobody, "--write", "x.json", "--confirm", "2")
    assert (result.code, "--confirm, --write would be ignored" in result.said) == (2, True)


def test_a_server_that_stops_answering_while_it_is_watched_is_an_error(cli, texts, scripted):
    class Leaving(ScriptedServer):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.metrics = None if self.asked else vllm
            answer = await super().handle_async_request(request)
            self.asked.append({})
            return answer

    scripted(Leaving())
    result = cli("tune", texts, "--base-url", PLACE, "--watch", "0")
    assert (result.code, result.out) == (2, "")
    assert "http://server/v1 reports no counters any more" in result.said
