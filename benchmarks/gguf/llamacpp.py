"""llama.cpp, through llama-cpp-python (`make gguf`): it writes files of fewer than eight bits, and scores texts.

llama.cpp writes what it does on standard error, and its reasons for failing as well. Here the log is kept instead, and
the reasons become part of our errors.
"""

import ctypes
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import LoadError

_ERROR, _CONTINUED = 4, 5
"""Levels of llama.cpp's log (ggml.h)."""

_faults: deque[str] = deque(maxlen=20)
"""The last error messages."""

_callbacks: list[Any] = []
"""What llama.cpp calls for as long as the process lives."""


@cache
def llama_cpp() -> Any:
    """The module `llama_cpp`. From now on its log is kept, not printed. Raises LoadError if it is not installed."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as fault:  # the last two: its shared library cannot be loaded
        raise LoadError(
            f"llama-cpp-python cannot be imported ({fault})",
            why="llama.cpp writes and scores GGUF files here",
            fix="make gguf; it compiles llama.cpp, which takes 10 to 20 minutes",
        ) from fault
    last = [0]

    @llama_cpp.llama_log_callback
    def keep(level: int, text: bytes, _: object) -> None:
        level = last[0] if level == _CONTINUED else level
        last[0] = level
        if level == _ERROR:
            _faults.append(text.decode("utf-8", errors="replace").strip())

    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    _callbacks.append(keep)
    return llama_cpp


def faults() -> str:
    """What llama.cpp has logged as errors since the last call, in one line."""
    said = "; ".join(dict.fromkeys(line for line in _faults if line))
    _faults.clear()
    return said


class Scorer:
    """A file in llama.cpp, as a function of token ids."""

    def __init__(self, file: Path, context: int, threads: int):
        library = llama_cpp()
        self._model = library.Llama(
            str(file), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, logits_all=True,
            verbose=False,
        )  # fmt: skip

    def __call__(self, tokens: list[int]) -> Tensor:
        """float64 [len(tokens), V]"""
        self._model.reset()
        self._model.eval(tokens)
        return torch.from_numpy(self._model.scores[: len(tokens)].copy()).double()
