"""Small results of every kind, measured once on the tiny pair."""

from dataclasses import replace

import pytest

from slipstream.core.params import SamplingParams
from slipstream.llm import LLM
from slipstream.measure.benchmark import BenchConfig, Contender, bench
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.measure.results import Result
from slipstream.measure.tracing import trace
from tests.tiny_checkpoints import EXACT, Tiny


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
    """Several draft lengths."""
    lengths = [replace(contenders[0], draft_tokens=k) for k in (1, 2, 3)]
    return bench(tiny_llm, lengths, prompt_set, BenchConfig(tokens=10, rounds=3))


@pytest.fixture(scope="session")
def trace_result(tiny_llm: LLM, contenders: list[Contender]) -> Result:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    return trace(tiny_llm, contenders[0], [5, 6, 7], params)
