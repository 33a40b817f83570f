"""Torch's threads beside those of a runtime that has its own.

Between two forwards a step does a little arithmetic in torch: laws, draws, comparisons. Torch's worker threads go on
spinning for a millisecond after each operation that they shared, and where the models run in another runtime on the
same cores, they spin in place of its workers: on two cores a sampled forward of a small model took half as long again.
So a target may ask for the step's own arithmetic to be done by fewer threads (`host_threads`), and a model that itself
computes in torch takes them all back for the time that it runs (`all_threads`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_outside = threading.local()  # .count: threads of torch outside `host_threads`, while inside


@contextmanager
def host_threads(count: int | None) -> Iterator[None]:
    """At most `count` threads for torch in here; None leaves them alone. Costs a microsecond."""
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
    """Within `host_threads`: as many threads as outside of it. Elsewhere nothing."""
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
