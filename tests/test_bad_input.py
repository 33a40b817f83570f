"""Bad input through the command line: one message (what failed, both values, why, the fix), code 2, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.errors import ParameterError, PromptError
from tests.checkpoints import CONTEXT, OTHER_TEXTS, Tiny, clone, make_model, make_tokenizer
from tests.cli.conftest import cli as cli

WEIGHTS = "model.safetensors"


@pytest.fixture
def broken(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of the target, to be damaged."""
    return clone(tiny.target, tmp_path / "broken")


@pytest.fixture(scope="module")
def compiled(tiny: Tiny) -> None:
    """The kernels, so that nobody is told that they are being compiled."""
    LLM(tiny.target, executor="native")


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def lose_a_shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[: len(names) // 2]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / WEIGHTS)


def poison(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / WEIGHTS)


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def wrong_shape(folder: Path) -> None:
    edit_config(folder, hidden_size=64)


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])


def unknown_rope(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})


def garble_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing safetensors": (remove_weights, ["holds no model.safetensors", "there are no weights to load", "Fix:"]),
    "truncated safetensors": (truncate, ["model.safetensors is not a readable safetensors file", "truncated", "Fix:"]),
    "empty safetensors": (empty, ["model.safetensors is not a readable safetensors file", "Fix:"]),
    "missing shard": (lose_a_shard, ["lacks 1 of 2 shards: model-00002-of-00002.safetensors", "Fix: download"]),
    "missing tensor": (lose_a_tensor, ["lacks 1 of", "norm.weight", "Fix:"]),
    "NaN weights": (poison, ["model.norm.weight", "holds NaN", "meaningless", "Fix:"]),
    "pickle weights": (pickle_weights, ["pickle", "pytorch_model.bin", "can run any code", "save_pretrained"]),
    "shapes that contradict": (wrong_shape, ["shape", "config.json says", "belong to different models", "Fix:"]),
    "unreadable config": (garble_config, ["config.json cannot be read as JSON", "Fix:"]),
    "missing config": (remove_config, ["config.json does not exist", "Fix:"]),
    "unsupported architecture": (
        unknown_architecture,
        ["'mamba' is not supported", "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe", "Fix:"],
    ),
    "unsupported rotary scaling": (
        unknown_rope,
        ["'longrope' is not supported", "default, linear, llama3, yarn", "Fix:"],
    ),
    "unreadable tokenizer": (garble_tokenizer, ["tokenizer", "broken", "Fix:"]),
}


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_broken_checkpoint(cli, compiled, broken, name, executor):
    damage, messages = CHECKPOINTS[name]
    damage(broken)
    result = cli("generate", "for", "-n", "4", "-m", broken, "--executor", executor)
    assert (result.code, result.out) == (2, ""), result.err
    assert result.said.startswith("error: ")
    for message in messages:
        assert message in result.said


def test_a_broken_draft_is_named(cli, tiny, broken):
    truncate(broken)
    result = cli("generate", "for", "-m", tiny.target, "-md", broken)
    assert result.code == 2
    assert str(broken) in result.said


@pytest.mark.parametrize("source", ["/nonexistent/model", "not a hub id!", __file__])
def test_a_model_that_does_not_exist(cli, source):
    result = cli("info", source)
    assert result.code == 2
    assert source in result.said
    assert "give the folder, or a hub id" in result.said


