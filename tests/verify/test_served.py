"""`verify` of a server against another: equal servers pass, planted differences are found."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from slipstream.cli.main import main
from slipstream.cli.report import make_section
from slipstream.errors import ParameterError, ServedError
from slipstream.measure.endpoint import Answer, Endpoint
from slipstream.verify.junit import write_junit
from slipstream.verify.served import (
    ServedConfig,
    compare_ngrams,
    count_requests,
    judge_texts,
    measure_noise,
    verify_served,
)

LETTERS = "abcdefgh"
TABLE = np.random.default_rng(5).normal(size=(len(LETTERS), len(LETTERS)))
PROMPTS = [("one", "ab"), ("two", "hc"), ("three", "dd")]
SMALL = ServedConfig(tokens=24, samples=80, length=6, clients=2)
TINY = ServedConfig(tokens=4, samples=5, length=2, clients=1)

Sampler = Callable[[np.ndarray, float, np.random.Generator], int]


def sampled(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    ends = np.exp((logits - logits.max()) / temperature).cumsum()
    return int(ends.searchsorted(rng.random() * ends[-1], side="right"))


def completion(asked: dict[str, Any], choose: Sampler, rounding: float, logprobs: bool) -> dict[str, Any]:
    text, rng = str(asked["prompt"]), np.random.default_rng(asked["seed"])
    tokens, token_logprobs, top = [], [], []
    for t in range(asked["max_tokens"]):
        logits = TABLE[LETTERS.index(text[-1])] + rounding * np.sin(np.arange(len(LETTERS)) + t)
        token = choose(logits, asked["temperature"], rng)
        tokens.append(LETTERS[token])
        text += tokens[-1]
        logs = logits - np.log(np.exp(logits).sum())
        token_logprobs.append(float(logs[token]))
        best = np.argsort(-logs)[: asked["logprobs"] or 0]
        top.append({LETTERS[i]: float(logs[i]) for i in best})
    logprobs_body = {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top} if logprobs else None
    return {"choices": [{"text": "".join(tokens), "logprobs": logprobs_body}]}


@pytest.fixture
def serve() -> Iterator[Callable[..., Endpoint]]:
    running = []

    def start(
        choose: Sampler = sampled, rounding: float = 0.0, logprobs: bool = True, code: int = 200, page: str = ""
    ) -> Endpoint:
        """page: its /metrics, with {n} for the number of requests so far."""
        asks = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics" and page:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(page.replace("{n}", str(len(asks))).encode())
                    return
                self.reply({"data": [{"id": "letters"}]})

            def do_POST(self) -> None:
                asks.append(1)
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert asked["model"] == "letters"
                self.reply(completion(asked, choose, rounding, logprobs))

            def reply(self, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *given: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return Endpoint(f"http://127.0.0.1:{server.server_port}/v1", timeout=30)

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@dataclass(frozen=True)
class Near(Endpoint):
    """Such a server in this process, without a connection."""

    choose: Sampler = sampled

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        return {"data": [{"id": "letters"}]} if body is None else completion(body, self.choose, 0.0, True)


def test_equal_servers_pass(serve):
    calls = []
    result = verify_served(serve(), serve(), PROMPTS, SMALL, advance=lambda: calls.append(1))
    assert result.data.verdict == "ok"
    assert {row.verdict for row in result.data.greedy} == {"identical"}
    assert len(calls) == count_requests(3, SMALL)
    assert "3 of 3 greedy texts identical" in str(make_section(result).lead)


VLLM = "vllm:generation_tokens_total {n}00\n"
DRAFTS = VLLM + "".join(f"vllm:spec_decode_num_{name}_total {{n}}0\n" for name in ("drafts", "draft_tokens"))
ACCEPTS = DRAFTS + "vllm:spec_decode_num_accepted_tokens_total {n}\n"
SGLANG = "sglang:generation_tokens_total {n}00\nsglang:num_requests_total {n}\nsglang:spec_accept_length {accept}\n"
COVERED = {
    "drafts": (ACCEPTS, "ok", "tokens were drafted"),
    "no page": ("", "ok", "whether anything was drafted is not known"),
    "vLLM, plain": (VLLM, "not tested", "drafted too few tokens: 0 (greedy), 0 (sampled)"),
    "vLLM, drafts seldom": (VLLM + "vllm:spec_decode_num_draft_tokens_total 9\nvllm:spec_decode_num_drafts_total 9\n",
                            "not tested", "drafted too few tokens"),
    "SGLang, plain": (SGLANG.replace("{accept}", "0"), "not tested", "drafted too few tokens"),
    "SGLang": (SGLANG.replace("{accept}", "2") + "sglang:spec_verify_calls_total {n}0\n", "ok", "tokens were drafted"),
    "an old llama-server": ("llamacpp:tokens_predicted_total {n}00\n", "ok", "drafted is not known"),
    "Slipstream, plain": ("slipstream:spec_decode_num_drafts_total 0\nslipstream:request_generation_tokens_sum {n}\n",
                          "not tested", "drafted too few tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", COVERED)
def test_a_server_that_drafts_nothing_is_not_called_equal(serve, name):
    page, verdict, said = COVERED[name]
    result = verify_served(serve(page=page), serve(), PROMPTS, TINY)
    assert result.data.verdict == verdict
    assert said in make_section(result).lead


def test_a_reference_that_drafts_and_drafts_that_are_all_rejected_are_named(serve):
    result = verify_served(serve(page=DRAFTS), serve(page=ACCEPTS), PROMPTS, TINY)
    assert "greedy: the reference drafted 60 tokens: shared faults are not seen" in result.warnings
    assert "sampled: no draft token was accepted, so acceptance itself was not tested" in result.warnings


def test_a_server_is_not_compared_with_itself(serve):
    place = serve()
    again = Endpoint(place.base_url.replace("127.0.0.1", "localhost") + "/")
    with pytest.raises(ParameterError, match="would be compared with itself"):
        verify_served(place, again, PROMPTS, SMALL)


def test_a_wrong_greedy_token_is_a_bug(serve):
    def second_best(logits, temperature, rng):
        second = not temperature and rng.random() < 0.2
        return int(np.argsort(-logits)[1]) if second else sampled(logits, temperature, rng)

    data = verify_served(serve(second_best), serve(), PROMPTS, SMALL).data
    assert data.verdict == "BUG"
    row = next(row for row in data.greedy if row.verdict == "BUG")
    assert row.margin > 0.01
    assert row.noise == 0


def test_rounding_between_servers_is_no_bug(serve):
    data = verify_served(serve(rounding=1e-6), serve(), PROMPTS, SMALL).data
    assert data.verdict == "ok"
    assert 0 < data.greedy[0].noise < 1e-5


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_a_wrong_temperature_of_samples_is_found(factor):
    def wrong(logits, temperature, rng):
        return sampled(logits, factor * temperature, rng)

    config = ServedConfig(tokens=24, clients=1)
    data = verify_served(Near("http://a", choose=wrong), Near("http://b"), PROMPTS, config).data
    assert {row.verdict for row in data.greedy} == {"identical"}
    assert "BUG" in {row.verdict for row in data.sampled}


def test_a_fault_after_one_letter_alone_is_found():
    """After the letter a, its likeliest follower is always taken, as if draft tokens were always accepted there."""

    def wrong(logits, temperature, rng):
        return int(logits.argmax()) if (logits == TABLE[0]).all() else sampled(logits, temperature, rng)

    config = ServedConfig(tokens=8, samples=200, clients=1)
    data = verify_served(Near("http://a", choose=wrong), Near("http://b"), [("two", "hc")], config).data
    assert data.sampled[0].verdict == "BUG"


@pytest.mark.parametrize("planted", [False, True])
def test_a_shift_of_two_percent_is_found_in_as_many_requests_as_its_power_needs(planted):
    """The likeliest follower of each letter is taken in 2 % of the tokens more, at the cost of all others: a total
    variation of 0.02."""

    def wrong(logits, temperature, rng):
        token, first = sampled(logits, temperature, rng), int(logits.argmax())
        chance = 0.02 / (1 - np.exp(logits[first]) / np.exp(logits).sum())
        return first if temperature and rng.random() < chance else token

    config = ServedConfig(tokens=4, samples=307, length=48, clients=1)
    served = Near("http://a", choose=wrong if planted else sampled)
    row = verify_served(served, Near("http://b"), PROMPTS, config).data.sampled[-1]
    assert row.prompt == "all prompts"
    assert 0.017 < row.smallest_shift < 0.02
    assert row.verdict == ("BUG" if planted else "no difference seen")


def test_without_logprobs_a_difference_is_not_judged_and_no_passed_test_of_ci(serve, tmp_path):
    def other(logits, temperature, rng):
        return 0 if not temperature else sampled(logits, temperature, rng)

    result = verify_served(serve(other, logprobs=False), serve(logprobs=False), PROMPTS[:1], SMALL)
    assert result.data.greedy[0].verdict.startswith("differs; without logprobs")
    write_junit(tmp_path / "junit.xml", result)
    error = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testcase[@classname='greedy']/error")
    assert "cannot be judged" in error.get("message")
    assert "gives no logprobs" in result.warnings[0]


def test_a_token_that_the_reference_does_not_list_is_a_bug():
    plain = Answer("x", ["x"], [-0.1], [{"x": -0.1, "y": -2.5}])
    assert judge_texts(Answer("z", ["z"], [-9.0], [{}]), plain, 5.0)[0] == "BUG"
    near = judge_texts(Answer("y", ["y"], [-0.1], [{}]), Answer("x", ["x"], [-0.1], [{"x": -0.7, "y": -0.7005}]), 0.0)
    assert near[0].startswith("tie")
    assert measure_noise(plain, Answer("x", ["x"], [-0.3], [])) == pytest.approx(0.2)


def test_equal_samples_fail_as_seldom_as_stated():
    """The p-value is uniform under the null: 200 pairs of samples, each test at 5 %, within four standard errors."""
    rng, below = np.random.default_rng(0), 0
    for _ in range(200):
        one, other = (["".join(LETTERS[i] for i in row) for row in rng.integers(8, size=(40, 4))] for _ in range(2))
        below += compare_ngrams(one, other, rng, 99) < 0.05
    assert abs(below / 200 - 0.05) < 4 * (0.05 * 0.95 / 200) ** 0.5


def test_samples_of_one_outcome_show_no_difference():
    assert compare_ngrams(["a"] * 9, ["a"] * 9, np.random.default_rng(0), 99) == 1.0
    assert compare_ngrams([""] * 3, [""] * 3, np.random.default_rng(0), 99) == 1.0


def test_a_refusal_is_shown_with_its_text(serve):
    with pytest.raises(ServedError, match=r"answered with HTTP status 404: .*letters"):
        serve(code=404).resolve()


def test_greedy_texts_that_were_compared_are_kept_when_a_server_fails(serve, monkeypatch):
    complete = Endpoint.complete

    def failing(self: Endpoint, prompt: str, tokens: int, temperature: float, *more: Any) -> Answer:
        if temperature:
            raise ServedError("it has gone")
        return complete(self, prompt, tokens, temperature, *more)

    monkeypatch.setattr(Endpoint, "complete", failing)
    with pytest.raises(ServedError, match="it has gone") as left:
        verify_served(serve(), serve(), PROMPTS, SMALL)
    kept = left.value.result
    assert (kept.complete, len(kept.data.greedy), kept.data.sampled) == (False, 3, [])
    assert "3 of 3 greedy texts identical, 0 prompts sampled" in make_section(kept).lead


def test_the_command_compares_servers(serve, capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "ab"}\n{"prompt": "hc"}\n')
    places = ["--base-url", serve().base_url, "--against", serve().base_url]
    quick = ["-n", "8", "--samples", "30", "--seed", "1"]
    with pytest.raises(SystemExit) as left:
        main(["verify", str(file), *places, *quick, "--out", str(tmp_path / "r.json")])
    assert left.value.code == 0
    assert "2 of 2 greedy texts identical" in " ".join(capsys.readouterr().out.split())
    idle = ["--base-url", serve(page=VLLM).base_url, *places[2:]]
    with pytest.raises(SystemExit) as left:
        main(["verify", str(file), *idle, *quick])
    assert left.value.code == 2
    gone, junit = ["--base-url", "http://127.0.0.1:9/v1", *places[2:]], tmp_path / "junit.xml"
    with pytest.raises(SystemExit) as left:
        main(["verify", str(file), *gone, *quick, "--junit", str(junit)])
    assert left.value.code == 2
    assert "cannot be reached" in ElementTree.parse(junit).getroot().find("testcase/error").get("message")
    for more, said in (
        (places[:2], "--base-url and --against must be given together"),
        ([*places, "--drafter", "ngram"], "drafter would be ignored"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["verify", str(file), *more, *quick])
        assert left.value.code == 2
        assert said in capsys.readouterr().err
