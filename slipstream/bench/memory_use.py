"""Measures the peak memory of a block of code in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """with Peak(device) as peak: ...   then `peak.bytes`.

    On CUDA: peak bytes allocated by tensors. Elsewhere: peak resident set of the whole process in the block, including
    libraries and all loaded models; None if the system cannot reset an earlier peak (only Linux can).
    """

    bytes: int | None = None

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._known = _forget_peak()
        return self

    def __exit__(self, kind: type | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self._known:
            self.bytes = process_peak()


def process_peak() -> int:
    """Largest resident set of this process so far (on Linux: since `Peak` began), in bytes."""
    if _STATUS.exists():  # ru_maxrss on Linux starts at the parent's size, which survives fork and exec
        rows = _STATUS.read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> bool:
    try:
        _RESET.write_text("5")  # proc(5): resets VmHWM to what is resident now
    except OSError:
        return False
    return True
