"""Who runs: each contender is a way of decoding, served by a worker process, on one set of prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.protocol import ROOT

PEER_PYTHON = ROOT / ".venv-peers" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
DRAFT_LENGTHS = (2, 3, 4, 5, 6)
LOOKUP_LENGTHS = (4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Contender:
    """One row of the speed table.

    worker   process that serves it (key of `WORKERS`).
    model    name under which the worker loaded it (see `loads`).
    prompts  set of prompts: "code" asks for a continuation, "edit" for an edit of a given text.
    lengths  draft lengths among which the fastest is chosen, on prompts that are not measured.
    same_k   instead: takes the draft length that was chosen for this contender.
    exact    False where the weights differ from the others', so its text may too.
    """

    label: str
    worker: str
    model: str
    prompts: str = "code"
    lengths: tuple[int, ...] = ()
    same_k: str = ""
    exact: bool = True


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


WORKERS = {
    "slipstream": WorkerKind("benchmarks.peers.slipstream_peer"),
    "transformers": WorkerKind("benchmarks.peers.transformers_peer"),
    "genai": WorkerKind("benchmarks.peers.genai_peer", PEER_PYTHON, "peers"),
}


def loads(target: str, draft: str) -> dict[tuple[str, str], dict[str, str]]:
    """(worker, model) -> arguments of the worker's `load`, for every model that a contender may want."""
    return {
        ("slipstream", "plain"): {"target": target},
        ("slipstream", "draft"): {"target": target, "draft": draft},
        ("slipstream", "int8"): {"target": target, "quantize": "int8"},
        ("slipstream", "ngram"): {"target": target, "draft": "ngram"},
        ("transformers", "target"): {"target": target, "draft": draft},
        ("genai", "plain"): {"target": target},
        ("genai", "draft"): {"target": target, "draft": draft},
    }
