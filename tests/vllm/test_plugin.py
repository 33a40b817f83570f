"""The plug-in in the real vLLM, started by our launcher: `make test-vllm`."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream import zoo
from slipstream.errors import ServedError
from slipstream.measure.configs import DrafterChoice
from slipstream.measure.vllm_server import ENVIRONMENT, LOADING, ServerProcess, VllmServer, find_interpreter
from tests.checkpoints.tiny_hybrids import make_checkpoint

if not ENVIRONMENT.exists():
    pytest.skip("vLLM is not installed: run `make vllm`", allow_module_level=True)

AROUND = {"max_model_len": 1024, "max_num_seqs": 8, "dtype": "float32"}
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """URLs of vLLM: plain, and with a stack of lookups that remembers outputs."""
    target = str(zoo.target_dir())
    stack = VllmServer(DrafterChoice("suffix,ngram", 8, target), AROUND, 1)
    python = find_interpreter(None)
    with (
        VllmServer(DrafterChoice("none", target=target), AROUND, 1).process(python, environment=SMALL) as plain,
        stack.process(python, environment=SMALL) as drafting,
    ):
        yield {"plain": plain.ready(LOADING), "drafting": drafting.ready(LOADING)}


def ask(url: str, path: str = "/completions", **body: Any) -> Any:
    fields = {"model": str(zoo.target_dir()), "max_tokens": 48, "temperature": 0, **body}
    request = urllib.request.Request(url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = [line.rsplit(" ", 1) for line in lines if line.startswith("vllm:spec_decode_num")]
    return {name.split("{")[0].removeprefix("vllm:spec_decode_num_"): float(value) for name, value in values}


def test_greedy_texts_equal_those_without_the_plug_in(servers: dict[str, str]) -> None:
    before = counters(servers["drafting"])
    for kind in ("edit", "code", "varied"):
        for entry in zoo.prompts(kind)[:3]:
            texts = [ask(url, prompt=entry["prompt"])["choices"][0]["text"] for url in servers.values()]
            assert texts[0] == texts[1]
    after = counters(servers["drafting"])
    assert after["accepted_tokens_total"] - before["accepted_tokens_total"] > 100


@pytest.mark.parametrize("how", ["prediction", "vllm_xargs", "ids"])
def test_a_prediction_is_drafted_from(servers: dict[str, str], how: str) -> None:
    prompt = zoo.prompts("code")[4]["prompt"]
    answer = ask(servers["plain"], prompt=prompt, max_tokens=64)["choices"][0]["text"]
    field: dict[str, Any] = {"prediction": {"type": "content", "content": answer}}
    if how == "vllm_xargs":
        field = {"vllm_xargs": {"prediction": answer}}
    if how == "ids":
        tokenized = urllib.request.Request(
            servers["plain"].removesuffix("/v1") + "/tokenize",
            json.dumps({"prompt": answer, "add_special_tokens": False}).encode(), {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(tokenized) as response:
            field = {"vllm_xargs": {"prediction": json.load(response)["tokens"]}}
    steps = []
    for body in ({}, field):
        before = counters(servers["drafting"])
        assert ask(servers["drafting"], prompt=prompt, max_tokens=64, **body)["choices"][0]["text"] == answer
        after = counters(servers["drafting"])
        steps.append(64 - (after["accepted_tokens_total"] - before["accepted_tokens_total"]))
    assert steps[1] < 0.6 * steps[0]


def test_a_prediction_of_a_chat_is_drafted_from(servers: dict[str, str]) -> None:
    entry = max(zoo.prompts("edit"), key=lambda entry: len(entry["answer"]))
    messages = [{"role": "user", "content": entry["prompt"]}]
    texts = [
        ask(servers[name], "/chat/completions", messages=messages, **more)["choices"][0]["message"]["content"]
        for name, more in (("plain", {}), ("drafting", {"prediction": {"type": "content", "content": "x"}}))
    ]
    assert texts[0] == texts[1]


def test_a_malformed_prediction_is_a_client_error_and_the_server_goes_on(servers: dict[str, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(servers["drafting"], prompt="a", prediction={"type": "text"})
    assert raised.value.code == 400
    assert ask(servers["drafting"], prompt="a", vllm_xargs={"prediction": [-5]})["choices"]


def test_sampled_requests_with_structure_stops_and_penalties_are_answered(servers: dict[str, str]) -> None:
    answers = ask(
        servers["drafting"], prompt="a b c a b c a b c", n=3, temperature=0.9, seed=5, stop=["\n\n"],
        frequency_penalty=0.5, repetition_penalty=1.1, top_k=20, logprobs=1,
    )  # fmt: skip
    assert len(answers["choices"]) == 3
    one = ask(servers["drafting"], prompt="a", structured_outputs={"choice": ["yes yes yes", "no no no"]})
    assert one["choices"][0]["text"] in ("yes yes yes", "no no no")


def test_a_drafter_that_cannot_run_there_ends_the_start_with_its_reason() -> None:
    arguments = {**AROUND, "additional_config": {"slipstream": {"drafter": "lookahead"}}}
    server = VllmServer(DrafterChoice("suffix", 4, str(zoo.target_dir())), arguments, 1)
    with (
        server.process(find_interpreter(None), environment=SMALL) as process,
        pytest.raises(ServedError, match="does not run inside vLLM"),
    ):
        process.ready(LOADING)


def test_the_process_ends_with_its_block() -> None:
    server = VllmServer(DrafterChoice("none", target=str(zoo.target_dir())), AROUND, 1)
    with server.process(find_interpreter(None), environment=SMALL) as process:
        assert isinstance(process, ServerProcess)
    assert process.process.poll() is not None
    assert Path(f"/proc/{process.process.pid}").exists() is False


def test_a_hybrid_model_is_refused_by_name_where_vllm_cannot_verify_its_drafts(tmp_path: Path) -> None:
    """A tiny random Qwen3-Next, in vLLM 0.32 on a CPU."""
    target = str(make_checkpoint(tmp_path / "hybrid", "qwen3next"))
    around = {"max_model_len": 128, "dtype": "float32", "skip_tokenizer_init": True}
    server = VllmServer(DrafterChoice("suffix", 8, target), around, 1)
    with (
        server.process(find_interpreter(None), environment=SMALL) as process,
        pytest.raises(ServedError, match="cannot verify lookup drafts for a hybrid model on a CPU"),
    ):
        process.ready(LOADING)