def test_vocabulary_mismatch(cli, tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    result = cli("generate", "for", "-m", tiny.target, "-md", tmp_path)
    assert result.code == 2
    assert f"target '{tiny.target}' and draft '{tmp_path}' do not share a vocabulary" in result.said
    assert "(id: target / draft): 260: " in result.said
    assert result.said.count(" / '") == 5, "the first five ids are listed"
    assert "would be rejected" in result.said
    assert "check-pair" in result.said
    assert "ngram" in result.said


@pytest.fixture(scope="module")
def options(tiny: Tiny) -> list[object]:
    return ["-m", tiny.target, "--executor", "torch"]


def test_prompt_longer_than_the_context(cli, options):
    result = cli("generate", "x" * 400, *options)
    assert result.code == 2
    assert f"the prompt has 400 tokens, the target's context holds {CONTEXT}" in result.said
    assert f"Fix: shorten it to {CONTEXT - 1} tokens" in result.said


@pytest.mark.parametrize("stdin", [None, ""])
def test_empty_prompt(cli, options, stdin):
    result = cli("generate", "" if stdin is None else "-", *options, stdin=stdin or "")
    assert result.code == 2
    assert "the prompt is empty" in result.said
    assert "at least one token" in result.said


PARAMETERS = {
    "--temperature": [
        (v, f"temperature is {float(v)!r}, must be a finite number in [0, 100]") for v in ("-1", "nan", "inf")
    ],
    "--top-p": [(v, f"top_p is {float(v)!r}, must be a finite number in (0, 1]") for v in ("0", "-0.1", "1.5", "nan")],
    "--min-p": [("2", "min_p is 2.0, must be a finite number in [0, 1]")],
    "--top-k": [("-1", "top_k is -1, must be an integer >= 0")],
    "--draft-tokens": [("-1", "draft_tokens is -1, must be an integer >= 0")],
    "--max-new-tokens": [("0", "max_tokens is 0, must be an integer >= 1")],
    "--repetition-penalty": [("0", "repetition_penalty is 0.0")],
    "--logprobs": [("-1", "logprobs is -1")],
    "--stop": [("", "stop holds an empty string")],
}


@pytest.mark.parametrize(("flag", "value", "message"), [(f, v, m) for f, cases in PARAMETERS.items() for v, m in cases])
def test_a_parameter_out_of_range(cli, flag, value, message):
    """Before anything is loaded: the model does not exist."""
    result = cli("generate", "for", "-m", "/nonexistent", f"{flag}={value}")
    assert (result.code, result.out) == (2, "")
    assert message in result.said
    assert "Fix: " in result.said


def test_an_unknown_parameter_asks_what_was_meant(cli, options):
    assert "--top-p" in cli("generate", "for", "--topp", "1", *options).said
    result = cli("generate", "for", "-o", "max_ngrams=2", *options)
    assert result.code == 2
    assert "NgramConfig has no parameter 'max_ngrams'" in result.said
    assert "did you mean 'max_ngram'?" in result.said
    with pytest.raises(ParameterError, match=r"no parameter 'temprature'.*did you mean 'temperature'"):
        SamplingParams(temprature=1)


@pytest.mark.parametrize("token", [-1, 320, 10**6])
def test_a_token_id_outside_the_vocabulary(tiny, token):
    llm = LLM(tiny.target, executor="torch")
    with pytest.raises(PromptError, match=rf"the prompt holds id {token}, the vocabulary is 0\.\.319"):
        llm.generate([5, token])
    if token > 0:
        with pytest.raises(ParameterError, match=rf"a parameter names id {token}"):
            llm.generate([5], SamplingParams(logit_bias={token: 1.0}))


@pytest.mark.parametrize(("given", "message"), [([], "empty"), ("", "empty")])
def test_empty_prompts_of_the_python_interface(tiny, given, message):
    with pytest.raises(PromptError, match=message):
        LLM(tiny.target, executor="torch").generate([given])


def test_a_setting_that_cannot_be_honoured(cli, tiny):
    result = cli("generate", "for", "-m", tiny.target, "--executor", "native", "--dtype", "float64")
    assert result.code == 2
    assert "executor='native'" in result.said
    assert "Fix:" in result.said


GONE = (
    "there is no OpenVINO executor any more. It was removed because the native executor is faster. Fix: drop the option"
)


def test_the_openvino_executor_is_gone_and_the_message_says_what_to_do(cli, tiny, tmp_path):
    """On the command line before anything is loaded, from a file that an older `tune` wrote, and in Python."""
    (tmp_path / "old.json").write_text(json.dumps({"executor": "openvino"}))
    for words in (["--executor", "openvino"], ["--config", tmp_path / "old.json"]):
        result = cli("generate", "for", "-m", "/nonexistent", *words)
        assert (result.code, result.out) == (2, "")
        assert GONE.lower() in result.said.lower()
    with pytest.raises(ParameterError, match="(?i)" + GONE):
        LLM(tiny.target, executor="openvino")


def test_settings_of_the_KV_cache_that_cannot_be_honoured(cli, tiny):
    result = cli("generate", "for", "-m", "/nonexistent", "--kv-dtype", "float61")
    assert result.code == 2
    assert "kv_dtype is 'float61'" in result.said
    assert "did you mean 'float16'?" in result.said
    result = cli("generate", "for", "-m", tiny.target, "--executor", "torch", "--kv-dtype", "float16")
    assert result.code == 2
    assert "kv_dtype='float16' was asked of the torch executor" in result.said
    assert "Fix: drop kv_dtype" in result.said


def test_a_checkpoint_without_a_tokenizer_says_how_to_go_on(cli, tiny, tmp_path):
    folder = clone(tiny.target, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    result = cli("generate", "for", "-m", folder)
    assert result.code == 2
    assert "tokenizer" in result.said
    assert "Fix:" in result.said
