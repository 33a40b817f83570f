"""The library's front door is typed: type checkers refuse what it would refuse, and accept what it takes."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from slipstream import LLM, load_model_pair
from slipstream.checkpoints.load_settings import LoadKeywords, LoadSettings
from slipstream.llm import LLMKeywords

ROOT = Path(__file__).parents[1]

PROGRAM = """
from pathlib import Path

import torch

from slipstream import LLM, AsyncLLM, SamplingParams, SpeculativeDecoder, load_model_pair

target, draft, tokenizer = load_model_pair("target", Path("draft"), quantize="int8", dtype=torch.float32)
load_model_pair("target", "draft", quantise="int8")  # refused
load_model_pair(target, "draft")  # refused

llm = LLM("target", "ngram", quantize="int8", threads=2, lora=Path("adapter"), device=torch.device("cpu"))
LLM(target, draft, tokenizer=tokenizer, draft_tokens="auto", device_map={"": "cpu"}, draft_options={"max_ngram": 4})
LLM(Path("target"), ["suffix", ("eagle3", {"head": "folder"})], rule="block", max_batch=2)
LLM(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
LLM("target", quantise="int8")  # refused
LLM("target", threads="2")  # refused
LLM("target", kv_tokens=0.5)  # refused
LLM("target", role="draft")  # refused
LLM(3)  # refused
LLM("target", 3)  # refused
LLM("target", tokenizer="folder")  # refused
LLM("target", "ngram", draft_options=["max_ngram"])  # refused

SpeculativeDecoder(target, draft, draft_tokens=4, rule="block", executor="torch", max_batch=2)
SpeculativeDecoder(target, draft, draft_token=4)  # refused
SpeculativeDecoder(target, draft, executer="torch")  # refused
SpeculativeDecoder(target, 3)  # refused

params = SamplingParams(temperature=0.5, top_k=3, stop=["end"], logit_bias={3: 1.0}, seed=None)
SamplingParams(temprature=0.5)  # refused
SamplingParams(top_k="3")  # refused
SamplingParams(stop=3)  # refused

print(llm.generate("text", params)[0].text, llm.generate([[1, 2]], [params])[0].token_ids)
llm.generate("text", max_tokens=3)  # refused
llm.generate(3, params)  # refused
llm.generate("text", {"max_tokens": 3})  # refused
llm.use("suffix", max_depth=8)
llm.use(3)  # refused

served = AsyncLLM(llm)
served.generate("text", params, rule="block", prediction=[1, 2])
AsyncLLM("target")  # refused
AsyncLLM(llm, max_batch=2)  # refused
served.generate("text", sampling_params=params)  # refused
"""


def test_mypy_refuses_wrong_arguments_and_accepts_right_ones(tmp_path):
    mypy = pytest.importorskip("mypy.api")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    cache = ROOT / ".mypy_cache"  # that of `make types`
    said, faults, code = mypy.run(["--config-file", str(ROOT / "pyproject.toml"), f"--cache-dir={cache}", str(file)])
    refused = {i for i, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# refused")}
    named = {int(line) for line in re.findall(r"program\.py:(\d+): error", said)}
    assert (named, faults, code) == (refused, "", 1), said


def test_the_keywords_for_type_checkers_are_the_settings_of_loading():
    hints, declared = get_type_hints(LoadKeywords), get_type_hints(LoadSettings)
    assert list(hints) == [each.name for each in fields(LoadSettings) if each.name != "role"]
    assert {name: declared[name] for name in hints} == hints


@pytest.mark.parametrize("function", [LLM, load_model_pair])
def test_help_shows_every_setting_of_loading_with_its_default(function):
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in LoadKeywords.__annotations__} == LoadSettings().keywords


def test_the_keywords_of_a_speculative_decoder_are_those_of_llm():
    beside = {"target", "draft", "draft_tokens"}
    assert set(LLMKeywords.__annotations__) == set(inspect.signature(LLM).parameters) - beside
