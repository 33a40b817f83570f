"""Fixtures for every test."""

import functools
import gc
import itertools
import logging
import os
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when Triton is imported

from slipstream.cli.loading import freeze_once
from slipstream.llm import LLM
from tests.durations import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from tests.measure.small_results import (
    bench_result as bench_result,
    contenders as contenders,
    grid_result as grid_result,
    prompt_set as prompt_set,
    tiny_llm as tiny_llm,
    trace_result as trace_result,
)
from tests.tiny_checkpoints import EXACT, Tiny, make_family, make_tiny

if TYPE_CHECKING:
    from tests.targets.reference import Reference


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Without collecting garbage: that takes a third of the time and finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_once()
        gc.enable()


@pytest.fixture(autouse=True)
def seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operating system would give as seeds: other numbers in each test, the same ones in each run. A test
    draws the same numbers whichever tests ran before it in this process."""
    monkeypatch.setattr("slipstream.core.random.randbits", random.Random(request.node.nodeid).getrandbits)
    monkeypatch.setattr("slipstream.engine.engine._nonces", itertools.count())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny target and draft with a tokenizer; do not change the files, `clone` them."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def plain(tiny: Tiny) -> LLM:
    """Plain decoding with the tiny target; do not change it."""
    return LLM(tiny.target, **EXACT, draft_tokens=4)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder of its tiny checkpoint."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return functools.cache(lambda family: make_family(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str, torch.dtype], "Reference"]:
    """(family, dtype) -> transformers' own model of that checkpoint."""
    from tests.targets.reference import Reference

    return functools.cache(lambda family, dtype: Reference(checkpoint(family), dtype))
