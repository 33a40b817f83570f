"""Torch's threads next to those of a backend that has its own.

Between two forwards a step does a little arithmetic in torch: distributions, sampling, comparisons. Torch's worker
threads keep spinning for a millisecond after each shared operation, and if the model runs in another runtime on the
same cores, they take the time of its workers: on two cores a sampled forward of a small model took half as long again.
So a target may declare that the step's own arithmetic should use fewer threads (`host_threads`), and a model that
computes in torch itself takes them all back while it runs (`all_threads`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_outside = threading.local()  # .count: threads of torch outside `host_threads`, while inside


@contextmanager
def host_threads(count: int | None) -> Iterator[None]:
    """At most `count` threads for torch in this block; None changes nothing. Costs a microsecond."""
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
    """Within `host_threads`: as many threads as outside of it. Elsewhere it changes nothing."""
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
