"""llama.cpp, through the low-level interface of llama-cpp-python (the extra `gguf`).

llama.cpp writes what it does on standard error, and its reasons for failing as well. Here the log is kept instead, and
the reasons become part of our errors.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from slipstream.checkpoints.gguf_config import odd_heads, same_token
from slipstream.checkpoints.gguf_header import CONTROL, USER_DEFINED, GgufHeader, gguf_shape
from slipstream.checkpoints.gguf_keys import ENDS
from slipstream.errors import CheckpointError, LoadError, UnsupportedModelError

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
            why="llama.cpp runs GGUF files that our own decoder does not run",
            fix="pip install 'slipstream[gguf]'; it compiles llama.cpp, which takes 10 to 20 minutes",
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


class LlamaModel:
    """A model that llama.cpp has loaded.

    handle      what its functions take. vocab: of its tokenizer.
    vocab_size  width V of the logits.
    """

    def __init__(
        self, header: GgufHeader, vocab_only: bool = False, progress: Callable[[int, int], None] | None = None
    ):
        """vocab_only: without weights. progress: called with (bytes read, bytes in all).

        Raises LoadError without llama-cpp-python, CheckpointError for a damaged file, UnsupportedModelError for one
        that llama.cpp refuses.
        """
        self.header, self.library = header, llama_cpp()
        _check_it_survives(self.header, vocab_only)
        library = self.library
        params = library.llama_model_default_params()
        params.n_gpu_layers, params.vocab_only = 0, vocab_only
        total = sum(self.header.stored.values())

        @library.llama_progress_callback
        def shown(share: float, _: Any) -> bool:
            if progress is not None:
                progress(int(share * total), total)
            return True

        params.progress_callback = shown
        faults()
        handle = library.llama_model_load_from_file(str(self.header.path).encode(), params)
        if not handle:
            raise _not_loaded(self.header)
        self.handle = handle
        self._free = weakref.finalize(self, library.llama_model_free, handle)
        self.vocab = library.llama_model_get_vocab(handle)
        self.vocab_size = int(library.llama_vocab_n_tokens(self.vocab))
        for role in ("bos", "eos"):  # encoding would end the process
            names, adds = (getattr(library, f"llama_vocab_{what}{role}")(self.vocab) for what in ("", "get_add_"))
            if adds and names < 0:
                raise CheckpointError(f"{self.header.path.name} adds {role}, and names none", fix="convert it again")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the ones under `ENDS`, else those that the file names and special tokens that llama.cpp
        knows by name. Ordinary ones are left out: they are its defaults for files that name none."""
        ends, named = self.library.llama_vocab_is_eog, gguf_shape(self.header).eos_ids
        if ENDS in self.header.metadata or not self.header.has_tokenizer:
            return named
        special = self.header.tokens_of(CONTROL, USER_DEFINED) | set(named)
        return tuple(token for token in sorted(special) if ends(self.vocab, token)) or named


def _check_it_survives(header: GgufHeader, vocab_only: bool) -> None:
    """Raise CheckpointError for what llama.cpp answers by ending the process."""
    layers, further = header.size("block_count"), header.size("nextn_predict_layers")
    names = ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")
    experts, used, groups, of_groups = map(header.size, names)
    vectors = [tensor for tensor in header.tensors if len(tensor.shape) == 1 and tensor.type != "F32"]
    wrong = same_token(header)
    if wrong or vocab_only:
        pass
    elif vectors:
        wrong = f"its {vectors[0].name} is {vectors[0].type}, not F32"
    elif layers > 512 or further > layers:
        wrong = f"it has {layers} layers, {further} of them for further tokens"
    elif not used <= experts <= 1024 or (experts and not used):
        wrong = f"it uses {used} of {experts} experts"
    elif groups and (groups >= experts or experts % groups or (groups > 1 and not 0 < of_groups < groups)):
        wrong = f"it uses {of_groups} of {groups} groups of {experts} experts"
    else:
        wrong = odd_heads(header)
    if wrong:
        raise CheckpointError(f"llama.cpp does not run {header.path.name}: {wrong}", fix="convert the model again")


def _not_loaded(header: GgufHeader) -> LoadError:
    said = faults() or "it gave no reason"
    if "tensor" in said and "architecture" not in said:
        return CheckpointError(
            f"llama.cpp does not load {header.path.name}: {said}",
            why="its tensors are not those of its architecture",
            fix="download or convert it again",
        )
    return UnsupportedModelError(
        f"llama.cpp does not load {header.path.name}, of the architecture {header.architecture!r}: {said}",
        fix="install a newer llama-cpp-python, or convert the model again",
    )
