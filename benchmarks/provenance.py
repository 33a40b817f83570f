"""Records the origin of a run's results. Contenders report their own package versions."""

from __future__ import annotations

from typing import Any

from benchmarks.protocol import THREADS
from slipstream.measure.provenance import commit, machine, model, now, public


def provenance(target: str, draft: str, prompts: dict[str, str], command: list[str]) -> dict[str, Any]:
    """Return the origin of the results, without the contenders' versions. prompts: digest of each set."""
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
