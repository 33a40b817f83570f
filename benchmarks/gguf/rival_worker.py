"""Worker of ik_llama.cpp or llama.cpp on GGUF files. It uses the C interface of their Python packages: `llama_decode`,
and numpy's argmax over the logits. (The samplers of ik_llama.cpp's package take 10 ms per token.)"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from benchmarks.protocol import peak_memory, serve, versions

try:
    from ik_llama_cpp import _ctypes_api as api

    IK = True
except ImportError:
    import llama_cpp as api  # type: ignore[no-redef]

    IK = False
CONTEXT, CHUNK = 4096, 512
NGRAMS, DRAFT = (3, 2), 4
"""Lengths of n-grams to look up, and draft length. Longer drafts lose more time on texts that do not repeat."""
models: dict[str, Model] = {}
draft_models: dict[str, DraftModel] = {}


def count_common(a: Seq[int], b: Seq[int]) -> int:
    """Count the tokens with which both begin. The package's function needs torch, which rivals' environments lack."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


class Model:
    """A model and a context of CONTEXT tokens, with flash attention. settings: fields of the context that differ."""

    def __init__(self, file: str, threads: int, **settings: int):
        self.model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"{file} cannot be loaded")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = threads
        if IK:
            params.flash_attn = True
        else:
            params.flash_attn_type = 1
        for name, value in settings.items():
            setattr(params, name, value)
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"no context for {file}")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(CHUNK, 0, 1)

    def clear(self) -> None:
        if IK:
            api.llama_kv_cache_clear(self.context)
        else:
            api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def decode(self, ids: list[int], start: int, every: bool = False) -> np.ndarray:
        """Run tokens at the positions from `start` on. Returns the logits after the last token [1, V], or with `every`
        after each token [n, V]."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = every or i == len(ids) - 1
        if api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        chosen = range(len(ids)) if every else [-1]
        rows = [np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.vocab,)) for i in chosen]
        return np.stack(rows) if every else rows[0][None]

    def forget(self, start: int) -> None:
        """Drop the keys and values of positions from `start` on."""
        if IK:
            drop = api._lib.llama_kv_cache_seq_rm  # the package does not wrap this function
            drop.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
            drop(self.context, 0, start, -1)
        else:
            api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, start, -1)

    def read(self, ids: list[int]) -> np.ndarray:
        self.clear()
        for at in range(0, len(ids), CHUNK):
            logits = self.decode(ids[at : at + CHUNK], at)
        return logits


class DraftModel(Model):
    """A draft model. known: the tokens whose keys and values are in its KV cache."""

    known: Seq[int] = ()

    def draft(self, text: list[int], most: int, least: float) -> list[int]:
        """Draft a greedy chain after the text, up to the first token whose probability is below `least`."""
        same = min(count_common(self.known, text), len(text) - 1)
        self.forget(same)
        for at in range(same, len(text), CHUNK):
            logits = self.decode(text[at : at + CHUNK], at)
        chain: list[int] = []
        while len(chain) < most:
            row = logits[-1]
            token = int(row.argmax())
            if 1 / np.exp(row - row[token]).sum() < least:
                break
            chain.append(token)
            if len(chain) < most:
                logits = self.decode([token], len(text) + len(chain) - 1)
        self.known = [*text, *chain[: most - 1]]
        return chain


def load(name: str, file: str, threads: int, quantize: None = None, draft: str | None = None) -> dict[str, Any]:
    """Load a file under a name. draft: file of a draft model, which then drafts instead of the n-gram lookup."""
    models[name] = Model(file, threads)
    if draft is not None:
        draft_models[name] = DraftModel(draft, threads)
    return {}


def request(
    name: str, ids: list[int], tokens: int, ends: Seq[int] = (), drafted: bool = False, prediction: Seq[int] = (),
    chain: int = 16, least: float = 0.75,
) -> dict[str, Any]:  # fmt: skip
    """See `slipstream_worker`. drafted: draft with the draft model if one was loaded, else with n-gram lookup in the
    sequence and in the prediction. chain, least: most draft tokens of a draft model, and the probability below which it
    stops drafting (llama.cpp's `--draft-max` and `--draft-p-min`)."""
    model, started = models[name], time.perf_counter()
    generated = [int(model.read(ids)[0].argmax())]
    first = time.perf_counter() - started
    before = [*prediction, *ids]  # in this order, because a lookup prefers the last match
    while len(generated) < tokens and generated[-1] not in ends:
        room = tokens - len(generated) - 1
        if drafted and name in draft_models:
            draft = draft_models[name].draft([*ids, *generated], min(chain, room), least)
        else:
            draft = lookup([*before, *generated], min(DRAFT, room)) if drafted else []
        at = len(ids) + len(generated) - 1
        best = model.decode([generated[-1], *draft], at, every=bool(draft)).argmax(-1).tolist()
        right = count_common(draft, best)
        if right < len(draft):
            model.forget(at + 1 + right)
        for token in best[: right + 1]:
            generated.append(int(token))
            if token in ends:
                break
    return {"seconds": time.perf_counter() - started, "first": first, "count": 1, "tokens": generated}


def lookup(text: list[int], most: int) -> list[int]:
    """Return the tokens that followed the last earlier occurrence of the n-gram at the end of the text. n is the first
    of `NGRAMS` for which there is an occurrence."""
    whole = np.asarray(text)
    for length in NGRAMS:
        if most < 1 or len(text) <= length:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(whole[:-1], length)
        places = np.flatnonzero((windows == whole[-length:]).all(1))
        if len(places):
            after = int(places[-1]) + length
            return text[after : after + most]
    return []


def loss(name: str, ids: list[int]) -> dict[str, Any]:
    """See `slipstream_worker`."""
    models[name].clear()
    logits = models[name].decode(ids, 0, every=True)[:-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_sums = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    return {"loss": float((log_sums - logits[np.arange(len(ids) - 1), ids[1:]]).sum()), "count": len(ids) - 1}


def logits(name: str, ids: list[int], file: str) -> dict[str, Any]:
    """See `slipstream_worker`."""
    np.save(file, models[name].read(ids)[0])
    return {}


def memory(name: str) -> dict[str, Any]:
    """Return the peak memory of the process so far, in bytes."""
    return {"peak": peak_memory()}


QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)

if __name__ == "__main__":
    if not IK:
        api.llama_log_set(QUIET, ctypes.c_void_p(0))
    api.llama_backend_init()
    info = lambda: {"versions": versions("ik-llama-cpp-python" if IK else "llama-cpp-python", "numpy")}  # noqa: E731
    serve({"info": info, "load": load, "request": request, "loss": loss, "logits": logits, "memory": memory})
