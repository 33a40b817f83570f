"""`slipstream tune`, and the file that it writes."""

import json
from collections.abc import Callable

import httpx
import pytest

from slipstream.cli.tune import TuneModels
from slipstream.measure import traffic_client
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.results import read
from tests.checkpoints.gguf_files import family_config, gguf_model
from tests.measure.virtual_time import ScriptedServer

QUICK = ["-n", "8", "--rounds", "1", "--confirm", "1"]


def test_the_choice_is_shown_and_written_and_read_again(cli, report, pair, texts, tmp_path):
    out, choice = tmp_path / "r.json", tmp_path / "choice.json"
    given = ["--drafter", "model", "--drafter", "ngram", "-k", "3", "--out", out, "--write", choice]
    result = cli("tune", texts, *pair, *QUICK, *given, code=0)
    for part in ("Measured at the longest draft", "Measured against plain decoding", "Choice: ", "vllm: ",
                 "What limits the speed-up", "plain step", "rows per pass 1 2 4 8 16 32 64"):  # fmt: skip
        assert part in result.shown
    data = json.loads(out.read_text())["data"]
    written = json.loads(choice.read_text())
    assert written == data["configs"]["slipstream"]
    assert (written["executor"], written["dtype"]) == ("torch", "float64")
    assert written["drafter"] == ("none" if data["choice"] is None else data["choice"]["drafter"])
    assert "Which drafter and draft length?" in report(out)
    again = cli("generate", "for x in", "--config", choice, "-n", "4", "--json", code=0)
    plain = cli("generate", "for x in", *pair, "--drafter", "none", "-n", "4", "--json")
    assert json.loads(again.out)["text"] == json.loads(plain.out)["text"]


def test_what_is_tried_by_default():
    assert [(c.label, c.draft_tokens) for c in TuneModels().longest()] == [
        ("model", 8), ("ngram", 10), ("suffix", 10), ("model quantize=int8", 8), ("model quantize=int4", 8)
    ]  # fmt: skip
    assert [c.label for c in TuneModels(target="elsewhere").longest()] == ["ngram", "suffix"]
    assert [c.draft_tokens for c in TuneModels(draft_tokens=3).longest()] == [3] * 5
    assert [c.label for c in TuneModels(drafter=["suffix"]).longest()] == ["suffix"]


def test_formats_of_the_draft_are_tried_that_our_kernels_run(tiny, tmp_path):
    def tried(**options):
        return [c.options["quantize"] for c in TuneModels(**options).longest() if "quantize" in c.options]

    assert tried() == ["int8", "int4"]
    assert tried(quantize="int8") == ["none", "int4"]
    assert tried(draft_quantize="int8") == tried(drafter=["model"]) == tried(executor="torch") == []
    file, _ = gguf_model(tmp_path, family_config("llama"), ("Q8_0",))
    assert tried(target=str(tiny.target), draft=str(file)) == []  # its weights are quantised


def test_a_choice_in_another_format_is_read_again(cli, texts, tmp_path):
    choice = tmp_path / "choice.json"
    given = ["--drafter", "model:quantize=int4", "-k", "2", "--write", choice, "--json"]
    result = cli("tune", texts, *QUICK, *given, code=0)
    assert json.loads(result.out)["data"]["drafters"][0]["label"] == "model quantize=int4"
    choice.write_text(json.dumps({"drafter": "model", "draft_tokens": 2, "drafter_option": ["quantize=int4"]}))
    cli("generate", "def add", "--config", choice, "-n", "4", code=0)


def test_the_command_line_wins_over_the_file(cli, pair, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"drafter": "ngram", "draft_tokens": 3, "drafter_option": "max_ngram=2", "seed": 1}))
    result = cli("generate", "for x in", *pair, "--config", path, "-n", "3")
    assert "ngram drafter, 3 draft tokens" in result.said
    result = cli("generate", "for x in", *pair, "--config", path, "-n", "3", "-k", "2")
    assert "ngram drafter, 2 draft tokens" in result.said


PLACE = "http://server/v1"


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
        monkeypatch.setattr(Endpoint, "describe", lambda self: {"id": "words"})
        client = httpx.AsyncClient
        monkeypatch.setattr(httpx, "AsyncClient", lambda **options: client(**options | {"transport": server}))

    return put


def vllm(server: ScriptedServer) -> str:
    """Of each request 400 drafts of two tokens, one of which is accepted."""
    asked = 100 * len(server.asked)
    names = {"drafts": 4, "draft_tokens": 8, "accepted_tokens": 4}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {each * asked}' for name, each in names.items()]
    for position, each in ((0, 3), (1, 1)):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {each * asked}')
    return "\n".join([*lines, f'vllm:generation_tokens_total{{engine="0"}} {8 * asked}', ""])


