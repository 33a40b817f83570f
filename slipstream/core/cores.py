"""How many threads can run at once on this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def available_cores() -> int:
    """Number of threads that can run at once: OMP_NUM_THREADS if it is set, else the number of cores (not hyperthreads)
    that this process may use, limited by the CPU quota of its container."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = container_quota()
    count = len(_cores(allowed))
    if quota is not None:
        count = min(count, max(1, int(quota)))
    return max(1, count)


def _cores(cpus: set[int]) -> set[str]:
    """The physical cores of logical processors. A processor whose core is unknown counts as a core."""
    found = set()
    for cpu in cpus:
        try:
            found.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            found.add(str(cpu))
    return found


def container_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPU quota of the control group, in processors (v2 `cpu.max`, v1 `cpu.cfs_quota_us`); None: no limit."""
    try:
        groups = [line.split(":", 2)[2] for line in own.read_text().splitlines() if line.startswith("0::")]
    except (OSError, IndexError):
        groups = []
    least: float | None = None
    for group in {"/", *groups}:
        at = root / group.strip("/")
        for folder in (at, *(p for p in at.parents if p == root or root in p.parents)):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = (folder / "cpu.max").read_text().split()[:2]
                if quota != "max":
                    least = min(least or float("inf"), int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
        if int(quota) > 0:
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
            least = min(least or float("inf"), int(quota) / int(period))
    return least
