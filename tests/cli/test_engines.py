"""`--engine vllm`: what vLLM is told, what is refused, and how its server lives and ends with the command."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.engines import EngineOptions, compared, vllm_server
from slipstream.cli.measuring import LabModels
from slipstream.cli.options import ModelOptions
from slipstream.errors import ParameterError
from tests.bench.vllm_environment import python as python

VLLM = EngineOptions(engine="vllm")


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "slipstream", *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def test_lookups_are_our_plug_in_with_learned_lengths() -> None:
    values = vllm_server(ModelOptions(drafter="suffix,ngram", target="t"), VLLM).values
    assert values["speculative_config"]["method"] == "custom_class"
    assert values["speculative_config"]["num_speculative_tokens"] == 16
    assert values["additional_config"] == {"slipstream": {"drafter": ["suffix", "ngram"]}}
    assert values["served_model_name"] == "t"


def test_options_of_ours_become_arguments_of_vllm() -> None:
    models = ModelOptions(target="t", draft="d", drafter="model", draft_tokens="5", dtype="bfloat16", rule="block",
                          trust_remote_code=True, generation_config="none")  # fmt: skip
    engine = EngineOptions(engine="vllm", vllm_option=["tensor_parallel_size=2", 'hf_overrides={"a": 1}'])
    assert vllm_server(models, engine).values == {
        "speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 5,
                               "rejection_sample_method": "block"},
        "served_model_name": "t", "dtype": "bfloat16", "trust_remote_code": True, "generation_config": "vllm",
        "tensor_parallel_size": 2, "hf_overrides": {"a": 1},
    }  # fmt: skip


def test_a_method_that_only_vllm_has_is_given_as_its_own_configuration() -> None:
    engine = EngineOptions(engine="vllm", vllm_option=['speculative_config={"method": "mtp"}'])
    assert vllm_server(ModelOptions(target="t"), engine).values["speculative_config"] == {"method": "mtp"}
    assert "speculative_config" not in vllm_server(ModelOptions(target="t"), engine, plain=True).values


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quantize": "int8"}, "quantize"),
        ({"kv_tokens": 4096, "device": "cpu"}, "device, kv_tokens"),
        ({"rule": "coupled"}, "coupled"),
    ],
)
def test_options_that_vllm_would_ignore_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        vllm_server(ModelOptions(target="t", **given), VLLM)


@pytest.mark.parametrize(
    "given", [{"engine": "sglang"}, {"vllm_option": ["a=1"]}, {"engine": "vllm", "vllm_option": ["a={"]},
              {"engine": "vllm", "vllm_option": ["a"]}],
)  # fmt: skip
def test_malformed_options_of_the_engine_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        EngineOptions(**given)


def test_each_drafter_of_a_comparison_has_a_server_and_so_has_plain_decoding() -> None:
    models = LabModels(target="t", draft="d", drafter=["suffix:min_match=2", "model:draft_tokens=3", "ngram+suffix"])
    servers = compared(models, VLLM)
    assert list(servers) == ["plain", "suffix:min_match=2", "model:draft_tokens=3", "ngram+suffix"]
    assert "speculative_config" not in servers["plain"].values
    assert servers["suffix:min_match=2"].choice.options == {"min_match": 2}
    assert servers["model:draft_tokens=3"].choice.draft_tokens == 3
    assert servers["ngram+suffix"].values["additional_config"]["slipstream"]["drafter"] == ["ngram", "suffix"]


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/models", timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_serve_starts_vllm_and_ends_it_with_itself(python: Callable[..., Path], tmp_path: Path, number: int) -> None:
    config = tmp_path / "choice.json"
    config.write_text(json.dumps({"engine": "vllm", "drafter": "suffix", "vllm_option": ["seed=3"]}))
    running = command("serve", "--config", str(config), "--vllm-python", str(python()), "--port", "0")
    assert running.stderr
    said = ""
    while "/v1" not in said:
        said = running.stderr.readline()
        assert said
    url = next(word.rstrip(":") for word in said.split() if word.startswith("http"))
    with urllib.request.urlopen(f"{url}/models") as answer:
        given = json.load(answer)["data"][0]["given"]
    assert given[given.index("--seed") + 1] == "3"
    running.send_signal(number)
    assert running.wait(20) == (0 if number == signal.SIGTERM else -number)
    end = time.monotonic() + (0 if number == signal.SIGTERM else 10)  # of a killed command the server hears nothing
    while answers(url):
        assert time.monotonic() < end, "the server outlived the command"
        time.sleep(0.1)


def test_serve_is_refused_where_the_port_is_in_use(cli: Any, python: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        result = cli("serve", "--engine", "vllm", "--vllm-python", python(), "--port", taken.getsockname()[1])
    assert (result.code, "cannot listen" in result.said) == (2, True)


@pytest.mark.parametrize(("mode", "code"), [("dies", 3), ("ends", 5)])
def test_serve_shows_why_vllm_ended(python: Callable[..., Path], mode: str, code: int) -> None:
    running = command("serve", "--engine", "vllm", "--vllm-python", str(python(mode)), "--port", "0")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 2
    assert f"code {code}" in said
    assert mode == "ends" or said.count("model.layers.0.weight has a wrong shape") == 2  # in the log, and in our error
