"""How much memory is free, and how what was freed is given back."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from slipstream.host.cores import container_memory


def give_back_freed() -> None:
    """Give memory that was freed back to the system. glibc keeps what lies between pieces that are in use: after a
    model of 500M parameters was packed, a fifth of its weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_bytes(device: torch.device) -> int:
    """Bytes of memory that are free on a device, and in the container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: what the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = container_memory()
    return free if allowed is None else min(free, allowed)
