"""Reads how many cores and how much memory the machine and its container leave to this process."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import torch

RESERVE = 0.1
"""Share of the available memory that is left for activations and for the process itself."""

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return the number of threads that can run at once: OMP_NUM_THREADS if it is set, otherwise the number of cores
    (not hyperthreads) that this process may use, limited by the CPU quota of its container."""
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
    """Return the physical cores of logical processors. A processor whose core is unknown counts as a core."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return cores


def container_quota(root: Path = GROUPS, file: Path = MEMBERSHIP) -> float | None:
    """Return the CPU quota of the control group, in processors (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), or None."""
    limits = []
    for folder in _folders(root, file):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text().split()[:2]
            limits.append(int(quota) / int(period))  # "max" raises ValueError
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
        if int(quota) > 0:
            limits.append(int(quota) / int((root / "cpu" / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def container_memory(root: Path = GROUPS, file: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that the control group still allows (v2 `memory.max`, v1 `memory.limit_in_bytes`); None: no
    limit. Pages of files do not count as used, because the kernel drops them when memory is needed."""
    names = [(folder, "memory.max", "memory.current") for folder in _folders(root, file)]
    left = []
    for folder, limit, used in [*names, (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]:
        with contextlib.suppress(OSError, ValueError):
            most, now = (int((folder / name).read_text()) for name in (limit, used))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = (
                statistics.get(f"total_{kind}", statistics.get(kind, 0)) for kind in ("inactive_file", "active_file")
            )
            left.append(max(0, most - now + sum(map(int, files))))
    return min(left, default=None)


def _folders(root: Path, file: Path) -> set[Path]:
    """List the folders of the control groups (v2) that this process is in."""
    try:
        groups = [line.split(":", 2)[2] for line in file.read_text().splitlines() if line.startswith("0::")]
    except (OSError, IndexError):
        groups = []
    folders = [root, *(root / group.strip("/") for group in groups)]
    return {folder for at in folders for folder in (at, *at.parents) if folder == root or root in folder.parents}


def give_back_freed() -> None:
    """Return freed memory to the system. Otherwise glibc keeps the gaps between used pieces: after packing a model of
    500M parameters, these gaps are a fifth of the size of its weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device, and in the container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # outside Linux: use the machine's memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = container_memory()
    return free if allowed is None else min(free, allowed)
