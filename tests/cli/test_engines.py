"""`--engine vllm`: what vLLM is told, what is refused, and how its server lives and ends with the command."""

import importlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream.cli.bench import TrafficOptions
from slipstream.cli.engines import EngineOptions, list_servers, make_vllm_server
from slipstream.cli.measuring import LabModels, OutputOptions, PromptOptions
from slipstream.cli.options import ModelOptions
from slipstream.cli.tune import TuneModels
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError, ServedError
from slipstream.measure import traffic
from slipstream.measure.lab_settings import TuneConfig
from slipstream.measure.measurements import ServedArm, TrafficData
from slipstream.measure.results import Result
from slipstream.measure.tables import Estimate
from slipstream.measure.traffic_client import Answered
from slipstream.measure.traffic_figures import TrafficPass, compute_passes
from slipstream.server.serving import open_listener
from tests.measure.fake_vllm import python as python

tune_module = importlib.import_module("slipstream.cli.tune")
VLLM = EngineOptions(engine="vllm")


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "slipstream", *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def test_lookups_are_our_plug_in_with_learned_lengths() -> None:
    values = make_vllm_server(ModelOptions(drafter="suffix,ngram", target="t"), VLLM).values
    assert values["speculative_config"]["method"] == "custom_class"
    assert values["speculative_config"]["num_speculative_tokens"] == 16
    assert values["additional_config"] == {"slipstream": {"drafter": ["suffix", "ngram"]}}
    assert values["served_model_name"] == "t"


def test_the_head_that_ships_for_smollm2_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.zoo.smollm2_file", lambda: Path("SmolLM2.gguf"))
    values = make_vllm_server(ModelOptions(target="smollm2"), VLLM).values
    assert values["additional_config"] == {"slipstream": {"drafter": "suffix"}}


def test_options_of_ours_become_arguments_of_vllm_and_its_own_methods_its_configuration() -> None:
    models = ModelOptions(target="t", draft="d", drafter="model", draft_tokens="5", dtype="bfloat16", rule="block",
                          trust_remote_code=True, generation_config="none")  # fmt: skip
    engine = EngineOptions(engine="vllm", vllm_option=["tensor_parallel_size=2", 'hf_overrides={"a": 1}'])
    assert make_vllm_server(models, engine).values == {
        "speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 5,
                               "rejection_sample_method": "block"},
        "served_model_name": "t", "dtype": "bfloat16", "trust_remote_code": True, "generation_config": "vllm",
        "tensor_parallel_size": 2, "hf_overrides": {"a": 1},
    }  # fmt: skip
    engine = EngineOptions(engine="vllm", vllm_option=['speculative_config={"method": "mtp"}'])
    assert make_vllm_server(ModelOptions(target="t"), engine).values["speculative_config"] == {"method": "mtp"}
    assert "speculative_config" not in make_vllm_server(ModelOptions(target="t"), engine, plain=True).values


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
        make_vllm_server(ModelOptions(target="t", **given), VLLM)


@pytest.mark.parametrize(
    "given", [{"engine": "sglang"}, {"vllm_option": ["a=1"]}, {"engine": "vllm", "vllm_option": ["a={"]},
              {"engine": "vllm", "vllm_option": ["a"]}],
)  # fmt: skip
def test_malformed_options_of_the_engine_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        EngineOptions(**given)


def test_each_drafter_of_a_comparison_has_a_server_and_so_has_plain_decoding() -> None:
    models = LabModels(target="t", draft="d", drafter=["suffix:min_match=2", "model:draft_tokens=3", "ngram+suffix"])
    servers = list_servers(models, VLLM)
    assert list(servers) == ["plain", "suffix:min_match=2", "model:draft_tokens=3", "ngram+suffix"]
    assert "speculative_config" not in servers["plain"].values
    assert servers["suffix:min_match=2"].choice.options == {"min_match": 2}
    assert servers["model:draft_tokens=3"].choice.draft_tokens == 3
    assert servers["ngram+suffix"].values["additional_config"]["slipstream"]["drafter"] == ["ngram", "suffix"]


