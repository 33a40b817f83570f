"""Limits torch's threads beside a backend that has its own threads. Torch's threads spin for a millisecond after each
shared operation and take time from the backend's threads: on two cores a sampled forward pass of a small model took
half as long again. So a target may declare fewer threads for the arithmetic of a step (`host_threads`); a model that
computes in torch itself takes all of them back while it runs (`all_threads`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_outside = threading.local()  # .count: torch's threads before `host_threads`, within it


@contextmanager
def host_threads(count: int | None) -> Iterator[None]:
    """Limit torch to `count` threads in this block; None changes nothing. Costs a microsecond."""
    before = torch.get_num_threads()
    if count is None or count >= before:
        yield
        return
    _outside.count = before
    torch.set_num_threads(count)
    try:
        yield
    finally:
        _outside.count = None
        torch.set_num_threads(before)


@contextmanager
def all_threads() -> Iterator[None]:
    """Undo `host_threads` in this block: torch gets its former number of threads. No effect outside of it."""
    count = getattr(_outside, "count", None)
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
