"""The origin of the results of a run. Contenders report their own versions."""

from __future__ import annotations

from typing import Any

from benchmarks.protocol import THREADS
from slipstream.measure.provenance import commit, machine, model, now, public


def provenance(target: str, draft: str, prompts: dict[str, str], command: list[str]) -> dict[str, Any]:
    """Everything but the contenders' versions. prompts: set -> digest."""
    return {
        "date": now(),
        "command": public(" ".join(command)),
        "commit": commit(),
        "machine": machine(),
        "threads": THREADS,
        "dtype": "float32",
        "target": model(target),
        "draft": model(draft),
        "prompts": prompts,
    }
