"""Where a number comes from: machine, versions, commit, date, weights, prompts, command."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT, THREADS


def digest(files: Iterable[Path]) -> str:
    """First 16 hex digits of the SHA-256 over the contents of the files, in the order given."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def model(path: str | Path) -> dict[str, str]:
    """Name and content of a checkpoint: a path inside the repository, else the folder's own name alone."""
    folder = Path(path).resolve()
    name = str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else folder.name
    return {"name": name, "sha256": digest(sorted(folder.glob("*.safetensors")))}


def machine() -> dict[str, Any]:
    """CPU, memory (bytes), system, and the load average of the last minute: above 0.3 the machine is not quiet."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "vector": [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags],
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None,
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def commit() -> str | None:
    """The checked-out commit, marked where files have changed since; None outside a repository."""
    git = lambda *a: subprocess.run(["git", *a], cwd=ROOT, capture_output=True, text=True)  # noqa: E731
    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode:
        return None
    return head.stdout.strip() + (" and uncommitted changes" if git("status", "--porcelain").stdout.strip() else "")


def provenance(target: str, draft: str, prompts: dict[str, str], command: list[str]) -> dict[str, Any]:
    """Everything but the contenders' versions, which they report themselves. prompts: set -> digest."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "commit": commit(),
        "machine": machine(),
        "threads": THREADS,
        "dtype": "float32",
        "target": model(target),
        "draft": model(draft),
        "prompts": prompts,
    }
