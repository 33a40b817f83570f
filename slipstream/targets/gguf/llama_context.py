"""`LlamaContext`: a KV cache of llama.cpp, and passes over rows of several sequences.

llama.cpp has one cache of cells for all sequences ("unified"). Each cell holds the keys and values of one token at one
position, and the ids of the sequences that it belongs to. A row of a pass sees the cells of its first id up to its
position, so a token that belongs to several ids is a beginning that they share:

    row       the   cat   dog   sat   sat          the ─┬─ cat ─── sat
    position   4     5     5     6     6                └─ dog ─── sat
    ids       0,1    0     1     0     1

llama.cpp has at most 256 ids.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import LoadError, TargetError, UnsupportedModelError
from slipstream.models.llamacpp_library import LlamaModel, faults

ROWS = 512
"""Most rows of a pass."""

IDS, FEW_IDS = 256, 64
"""Most sequence ids that llama.cpp has (LLAMA_MAX_SEQ), and those that a context begins with: with 256, a pass over one
row of a small model takes 3 % longer (measured)."""

Row = tuple[int, int, tuple[int, ...], bool]
"""(token, position, sequence ids, whether its logits are wanted)."""

Logits = NDArray[np.float32]

_TYPES = {"float32": 0, "float16": 1}
_NO_ROOM = 1


class LlamaContext:
    """model: stays loaded as long as this. cells: tokens for which the cache has room, rounded up, at least ROWS.
    kv_dtype: "float32" or "float16". threads: of a pass. ids: sequence ids, 0..ids-1.

    Raises LoadError if there is no memory for the cache.
    """

    def __init__(self, model: LlamaModel, cells: int, kv_dtype: str, threads: int, ids: int = FEW_IDS):
        self.model, self.ids, self._lib = model, ids, model.library
        self._asked = cells, kv_dtype, threads
        params = self._lib.llama_context_default_params()
        params.n_ctx = max(cells, ROWS)  # llama.cpp runs no pass of more rows than cells
        params.n_batch = params.n_ubatch = ROWS
        params.n_seq_max, params.kv_unified = ids, True
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _TYPES[kv_dtype]
        # With float32 keys, flash attention would still compute in float16.
        params.flash_attn_type = (
            self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED if kv_dtype == "float32" else self._lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        )
        params.swa_full = True  # else what has left a sliding window is dropped, and rollbacks would need it
        params.no_perf = True
        faults()
        handle = self._lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise LoadError(
                f"llama.cpp cannot make a KV cache for {cells} tokens: {faults() or 'it gave no reason'}",
                fix="choose a smaller kv_tokens",
            )
        self._handle = handle
        self._free = weakref.finalize(self, self._lib.llama_free, handle)
        self._memory = self._lib.llama_get_memory(handle)
        if not self._memory:
            raise UnsupportedModelError(
                f"the architecture {model.header.architecture!r} has no KV cache in llama.cpp",
                why="it is not a causal language model",
                fix="use another model",
            )
        self.cells = int(self._lib.llama_n_ctx(handle))
        self._token, self._position = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        self._counts, self._wanted = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int8)
        self._single, self._several = np.arange(ids, dtype=np.int32), np.zeros(ROWS * ids, np.int32)
        self._sets = np.zeros(ROWS, np.uint64)  # for each row, the address of its ids
        self._single_at, self._several_at = self._single.ctypes.data, self._several.ctypes.data
        self._views: dict[tuple[int, int], Logits] = {}  # of logits, by address and rows
        self._batch = self._lib.llama_batch(
            0,
            _pointer(self._token, ctypes.c_int32),
            None,
            _pointer(self._position, ctypes.c_int32),
            _pointer(self._counts, ctypes.c_int32),
            ctypes.cast(self._sets.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            _pointer(self._wanted, ctypes.c_int8),
        )

    def widened(self) -> LlamaContext:
        """An empty cache of the same size with all IDS; this one is gone."""
        self._free()
        return LlamaContext(self.model, *self._asked, ids=IDS)

    def decode(self, rows: Seq[Row]) -> Logits:
        """Run rows, at most ROWS, in an order in which every row follows those that it sees. Their keys and values stay
        in the cache. Logits [R, V] of the R wanted rows, valid until the next pass.

        Raises TargetError: no room, or a fault of llama.cpp.
        """
        n, at = len(rows), 0
        tokens, positions, sets, wanted = zip(*rows, strict=True)
        addresses = []
        for ids in sets:
            if len(ids) == 1:
                addresses.append(self._single_at + 4 * ids[0])
            else:
                self._several[at : at + len(ids)] = ids
                addresses.append(self._several_at + 4 * at)
                at += len(ids)
        self._token[:n], self._position[:n], self._wanted[:n] = tokens, positions, wanted
        self._counts[:n] = [len(ids) for ids in sets]
        self._sets[:n] = addresses
        self._batch.n_tokens = n
        return self._decoded(n, sum(wanted))

    def decode_next(self, tokens: NDArray[np.int64]) -> Logits:
        """Run the rows of the last pass again, each with the token [R] and the position that follow: for passes of one
        wanted row for each sequence. Returns and raises as `decode`."""
        n = len(tokens)
        self._token[:n] = tokens
        self._position[:n] += 1
        return self._decoded(n, n)

    def _decoded(self, rows: int, wanted: int) -> Logits:
        code = self._lib.llama_decode(self._handle, self._batch)
        if code:
            raise self._failed(code, rows)
        return self._logits(wanted)

    def _logits(self, count: int) -> Logits:
        width = self.model.vocab_size
        if not count:
            return np.empty((0, width), np.float32)
        where = ctypes.addressof(self._lib.llama_get_logits(self._handle).contents), count
        view = self._views.get(where)
        if view is None:
            if len(self._views) > ROWS:  # llama.cpp moves its buffer when it grows
                self._views.clear()
            found = (ctypes.c_float * (count * width)).from_address(where[0])
            view = self._views[where] = np.ctypeslib.as_array(found).reshape(count, width)
        return view

    def _failed(self, code: int, rows: int) -> TargetError:
        said = faults()
        if code == _NO_ROOM:
            return TargetError(
                f"llama.cpp's KV cache has no room for {rows} more tokens, it holds {self.cells}",
                why="its size was fixed when the model was loaded",
                fix="choose a larger kv_tokens, or run fewer or shorter sequences",
            )
        return TargetError(f"llama.cpp could not run a pass (code {code}){': ' if said else ''}{said}")

    def fork(self, source: int, copy: int) -> None:
        """Let sequence id `copy`, which holds nothing, share what `source` holds. Nothing is copied."""
        self._lib.llama_memory_seq_cp(self._memory, source, copy, -1, -1)

    def cut(self, seq_id: int, length: int) -> None:
        """Remove what a sequence id holds from position `length` on. Raises TargetError where that is impossible."""
        if not self._lib.llama_memory_seq_rm(self._memory, seq_id, length, -1):
            raise TargetError(
                f"llama.cpp cannot roll a {self.model.header.architecture!r} model back to {length} tokens",
                why="rejected draft tokens have to be removed from its state",
                fix="use another model; llama.cpp itself runs this one, without speculation",
            )

    def clear(self, seq_id: int) -> None:
        """Remove all that a sequence id holds."""
        self._lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)


def _pointer(array: np.ndarray, kind: type) -> ctypes._Pointer:  # type: ignore[type-arg]
    return array.ctypes.data_as(ctypes.POINTER(kind))  # type: ignore[arg-type]
