"""The contenders. A contender is an engine with a way of decoding, run by a worker process on one set of prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT

DRAFT_LENGTHS = (2, 3, 4, 5, 6)
LOOKUP_LENGTHS = (4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Contender:
    """One row of the speed table.

    worker   process that serves it (key of `WORKERS`).
    model    name under which the worker loaded it (see `loads`).
    prompts  set of prompts: "code" asks for a continuation, "edit" for an edit of a given text.
    lengths  draft lengths among which the fastest is chosen, on prompts that are not measured.
    same_k   instead of `lengths`: another contender, whose chosen draft length is used.
    draft_tokens  instead of `lengths`: a fixed draft length.
    exact    False if weights or arithmetic differ from the other contenders', so that the output may differ, too.
    note     remark about this row for readers of the table.
    bits     accuracy class: 16 if weights are stored in 16 or 32 bits, else 8 or 4.
    mode     how it decodes: "plain", "draft model" or "lookup".
    """

    label: str
    worker: str
    model: str
    prompts: str = "code"
    lengths: tuple[int, ...] = ()
    same_k: str = ""
    draft_tokens: int = 0
    exact: bool = True
    note: str = ""
    bits: int = 16
    mode: str = "plain"


CONTENDERS = {
    "plain": Contender("Slipstream, plain", "slipstream", "plain"),
    "draft": Contender("Slipstream, draft model", "slipstream", "draft", lengths=DRAFT_LENGTHS),
    "int8": Contender("Slipstream, plain, int8", "slipstream", "int8", exact=False),
    "plain_edit": Contender("Slipstream, plain", "slipstream", "plain", "edit"),
    "ngram_edit": Contender("Slipstream, n-gram", "slipstream", "ngram", "edit", lengths=LOOKUP_LENGTHS),
    "transformers": Contender("transformers, generate", "transformers", "target"),
    "transformers_draft": Contender("transformers, assisted", "transformers", "target", same_k="draft"),
    "genai": Contender("OpenVINO GenAI, plain", "genai", "plain"),
    "genai_draft": Contender("OpenVINO GenAI, draft model", "genai", "draft", lengths=DRAFT_LENGTHS),
}


@dataclass(frozen=True)
class WorkerKind:
    module: str
    python: Path = Path(sys.executable)
    make: str = ""  # the target of the Makefile that installs it

    @property
    def installed(self) -> bool:
        return self.python.exists()


def interpreter(environment: str) -> Path:
    """Return the Python interpreter of an engine's environment, which is a folder of the repository."""
    return ROOT / environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


WORKERS = {
    "slipstream": WorkerKind("benchmarks.peers.slipstream_peer"),
    "transformers": WorkerKind("benchmarks.peers.transformers_peer"),
    "genai": WorkerKind("benchmarks.peers.genai_peer", interpreter(".venv-peers"), "peer-genai"),
    "llamacpp": WorkerKind("benchmarks.peers.llamacpp_peer", interpreter(".venv-peer-llamacpp"), "peer-llamacpp"),
    **{  # vLLM has global state, so each of its engines runs in its own process
        name: WorkerKind("benchmarks.peers.vllm_peer", interpreter(".venv-vllm"), "vllm")
        for name in ("vllm", "vllm_draft", "vllm_ngram")
    },
}


LLAMACPP = ("F32", "F16", "Q8_0")
"""Weight formats in which llama.cpp also decodes with a draft model and with prompt lookup."""
GENAI: dict[str, dict[str, Any]] = {
    f"{precision}{'' if float32 else '_fast'}": {"precision": precision, "float32": float32}
    for precision in ("fp16", "int8")
    for float32 in (True, False)
}
"""Further exports of OpenVINO GenAI. Each runs in float32, and in the precision that the pipeline chooses."""


def loads(target: str, draft: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the arguments of the worker's `load` by (worker, model), for every model that a contender may use."""
    return {
        ("slipstream", "plain"): {"target": target},
        ("slipstream", "draft"): {"target": target, "draft": draft},
        ("slipstream", "int8"): {"target": target, "quantize": "int8"},
        ("slipstream", "ngram"): {"target": target, "draft": "ngram"},
        ("slipstream", "suffix"): {"target": target, "draft": "suffix"},
        ("slipstream", "eagle3"): {"target": target, "draft": "eagle3"},
        ("slipstream", "hybrid"): {"target": target, "draft": ["suffix", draft]},
        ("slipstream", "int8_draft"): {"target": target, "draft": draft, "quantize": "int8"},
        ("slipstream", "int8_suffix"): {"target": target, "draft": "suffix", "quantize": "int8"},
        ("transformers", "target"): {"target": target, "draft": draft},
        ("transformers", "lookup"): {"target": target},
        **{("llamacpp", kind): {"target": target, "kind": kind} for kind in ("F32", "F16", "Q8_0", "Q4_K_M")},
        **{("llamacpp", f"{kind}_draft"): {"target": target, "kind": kind, "draft": draft} for kind in LLAMACPP},
        **{("llamacpp", f"{kind}_lookup"): {"target": target, "kind": kind, "lookup": True} for kind in LLAMACPP},
        ("genai", "plain"): {"target": target},
        ("genai", "draft"): {"target": target, "draft": draft},
        ("genai", "lookup"): {"target": target, "lookup": True},
        **{("genai", name): {"target": target, **how} for name, how in GENAI.items()},
        **{("genai", f"{name}_draft"): {"target": target, "draft": draft, **how} for name, how in GENAI.items()},
        **{("genai", f"{name}_lookup"): {"target": target, "lookup": True, **how} for name, how in GENAI.items()},
        ("vllm", "plain"): {"target": target},
        ("vllm_draft", "draft"): {"target": target, "draft": draft},
        ("vllm_ngram", "ngram"): {"target": target, "lookup": True},
    }
