"""vLLM's server as a process: how it is started, and what is said where it does not start."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import LoadError, ParameterError, ServedError
from slipstream.measure.configs import PLUGIN, DrafterChoice
from slipstream.measure.vllm_server import VllmServer, find_interpreter
from tests.measure.fake_vllm import python as python


def facts(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/models") as answer:
        facts: dict[str, Any] = json.load(answer)["data"][0]
    return facts


def test_a_choice_becomes_the_arguments_of_the_server(python: Callable[..., Path]) -> None:
    server = VllmServer(
        DrafterChoice("suffix", 16, "model-folder", options={"across": True}),
        {"tensor_parallel_size": 2, "enforce_eager": True, "speculative_config": {"rejection_sample_method": "block"},
         "dtype": None},
    )  # fmt: skip
    with server.process(python()) as process:
        given = facts(process.ready(30))["given"]
    named = dict(zip(given[::2], given[1::2], strict=False))
    assert named["--model"] == "model-folder"
    assert named["--tensor-parallel-size"] == "2"
    assert "--enforce-eager" in given
    assert "--dtype" not in given
    assert json.loads(given[given.index("--speculative-config") + 1]) == {
        "method": "custom_class", "model": PLUGIN, "num_speculative_tokens": 16, "rejection_sample_method": "block"
    }  # fmt: skip
    assert json.loads(given[given.index("--additional-config") + 1]) == {
        "slipstream": {"drafter": "suffix", "options": {"across": True}}
    }


def test_its_environment_finds_this_package_and_its_entry_point_and_none_of_ours(python: Callable[..., Path]) -> None:
    with VllmServer(DrafterChoice("none"), threads=2).process(python(), key="secret") as process:
        environment = facts(process.ready(30))["environment"]
        assert environment["VLLM_API_KEY"] == "secret"
        assert environment["OMP_NUM_THREADS"] == "2"
        folder = environment["PYTHONPATH"].split(os.pathsep)[0]
        ask = (
            "import importlib.metadata as m, slipstream; print(slipstream.__version__, "
            "[e.value for e in m.entry_points(group='vllm.general_plugins') if e.name == 'slipstream'])"
        )
        done = subprocess.run([sys.executable, "-S", "-c", ask], env={"PYTHONPATH": folder}, capture_output=True,
                               text=True, check=True)  # fmt: skip
        assert "slipstream.integrations.vllm:register" in done.stdout
        assert sorted(os.listdir(folder)) == ["slipstream", f"slipstream-{done.stdout.split()[0]}.dist-info"]


def test_a_server_that_never_answers_is_ended(python: Callable[..., Path]) -> None:
    with VllmServer(DrafterChoice("none")).process(python("hangs")) as process:
        with pytest.raises(ServedError, match="did not answer within"):
            process.ready(0.3)
        assert process.process.poll() is not None


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0.0"])
def test_a_version_that_is_too_old_or_too_new_is_refused_with_the_range(python, version):
    with pytest.raises(LoadError, match=version) as raised:
        find_interpreter(python(version=version))
    assert "0.29 up to, but not including, 0.34" in str(raised.value)


def test_known_versions_are_taken(python: Callable[..., Path]) -> None:
    for version in ("0.32.0", "0.33.0+cpu", "0.33.1.post2"):
        assert find_interpreter(python(version=version)).exists()


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be run"):
        find_interpreter(tmp_path / "python")
    with pytest.raises(LoadError, match="vLLM is not installed for"):
        find_interpreter(Path(sys.executable))


@pytest.mark.parametrize("drafter", ["lookahead", "layerskip", "suffix,model"])
def test_a_drafter_that_vllm_does_not_have_is_refused_with_those_that_it_has(drafter: str) -> None:
    with pytest.raises(ParameterError, match="has no drafter that corresponds to") as raised:
        VllmServer(DrafterChoice(drafter, 4, draft="d")).values  # noqa: B018
    assert "suffix" in str(raised.value)


def test_logits_processors_beside_speculation_are_refused_before_the_start() -> None:
    arguments = {"logits_processors": "mine"}
    assert VllmServer(DrafterChoice("none"), arguments).values == arguments
    with pytest.raises(ParameterError, match="logits_processors"):
        VllmServer(DrafterChoice("ngram", 4), arguments).values  # noqa: B018
