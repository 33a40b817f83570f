"""Loads a GGUF file as a `GgufTarget`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.core.params import check_integer
from slipstream.core.target import Runtime
from slipstream.errors import ParameterError, UnsupportedModelError
from slipstream.host.cores import available_cores
from slipstream.kv.blocks import BLOCK
from slipstream.models.gguf_header import read_header
from slipstream.models.gguf_shape import ENDS, GgufShape, gguf_shape
from slipstream.models.llamacpp_library import LlamaModel
from slipstream.settings import KV_DTYPES, LLAMACPP, MOST_DRAFT_TOKENS, check_threads, one_of
from slipstream.targets.gguf.gguf_target import GgufTarget
from slipstream.targets.gguf.llama_context import LlamaContext

_USUAL_REQUESTS, _USUAL_CELLS = 8, 16384
"""The KV cache has room for so many full contexts, or for so many tokens if that is less; at least for one context."""

_MOST_MEMORY = 0.25
"""Share of the free memory that a KV cache of unasked size may take."""


def from_file(source: str | Path, settings: Mapping[str, Any]) -> GgufTarget:
    """A target out of a GGUF file. settings: options of `Decoder.load`.

    Raises CheckpointError for a damaged file, UnsupportedModelError for a model that llama.cpp refuses or that cannot
    be rolled back, LoadError without llama-cpp-python, ParameterError for settings that a GGUF model does not have.
    """
    check_gguf_settings(settings)
    shape = gguf_shape(read_header(source))
    model = LlamaModel(source, progress=settings.get("progress"))
    _check_rollback(model)
    kv_dtype = gguf_kv_dtype(shape, settings.get("kv_dtype"))
    threads = settings.get("threads") or available_cores()
    context = LlamaContext(model, gguf_cells(shape, settings.get("kv_tokens"), kv_dtype), kv_dtype, threads)
    if ENDS not in shape.header.metadata:
        shape = replace(shape, eos_ids=model.eos_ids or shape.eos_ids)
    quantize = None if shape.header.file_type == "F32" else shape.header.file_type
    return GgufTarget(context, shape, Runtime(LLAMACPP, torch.float32, quantize, kv_dtype, threads, model.header.path))


def gguf_kv_dtype(shape: GgufShape, asked: str | None) -> str:
    """The dtype of the KV cache: as asked, else that of llama.cpp, but float32 for weights in float32."""
    return asked or ("float32" if shape.header.file_type == "F32" else "float16")


def gguf_cells(shape: GgufShape, kv_tokens: int | None, kv_dtype: str) -> int:
    """Tokens for which the KV cache has room, all sequences together."""
    if kv_tokens is not None:
        return kv_tokens
    from slipstream.targets.memory_plan import available_bytes

    each = shape.context + MOST_DRAFT_TOKENS
    wanted = max(each, min(_USUAL_REQUESTS * each, _USUAL_CELLS))
    fits = _MOST_MEMORY * available_bytes(torch.device("cpu")) / kv_bytes(shape, kv_dtype)
    return max(BLOCK, min(wanted, int(fits)))


def kv_bytes(shape: GgufShape, kv_dtype: str) -> int:
    """Bytes of a cell."""
    return max(1, 2 * shape.kv_width * (4 if kv_dtype == "float32" else 2))


def check_gguf_settings(settings: Mapping[str, Any]) -> None:
    """Raise ParameterError for settings that a GGUF model does not have. A draft model takes what is for the target's
    own code: executor, dtype and device."""
    names = ("quantize",) if settings.get("role") == "draft" else ("quantize", "dtype", "executor")
    given = {name: settings[name] for name in names if settings.get(name) not in (None, "auto", LLAMACPP)}
    if given:
        fix = "leave it out; `slipstream convert` quantises"
        if settings.get("role") == "draft":
            fix = "draft_quantize='none'; `slipstream convert` quantises"
        raise ParameterError(
            " and ".join(f"{name}={value!r}" for name, value in given.items()) + " was asked of a GGUF model",
            why="llama.cpp runs it, with weights as the file has them",
            fix=fix,
        )
    device = settings.get("device")
    if device is not None and settings.get("role") != "draft" and str(device).partition(":")[0] != "cpu":
        raise ParameterError(
            f"device={str(device)!r} was asked of a GGUF model", why="it is run on the CPU", fix="leave it out"
        )
    check_threads(settings.get("threads"))
    if settings.get("kv_dtype") is not None:
        one_of("kv_dtype", settings["kv_dtype"], KV_DTYPES)
    if settings.get("kv_tokens") is not None:
        check_integer("kv_tokens", settings["kv_tokens"], BLOCK)


def _check_rollback(model: LlamaModel) -> None:
    """Raise UnsupportedModelError for a model that is not causal, or whose state cannot be rolled back."""
    library, kind = model.library, model.header.architecture
    if library.llama_model_has_encoder(model.handle) or library.llama_model_is_diffusion(model.handle):
        raise UnsupportedModelError(
            f"the architecture {kind!r} is not that of a causal language model",
            why="each token must depend on the text before it only",
            fix="use a decoder-only model",
        )
    if library.llama_model_is_recurrent(model.handle) or library.llama_model_is_hybrid(model.handle):
        raise UnsupportedModelError(
            f"the state of the architecture {kind!r} cannot be rolled back in llama.cpp",
            why="it is recurrent, and rejected draft tokens could not be removed from it",
            fix="use another model; llama.cpp itself runs this one, and transformers may run its checkpoint here",
        )
