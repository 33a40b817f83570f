"""`LlamaContext`: a KV cache of llama.cpp, and passes over rows of several sequences.

llama.cpp has one cache of cells for all sequences ("unified"). Each cell holds the keys and values of one token at one
position, and the ids of the sequences that it belongs to: texts that begin alike may share cells. A row of a pass sees
the cells of its own id up to its position.
"""

import weakref
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from slipstream.checkpoints.llamacpp_library import LlamaModel, faults
from slipstream.errors import LoadError, TargetError, UnsupportedModelError

ROWS = 512
"""Most rows of a pass."""

IDS = 256
"""Sequence ids, as many as llama.cpp has (LLAMA_MAX_SEQ)."""

Row = tuple[int, int, int, bool]
"""(token, position, sequence id, whether its logits are wanted)."""

Logits = NDArray[np.float32]

_TYPES = {"float32": 0, "float16": 1}
_NO_ROOM = 1


class LlamaContext:
    """model: stays loaded as long as this. cells: tokens for which the cache has room, rounded up, at least ROWS.
    kv_dtype: "float32" or "float16". threads: of a pass.

    Raises LoadError if there is no memory for the cache.
    """

    def __init__(self, model: LlamaModel, cells: int, kv_dtype: str, threads: int):
        self.model, self._lib = model, model.library
        params = self._lib.llama_context_default_params()
        params.n_ctx = max(cells, ROWS)  # llama.cpp runs no pass of more rows than cells
        params.n_batch = params.n_ubatch = ROWS
        params.n_seq_max, params.kv_unified = IDS, True
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _TYPES[kv_dtype]
        # With float32 keys, flash attention would still compute in float16.
        params.flash_attn_type = (
            self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED if kv_dtype == "float32" else self._lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        )
        params.swa_full = True  # else what has left a sliding window is dropped, and rollbacks would need it
        for key in ("yarn_beta_fast", "yarn_beta_slow"):  # llama.cpp reads them for some architectures only
            setattr(params, key, model.header.setting(f"rope.scaling.{key}", -1.0))
        params.no_perf = True
        faults()
        handle = self._lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise LoadError(
                f"llama.cpp cannot make a KV cache for {cells} tokens: {faults() or 'it gave no reason'}",
                fix="choose a smaller kv_tokens",
            )
        self._handle = handle
        weakref.finalize(self, self._lib.llama_free, handle)
        self._memory = self._lib.llama_get_memory(handle)
        if not self._memory:
            raise UnsupportedModelError(
                f"the architecture {model.header.architecture!r} has no KV cache in llama.cpp",
                why="it is not a causal language model",
                fix="use another model",
            )
        self.cells = int(self._lib.llama_n_ctx(handle))
        self._batch = self._lib.llama_batch_init(ROWS, 0, 1)
        weakref.finalize(self, self._lib.llama_batch_free, self._batch)

    def decode(self, rows: Seq[Row]) -> Logits:
        """Run rows, at most ROWS, those of a sequence in order. Their keys and values stay in the cache. Logits [R, V]
        of the R wanted rows, valid until the next pass.

        Raises TargetError: no room, or a fault of llama.cpp.
        """
        batch, count = self._batch, 0
        batch.n_tokens = len(rows)
        for i, (token, position, seq_id, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            count += wanted
        code = self._lib.llama_decode(self._handle, batch)
        if code:
            raise self._failed(code, len(rows))
        if not count:
            return np.empty((0, self.model.vocab_size), np.float32)
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self._handle), (count, self.model.vocab_size))

    def _failed(self, code: int, rows: int) -> TargetError:
        said = faults()
        if code == _NO_ROOM:
            return TargetError(
                f"llama.cpp's KV cache has no room for {rows} more tokens, it holds {self.cells}",
                why="its size was fixed when the model was loaded",
                fix="choose a larger kv_tokens, or run fewer or shorter sequences",
            )
        return TargetError(f"llama.cpp could not run a pass (code {code}){': ' if said else ''}{said}")

    def fork(self, parent: int, copy: int, length: int) -> None:
        """Let sequence id `copy`, which holds nothing, share the first `length` tokens of `parent`."""
        self._lib.llama_memory_seq_cp(self._memory, parent, copy, 0, length)

    def cut(self, seq_id: int, length: int) -> None:
        """Remove what a sequence id holds from position `length` on. Raises TargetError where that is impossible."""
        if not self._lib.llama_memory_seq_rm(self._memory, seq_id, length, -1):
            raise TargetError(
                f"llama.cpp cannot roll a {self.model.header.architecture!r} model back to {length} tokens",
                why="rejected draft tokens have to be removed from its state",
                fix="use another model; llama.cpp itself runs this one, without speculation",
            )
