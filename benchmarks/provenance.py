"""Where a number comes from: machine, versions, commit, date, weights, prompts, command."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
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
    """CPU, memory (bytes) and system."""
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
    }


class Neighbours:
    """How much of the machine others used meanwhile: the share of its processor time, 0 to 1, that went neither to
    this process nor to the children it has waited for. None where the system does not tell."""

    def __init__(self) -> None:
        self._start, self._used = monotonic(), _others()

    def share(self) -> float | None:
        now = _others()
        if now is None or self._used is None:
            return None
        return max(0.0, now - self._used) / ((monotonic() - self._start) * (os.cpu_count() or 1))


def _others() -> float | None:
    """Seconds of processor time since the start of the machine that were not ours."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, soft, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    own = sum(os.times()[:4])  # user and system, of this process and of its children
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - own


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
