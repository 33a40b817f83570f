"""llama.cpp through llama-cpp-python (`make gguf`), which writes files of fewer than eight bits and scores texts.

llama.cpp logs to standard error, including the reasons why something failed. Here the last errors of the log are kept
in memory instead, and become part of our errors.
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
"""Log levels of llama.cpp (ggml.h)."""

_faults: deque[str] = deque(maxlen=20)
"""The last error messages of llama.cpp."""

_callbacks: list[Any] = []
"""Functions that llama.cpp may call until the process ends, so they must stay alive."""


@cache
def llama_cpp() -> Any:
    """Import and return the module `llama_cpp`, whose log is then kept instead of printed. Raises LoadError if it is
    not installed."""
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
    """Return the errors that llama.cpp has logged since the last call, in one line."""
    said = "; ".join(dict.fromkeys(line for line in _faults if line))
    _faults.clear()
    return said


class Scorer:
    """A GGUF file loaded in llama.cpp. Calling it with token ids returns logits."""

    def __init__(self, file: Path, context: int, threads: int):
        library = llama_cpp()
        self._model = library.Llama(
            str(file), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, logits_all=True,
            verbose=False,
        )  # fmt: skip

    def __call__(self, tokens: list[int]) -> Tensor:
        """Return the logits after each token, float64 [len(tokens), V]."""
        self._model.reset()
        self._model.eval(tokens)
        return torch.from_numpy(self._model.scores[: len(tokens)].copy()).double()
