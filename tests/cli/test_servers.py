"""`slipstream bench --serve`: load on a server of our own."""

import json
import os

import pytest

from slipstream.cli.bench import TrafficOptions
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.results import read
from slipstream.measure.traffic_client import TrafficClient
from slipstream.measure.traffic_figures import make_section

QUICK = ["-n", "6", "--rounds", "2", "--requests", "4", "--warm-up", "1"]


def test_tables_for_people(cli, report, host, texts, tmp_path):
    out = tmp_path / "r.json"
    given = ["--concurrency", "1,2", "--rate", "50", "--ignore-eos", "--out", out]
    result = cli("bench", texts, "--serve", f"{host.url}/v1", *QUICK, *given, code=0)
    for part in ("Throughput", "tok/s (95%)", "accept tau", "1 at once", "2 at once", "50 a second", "Latency",
                 "first text", "next token", "gap", "whole", "p50, ms p95, ms p99, ms", "2 interleaved passes",
                 "output tokens a second"):  # fmt: skip
        assert part in result.shown
    assert result.width <= 80
    assert "not enough passes" in result.said
    served = read(out)
    assert [arm["load"] for arm in served.data["arms"]] == ["1 at once", "2 at once", "50 a second"]
    for arm in served.data["arms"]:
        assert (arm["answered"], arm["errors"], arm["output_tokens"]) == (8, {}, 48)
        assert arm["prompt_tokens"] > 0
        assert arm["counted"]
        assert 0 < arm["first"]["p50"] <= arm["whole"]["p50"]
        assert 0 <= arm["acceptance_rate"] <= 1
        assert 1 <= arm["mean_acceptance_length"] <= 4
    (server,) = served.provenance["servers"]
    assert (server["model"]["drafter"], server["model"]["draft_tokens"]) == ("model", 3)
    assert {"date", "command", "machine", "versions"} <= served.provenance.keys()
    assert os.environ["OPENAI_API_KEY"] not in out.read_text()
    assert "Throughput" in report(out)
    served.data["arms"] = []
    assert make_section(served).lead == "Nothing was measured before the run ended."


def test_several_servers_are_compared_with_the_first(cli, host, texts, monkeypatch):
    described = Endpoint.describe
    monkeypatch.setattr(Endpoint, "describe", lambda self: {**described(self), "root": "/home/somebody/models/tiny"})
    places = ["--serve", f"{host.url}/v1", "--serve", host.url.replace("127.0.0.1", "localhost") + "/v1"]
    options = [*QUICK, "--rounds", "3", "--concurrency", "2", "--temperature", "0.7", "--json"]
    result = cli("bench", texts, *places, *options, code=0)
    assert "somebody" not in result.out  # a folder of the server's machine
    first, second = json.loads(result.out)["data"]["arms"]
    assert (first["ratio"], first["against"], second["against"]) == (None, None, 0)
    assert second["ratio"]["low"] <= second["ratio"]["value"] <= second["ratio"]["high"]


def test_requests_for_an_answer_go_to_chats_and_text_to_completions(cli, host, texts, monkeypatch):
    seen = []
    ask = TrafficClient.ask

    async def noted(self, request, scheduled):
        seen.append(request)
        return await ask(self, request, scheduled)

    monkeypatch.setattr(TrafficClient, "ask", noted)
    given = ["--concurrency", "1,2", "--distinct", "--top-p", "0.9", "--temperature", "1"]
    cli("bench", texts, "--serve", f"{host.url}/v1", *QUICK, *given, code=0)
    assert {each.path for each in seen} == {"/completions"}
    assert len({each.body["prompt"] for each in seen}) == len(seen) == 18, "also those of different loads"
    assert len({each.body["seed"] for each in seen}) == 9
    assert seen[0].body.keys() == {"prompt", "max_tokens", "temperature", "top_p", "seed"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--serve", "URL", "--drafter", "ngram"], "drafter would be ignored: a running server has its own settings"),
        (["--serve", "URL", "--batch", "4"], "--batch would be ignored: it has no meaning for servers"),
        (["--serve", "URL", "--temperature", "0,1"], "servers are measured at one temperature"),
        (["--serve", "URL", "--concurrency", "0"], "concurrency is 0"),
        (["--concurrency", "4"], "concurrency was given, but it has an effect only for servers"),
        (["--serve", "localhost:8000"], "must begin with http:// or https://"),
        (["--serve", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--serve", "URL", "--served-model", "other"], "lists no model named other"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(refused, host, texts, given, said):
    assert said in refused("bench", texts, *[f"{host.url}/v1" if word == "URL" else word for word in given])


def test_a_wrong_key_is_refused(refused, host, texts, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert "HTTP status 401" in refused("bench", texts, "--serve", f"{host.url}/v1")


def test_the_usual_number_of_requests_grows_with_those_in_flight():
    loads = TrafficOptions(concurrency="16", rate="2").loads("1,4,16")
    assert [(load.requests, load.warm_up) for load in loads] == [(32, 16), (16, 2)]
    assert TrafficOptions(rate="2", requests=5, warm_up=0).loads("1,4,16")[0].requests == 5
