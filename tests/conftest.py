"""Fixtures for every test."""

import functools
import gc
import itertools
import logging
import os
import random
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when Triton is imported

from slipstream.cli.loading import freeze_once
from slipstream.core.params import SamplingParams
from slipstream.llm import LLM
from slipstream.measure.benchmark import BenchConfig, bench
from slipstream.measure.configs import Contender
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.measure.results import Result
from slipstream.measure.tracing import trace
from tests.durations import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from tests.tiny_checkpoints import EXACT, Tiny, make_family, make_tiny

if TYPE_CHECKING:
    from tests.targets.reference import Reference


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Switch the garbage collector off while tests are collected. It would take a third of the time and free
    nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_once()
        gc.enable()


@pytest.fixture(autouse=True)
def seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the operating system's random seeds by seeds that depend only on the name of the test. So a test draws
    the same random numbers in each run, independently of the tests before it."""
    monkeypatch.setattr("slipstream.core.random.randbits", random.Random(request.node.nodeid).getrandbits)
    monkeypatch.setattr("slipstream.engine.engine._nonces", itertools.count())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny target and draft model with a tokenizer. Do not change the files: `clone` them."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def plain(tiny: Tiny) -> LLM:
    """An `LLM` that decodes plainly with the tiny target. Do not change it."""
    return LLM(tiny.target, **EXACT, draft_tokens=4)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the folder of a family's tiny checkpoint."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return functools.cache(lambda family: make_family(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str, torch.dtype], "Reference"]:
    """Function that returns transformers' own model of a family's tiny checkpoint, in a dtype."""
    from tests.targets.reference import Reference

    return functools.cache(lambda family, dtype: Reference(checkpoint(family), dtype))


@pytest.fixture(scope="session")
def tiny_llm(tiny: Tiny) -> LLM:
    return LLM(tiny.target, **EXACT, draft_tokens=4)


@pytest.fixture(scope="session")
def contenders(tiny: Tiny) -> list[Contender]:
    return [Contender("model", str(tiny.draft), 3), Contender("ngram", "ngram", 4)]


@pytest.fixture(scope="session")
def prompt_set() -> PromptSet:
    rows = [("a", [5, 6, 7]), ("b", [8, 9]), ("a", [40, 41, 42, 43])]
    return PromptSet("made up", [Prompt(ids, kind, f"{kind}{i}") for i, (kind, ids) in enumerate(rows)], "0123")


@pytest.fixture(scope="session")
def bench_result(tiny_llm: LLM, contenders: list[Contender], prompt_set: PromptSet) -> Result:
    config = BenchConfig(tokens=8, rounds=3, temperatures=(0.0, 1.0))
    return bench(tiny_llm, contenders, prompt_set, config)


@pytest.fixture(scope="session")
def grid_result(tiny_llm: LLM, contenders: list[Contender], prompt_set: PromptSet) -> Result:
    """The result of a benchmark with several draft lengths."""
    lengths = [replace(contenders[0], draft_tokens=k) for k in (1, 2, 3)]
    return bench(tiny_llm, lengths, prompt_set, BenchConfig(tokens=10, rounds=3))


@pytest.fixture(scope="session")
def trace_result(tiny_llm: LLM, contenders: list[Contender]) -> Result:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    return trace(tiny_llm, contenders[0], [5, 6, 7], params)
