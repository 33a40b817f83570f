"""Loads a GGUF file as a `GgufTarget`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from slipstream.core.target import Runtime
from slipstream.errors import LoadError, ParameterError, UnsupportedModelError
from slipstream.host.machine import available_bytes, available_cores
from slipstream.kv.blocks import BLOCK
from slipstream.models.gguf_header import ENDS, GgufShape, gguf_shape, read_header
from slipstream.models.llamacpp_library import LlamaModel
from slipstream.models.load_settings import LoadSettings
from slipstream.models.weights import Progress
from slipstream.settings import LLAMACPP, MOST_DRAFT_TOKENS
from slipstream.targets.describe import Described
from slipstream.targets.gguf.gguf_target import GgufTarget
from slipstream.targets.gguf.llama_context import LlamaContext
from slipstream.targets.huggingface.kinds import GGUF, Kind

log = logging.getLogger("slipstream")

_USUAL_REQUESTS, _USUAL_CELLS = 8, 16384
"""The KV cache has room for so many full contexts, or for so many tokens if that is less; at least for one context."""

_MOST_MEMORY = 0.25
"""Share of the free memory that a KV cache of unasked size may take."""


@dataclass(frozen=True)
class DescribedGguf(Described):
    """A GGUF file."""

    shape: GgufShape = field(kw_only=True)

    @staticmethod
    def of(source: str | Path, settings: LoadSettings, refusals: tuple[str, ...] = ()) -> DescribedGguf:
        """Raises CheckpointError for a damaged file, ParameterError for settings that llama.cpp does not have. A draft
        model takes what is for the target's own code: dtype and device."""
        draft = settings.role == "draft"
        settings.refuse(
            ("quantize",) if draft else ("quantize", "dtype"),
            "asked of a model that llama.cpp runs",
            "its weights stay as the file has them",
            ("draft_quantize='none'" if draft else "leave it out") + "; `slipstream convert` quantises",
        )
        device = settings.device
        if device is not None and not draft and str(device).partition(":")[0] != "cpu":
            raise ParameterError(
                f"device={str(device)!r} was asked of a model that llama.cpp runs",
                why="it is run on the CPU",
                fix="leave it out",
            )
        shape = gguf_shape(read_header(source))
        plain = shape.header.file_type == "F32"
        kv_dtype = settings.kv_dtype or ("float32" if plain else "float16")  # else that of llama.cpp
        resolved = replace(settings, device=torch.device("cpu"), dtype=torch.float32, kv_dtype=kv_dtype)
        return DescribedGguf(source, resolved, LLAMACPP, refusals, shape=shape)

    @property
    def kind(self) -> Kind:
        return GGUF

    @property
    def weight_bytes(self) -> int:
        return sum(self.shape.header.stored.values())

    @property
    def kv_bytes(self) -> int:
        return max(1, 2 * self.shape.kv_width * (4 if self.settings.kv_dtype == "float32" else 2))

    def usual_kv_tokens(self, requests: int = 0) -> int:
        """Not more than is usual: the cache is filled with zeros when it is made."""
        if self.settings.kv_tokens is not None:
            return self.settings.kv_tokens
        each = self.shape.context + MOST_DRAFT_TOKENS
        wanted = max(each, min(_USUAL_REQUESTS * each, _USUAL_CELLS))
        fits = _MOST_MEMORY * available_bytes(torch.device("cpu")) / self.kv_bytes
        return max(BLOCK, min(wanted, int(fits)))

    def load(self, progress: Progress | None = None) -> GgufTarget:
        """Raises UnsupportedModelError for a model that llama.cpp refuses or that cannot be rolled back, LoadError
        without llama-cpp-python."""
        shape, kv_dtype = self.shape, self.settings.kv_dtype
        try:
            model = LlamaModel(self.source, progress=progress)
        except LoadError as fault:  # our own decoder's reason may be the better one
            raise type(fault)("; ".join((*self.refusals, fault.what)), why=fault.why, fix=fault.fix) from fault
        assert kv_dtype is not None
        _check_rollback(model)
        threads = self.settings.threads or available_cores()
        context = LlamaContext(model, self.usual_kv_tokens(), kv_dtype, threads)
        if ENDS not in shape.header.metadata:
            shape = replace(shape, eos_ids=model.eos_ids or shape.eos_ids)
        quantize = None if shape.header.file_type == "F32" else shape.header.file_type
        runtime = Runtime(LLAMACPP, torch.float32, quantize, kv_dtype, threads, model.header.path)
        for why in self.refusals:
            log.warning("%s: llama.cpp runs it instead, slower", why)
        return GgufTarget(context, shape, runtime)


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