def arm(name: str, value: float, low: float, against: int | None = 0) -> ServedArm:
    measured = compute_passes([TrafficPass(1.0, [Answered(0.1, 0.2, [], 0.5, 0.0, 8, True)])])
    ratio = None if name == "plain" else Estimate(value, low, 2 * value)
    return ServedArm(
        name=name, url="", load="1 at once", concurrency=1, rate=None, requests=1, warm_up=0, against=against,
        **measured | {"ratio": ratio},
    )  # fmt: skip


def test_tune_tries_lengths_of_models_and_one_setting_of_lookups() -> None:
    servers = list_servers(LabModels(target="t", draft="d", drafter=["suffix", "model"]), VLLM)
    tried = tune_module.list_candidates({name: servers[name] for name in ("suffix", "model")}, fixed=False)
    assert list(tried) == ["suffix", *(f"model:draft_tokens={length}" for length in tune_module.LENGTHS)]
    assert tried["model:draft_tokens=8"].values["speculative_config"]["num_speculative_tokens"] == 8


def test_the_written_choice_starts_the_same_server_again() -> None:
    models = TuneModels(target="t", draft="d", drafter=["model"], drafter_option=None)
    engine = EngineOptions(engine="vllm", vllm_option=["tensor_parallel_size=2"])
    server = list_servers(models, engine)["model"]
    written = tune_module.write_configuration(models, server, engine)
    again = make_vllm_server(
        ModelOptions(target=written["target"], draft=written["draft"], drafter=written["drafter"],
                     draft_tokens=str(written["draft_tokens"])),
        EngineOptions(engine=written["engine"], vllm_option=written["vllm_option"]),
    )  # fmt: skip
    assert again.values == server.values


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


@pytest.mark.parametrize("engine", ["slipstream", "vllm"])
def test_serve_is_refused_where_the_port_is_in_use_before_a_model_is_looked_for(refused, python, engine):
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        more = ["--vllm-python", python()] if engine == "vllm" else ["-m", "/nonexistent"]
        assert f"cannot listen at 127.0.0.1:{port}" in refused("serve", "--engine", engine, *more, "--port", port)


@pytest.mark.parametrize(("mode", "code"), [("dies", 3), ("ends", 5)])
def test_serve_shows_why_vllm_ended(python: Callable[..., Path], mode: str, code: int) -> None:
    running = command("serve", "--engine", "vllm", "--vllm-python", str(python(mode)), "--port", "0")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 2
    assert f"code {code}" in said
    assert mode == "ends" or said.count("model.layers.0.weight has a wrong shape") == 2  # in the log, and in our error


def test_tune_goes_on_where_a_setting_does_not_start_and_keeps_what_was_measured_when_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def started(servers: dict[str, Any], engine: EngineOptions) -> Any:
        for name in servers:
            if "=2" in name:
                raise ServedError("it ended while it started")
            if "=8" in name:
                raise KeyboardInterrupt
        yield dict.fromkeys(servers, "http://localhost:1/v1")

    def measure_traffic(arms: Any, *rest: Any) -> Result:
        rows = [arm("plain", 1, 1, None), arm(arms[1].name, 1.5, 1.2)]
        if "=4" in arms[1].name:  # faster by chance: nothing was accepted
            rows[1] = replace(rows[1], ratio=Estimate(9.0, 8.0, 10.0), counters={"accepted_tokens": 0.0})
        return Result("bench-served", {}, {}, TrafficData(rows), complete=True)

    monkeypatch.setattr(tune_module, "start_servers", started)
    monkeypatch.setattr(traffic, "measure_traffic", measure_traffic)
    shown: list[Result] = []
    monkeypatch.setattr(tune_module, "finish", lambda result, files: shown.append(result))
    models = TuneModels(target="t", draft="d", drafter=["suffix", "model"])
    out = tmp_path / "choice.json"
    how = (
        TrafficOptions(),
        SamplingParams(),
        PromptOptions(),
        TuneConfig(rounds=3, seconds=1.0),
        out,
        VLLM,
        OutputOptions(),
    )
    with pytest.raises(typer.Exit) as ended:
        tune_module.tune_vllm(models, *how)
    assert ended.value.exit_code == 130
    assert [each.name for each in shown[0].data.arms] == ["plain", "suffix", "plain", "model:draft_tokens=4"]
    assert shown[0].data.arms[3].against == 2
    assert shown[0].complete is False
    assert "model:draft_tokens=2 was not measured" in capsys.readouterr().err
    assert json.loads(out.read_text())["drafter"] == "suffix"