def test_a_server_of_our_own_is_examined(cli, report, host, tmp_path, monkeypatch):
    """Between the two looks at its counters it answers a request, which is all that it counts: watching sends none."""
    look, looks = traffic_client.TrafficClient.counters, []

    async def counters(self: traffic_client.TrafficClient) -> object:
        looks.append(await look(self))
        if len(looks) == 1:
            body = {"model": "embedded", "prompt": "for", "max_tokens": 12, "ignore_eos": True}
            answer = await self._http.post(f"{host.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        return looks[-1]

    monkeypatch.setattr(traffic_client.TrafficClient, "counters", counters)
    out = tmp_path / "r.json"
    result = cli("tune", "--base-url", f"{host.url}/v1", "--watch", "0", "--out", out, code=0)
    for part in ("What Slipstream reports, 0 s watched", "prefix hits", "Tokens were drafted in",
                 "spec_decode_num_accepted_tokens_per_pos_total"):  # fmt: skip
        assert part in result.shown
    assert any(verdict in result.shown for verdict in ("Cause: ", "Not diagnosed: at most "))
    assert result.width <= 80
    data = read(out).data
    known = data["counters"]
    assert known["server"] == "slipstream"
    assert known["drafts"] <= known["draft_tokens"] <= 3 * known["drafts"]
    assert (known["requests"], known["output_tokens"]) == (1, 12)
    assert data["diagnosis"]["forecast"]["longest"] == 3
    assert "Does speculation pay on this server?" in report(out)


def test_the_advice_follows_the_counters(cli, scripted):
    scripted(Counting(metrics=vllm))
    data = json.loads(cli("tune", "--base-url", PLACE, "--watch", "0", "--c", "0.5", "--json", code=0).out)["data"]
    assert data["counters"]["accepted_at"] == [0.75, 0.25]
    assert data["diagnosis"]["fix"] == 'draft 1 token: "num_speculative_tokens": 1 in --speculative-config'


def test_a_server_is_followed_and_the_exit_code_says_whether_speculation_pays(cli, scripted):
    """Each look at the page finds 200 more tokens, of 2 % of which drafts are accepted."""

    class Growing(Counting):
        looks = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.looks += 1
            n = 100 * self.looks
            counted = {"draft_tokens": 8 * n, "drafts": 2 * n, "accepted_tokens": n // 50}
            lines = [f"vllm:spec_decode_num_{name}_total {each}" for name, each in counted.items()]
            page = "\n".join([*lines, f"vllm:generation_tokens_total {2 * n}", "vllm:num_requests_running 3", ""])
            self.metrics = lambda _: page
            return await super().handle_async_request(request)

    scripted(Growing())
    follow = ["tune", "--base-url", PLACE, "--watch", "0.02", "--follow", "--for", "0.4"]
    (line,) = cli(*follow, "--json", code=1).out.strip().splitlines()[-1:]
    event = json.loads(line)
    assert (event["event"], event["running"]) == ("speculation does not pay", 3.0)
    assert "at most 1.0" in event["reason"]
    assert "speculation does not pay, with 3 requests at once" in cli(*follow, code=1).out


NOBODY = ["--base-url", "http://127.0.0.1:9/v1"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([*NOBODY, "--watch", "1"], "http://127.0.0.1:9/v1 cannot be reached"),
        (["--base-url", "localhost:8000"], "must begin with http:// or https://"),
        ([*NOBODY, "--drafter", "ngram"], "drafter would be ignored: a running server has its own settings"),
        ([*NOBODY, "--batch", "4"], "--batch would be ignored: it has no meaning for servers"),
        ([*NOBODY, "--concurrency", "1"], "concurrency would be ignored"),
        ([*NOBODY, "--temperature", "1"], "temperature would be ignored"),
        (["code", *NOBODY], "prompts would be ignored"),
        ([*NOBODY, "--rounds", "2"], "--rounds would be ignored"),
        ([*NOBODY, "--for", "3"], "--for was given without --follow"),
        ([*NOBODY, "--follow", "--watch", "0"], "--watch 0 cannot be used with --follow"),
        ([*NOBODY, "--follow"], "reports no counters of Slipstream, vLLM"),
        (["--watch", "3"], "watch was given, but it has an effect only for servers. Fix: add --base-url URL"),
        ([*NOBODY, "--write", "x.json", "--confirm", "2"], "--confirm, --write would be ignored"),
    ],
)
def test_bad_input_is_refused_in_one_message(refused, given, said):
    assert said in refused("tune", *given)


def test_a_server_that_stops_answering_while_it_is_watched_is_an_error(refused, scripted):
    class Leaving(Counting):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.metrics = None if self.asked else vllm
            return await super().handle_async_request(request)

    scripted(Leaving())
    said = refused("tune", "--base-url", PLACE, "--watch", "0")
    assert "http://server/v1 no longer reports metrics" in said
