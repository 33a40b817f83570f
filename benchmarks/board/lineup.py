"""What the board asks of whom: engines, their ways of speculating, and the cells."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT

PLAIN = "plain"
TOKENS, PROMPTS = 16, 3
"""Tokens of a sampled text, and how many prompts are sampled. Greedy texts have four times as many tokens."""
LEVEL = 1e-3
"""Probability that the board calls some cell different although all engines are right."""
CHECKS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 1": {"temperature": 1.0},
    "T 0.7": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 8},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.3},
}
"""Name -> sampling parameters; greedy texts are compared as they are, the others as samples."""


@dataclass(frozen=True)
class Engine:
    """A system that decodes with and without speculation.

    worker     module of its adapter, and the interpreter of its environment.
    make       command that makes the environment.
    methods    its ways of speculating, by the names that the adapter knows.
    precision  of its arithmetic: how far logits may be off by rounding (see `judge.ROUNDING`).
    promises   what its documentation promises, and where.
    absent     why it is not tested; "": it is.
    known      method -> issues or fixes of its maintainers that a difference there goes with.
    """

    name: str
    worker: str = ""
    python: Path = Path(sys.executable)
    make: str = ""
    methods: tuple[str, ...] = ()
    precision: str = "float32"
    promises: str = ""
    absent: str = ""
    known: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "Slipstream", "benchmarks.board.slipstream_engine", make="make install",
            methods=("native: draft model", "native: suffix", "native: EAGLE-3", "torch: draft model", "torch: suffix"),
            promises="the distribution; greedy texts bit by bit on its own kernels (docs/exactness.md)",
        ),
        Engine(
            "transformers", "benchmarks.board.transformers_engine", make="make install",
            methods=("assisted", "prompt lookup", "early exit"),
            promises="the same distribution, greedy and sampled "
            "(https://huggingface.co/docs/transformers/generation_strategies#speculative-decoding)",
        ),
        Engine(
            "OpenVINO GenAI", "benchmarks.board.genai_engine", ROOT / ".venv-peers/bin/python", "make peer-genai",
            ("draft model", "prompt lookup"),
            promises="the output of the main model (https://github.com/openvinotoolkit/openvino.genai)",
        ),
        Engine(
            "vLLM (CPU wheel of a third party)", "benchmarks.board.vllm_engine", ROOT / ".venv-vllm/bin/python",
            "make vllm", ("ngram", "draft model"),
            promises="lossless up to the precision of hardware numerics "
            "(https://docs.vllm.ai/en/latest/features/spec_decode.html)",
            known={"": "https://github.com/vllm-project/vllm/issues/55005, pull requests 55006 and 42638"},
        ),
        Engine("llama.cpp", absent="its adapter needs a build of the source package of llama-cpp-python: not made yet"),
        Engine("ik_llama.cpp", absent="no adapter yet; the bindings do not reach its own speculation"),
        Engine("ONNX Runtime GenAI", absent="no adapter yet; its model format needs an export"),
        Engine("mistral.rs", absent="its wheel was not tried yet"),
        Engine("SGLang", absent="no build for a CPU is on PyPI"),
        Engine("MLX-LM", absent="it runs on Apple's GPUs"),
    )
}  # fmt: skip
CONTROLS = Engine(
    "controls", "benchmarks.board.controls",
    methods=(
        "shared noise", "temperature ignored", "argmax in place of sampling", "draft at another temperature",
        "min-p lost on verified rows", "penalty without drafted tokens", "state not rolled back", "wrong bonus row",
    ),
)  # fmt: skip
"""Bugs that really happened somewhere, planted into Slipstream. Each must be found in one of its cells."""


@dataclass(frozen=True)
class Cell:
    """One question: does `method` of an engine change what `check` looks at? negative: the engine without speculation
    is compared with itself."""

    engine: str
    method: str
    check: str

    @property
    def key(self) -> str:
        return f"{self.engine} | {self.method} | {self.check}"

    @property
    def negative(self) -> bool:
        return self.method == PLAIN


def cells() -> Iterator[Cell]:
    """All cells; an engine's own come together, so that it is loaded once for each method."""
    for engine in (*ENGINES.values(), CONTROLS):
        for method in (*engine.methods, *[PLAIN] * bool(engine.methods)):
            for check in CHECKS:
                yield Cell(engine.name, method, check)
