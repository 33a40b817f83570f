"""The table of backends, and how one is chosen.

To add a backend, add a folder `NAME` here with a module `NAME_backend.py` that defines `BACKEND`, and add the name to
`slipstream.settings.BACKENDS`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.core.params import check_integer
from slipstream.errors import ParameterError, UnsupportedModelError
from slipstream.kv.blocks import BLOCK
from slipstream.models.config import DecoderConfig
from slipstream.settings import (
    BACKENDS,
    DTYPES,
    QUANTISATIONS,
    TRANSFORMERS,
    check_executor,
    check_threads,
    one_of,
)

if TYPE_CHECKING:
    from slipstream.core.target import HeadHost
    from slipstream.heads.eagle_head import EagleHead
    from slipstream.heads.eagle_runtime import EagleRuntime
    from slipstream.heads.medusa_heads import MedusaHeads
    from slipstream.heads.medusa_runtime import MedusaRuntime
    from slipstream.models.executor import Executor
    from slipstream.models.weights import Weights

log = logging.getLogger("slipstream")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RunSettings:
    """How to run a model.

    device    device of the model; dtype: dtype of the arithmetic.
    quantize  None, "int8", "w8a16" or "w8a8".
    threads   None: as many as can run at once.
    kv_dtype  None, "float32" or "float16".
    role      "target" or "draft": decides what "int8" means (see `quantisation`).
    kv_tokens tokens for which the KV cache has room, all sequences together; None: as many as memory holds.
    """

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    quantize: str | None = None
    threads: int | None = None
    kv_dtype: str | None = None
    role: str = "target"
    kv_tokens: int | None = None

    @property
    def kv_blocks(self) -> int | None:
        """`kv_tokens` in blocks."""
        return None if self.kv_tokens is None else -(-self.kv_tokens // BLOCK)


class Backend(Protocol):
    """What a backend declares. `refusal` returns why it cannot run a decoder with these settings, or None if it can."""

    name: str
    load_dtype: torch.dtype | None
    """Dtype of the tensors that `executor` reads; None: the dtype of the arithmetic."""

    def check(self, settings: RunSettings) -> None:
        """Raise ParameterError for settings that it supports for no model."""
        ...

    def refusal(self, config: DecoderConfig, settings: RunSettings) -> str | None: ...

    def executor(self, config: DecoderConfig, weights: Weights, settings: RunSettings) -> Executor:
        """Raises ParameterError for a setting that it does not support."""
        ...

    def eagle(self, head: EagleHead, host: HeadHost, settings: RunSettings) -> EagleRuntime: ...

    def medusa(self, heads: MedusaHeads, settings: RunSettings) -> MedusaRuntime: ...


def backend(name: str) -> Backend:
    """The backend with this name. Its module is imported on the first call."""
    made: Backend = import_module(f"slipstream.backends.{name}.{name}_backend").BACKEND
    return made


def quantisation(quantize: str | None, role: str = "target") -> str | None:
    """Resolve "int8": "w8a16" for a target, because it changes the distribution least; "w8a8" for a draft model or
    head, because it is fastest and the draft distribution affects only the acceptance rate."""
    return quantize if quantize != "int8" else "w8a16" if role == "target" else "w8a8"


def resolve_settings(
    executor: str,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    quantize: str | None = None,
    threads: int | None = None,
    kv_dtype: str | None = None,
    role: str = "target",
    kv_tokens: int | None = None,
) -> RunSettings:
    """Resolve device and dtype where they are None: CUDA with bfloat16 if a CUDA device exists and the executor can use
    it, else the CPU with float32. Raises ParameterError for unknown names."""
    check_executor(executor)
    if isinstance(dtype, str):
        one_of("dtype", dtype, DTYPES)
    asked: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if asked is not None and asked not in (getattr(torch, name) for name in DTYPES):
        raise ParameterError(
            f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}", fix="choose one, or leave it out"
        )
    check_threads(threads)
    if device is None:
        device = "cuda" if executor != "native" and torch.cuda.is_available() else "cpu"
    on = usable_device(device)
    of = asked or (torch.bfloat16 if on.type == "cuda" else torch.float32)
    if quantize and of == torch.bfloat16 and on.type == "cpu":
        raise ParameterError(
            f"quantize={quantize!r} and dtype='bfloat16' were asked for together",
            why="int8 products are added up in float32",
            fix="drop one of them",
        )
    if kv_tokens is not None:
        check_integer("kv_tokens", kv_tokens, BLOCK)
    return RunSettings(on, of, quantize, threads, kv_dtype, role, kv_tokens)


def usable_device(device: torch.device | str, of: str = "device") -> torch.device:
    """The device of that name. of: the setting that names it. Raises ParameterError if PyTorch does not know it or
    cannot use it here."""
    try:
        on = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError(
            f"{of} is {device!r}, which is not a device of PyTorch", fix=f"choose {of}='cpu' or 'cuda'"
        ) from error
    if on.type == "meta" or (on.type == "cpu" and on.index):
        what = (
            "computes nothing: it has shapes without values"
            if on.type == "meta"
            else "does not exist: PyTorch has one CPU"
        )
        raise ParameterError(f"{of} is {str(on)!r}, which {what}", fix=f"choose {of}='cpu' or 'cuda'")
    if on.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"{of} is {str(on)!r}, but PyTorch finds no CUDA device", fix=f"choose {of}='cpu'")
    try:
        torch.empty(0, device=on)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ParameterError(
            f"{of} is {str(on)!r}, which PyTorch cannot use here",
            why=str(error).splitlines()[0][:200],
            fix=f"choose {of}='cpu'",
        ) from error
    return on


def unsupported(name: str, config: DecoderConfig, why: str) -> UnsupportedModelError:
    """The error for a decoder that the named backend cannot run with the requested settings."""
    return UnsupportedModelError(
        f"the {name} backend cannot run this {config.model_type} model in this way",
        why=why,
        fix="leave executor at 'auto', or choose executor='torch'",
    )


def choose(config: DecoderConfig, executor: str, settings: RunSettings) -> Backend:
    """The requested backend, or for "auto" the first one that can run the decoder with these settings. Raises
    UnsupportedModelError if the requested one cannot."""
    if executor == TRANSFORMERS:
        raise ParameterError(
            f"executor is {executor!r}, which is no backend of our own decoder",
            why="only generation runs models by the code of transformers",
            fix="choose another executor here, or load the target with LLM",
        )
    if executor != "auto":
        found = backend(executor)
        found.check(settings)
        why = found.refusal(config, settings)
        if why is not None:
            raise unsupported(executor, config, why)
        return found
    refusals: list[str] = []
    for name in BACKENDS:
        found = backend(name)
        why = found.refusal(config, settings)
        if why is None:
            if refusals and settings.device.type == "cpu" and settings.dtype in (torch.float32, torch.bfloat16):
                log.warning("%s: %s runs it instead, slower", "; ".join(refusals), name)
            return found
        refusals.append(f"the {name} backend cannot run this model ({why})")
    raise UnsupportedModelError("no backend can run this model", why="; ".join(refusals), fix="change the settings")


def backend_for_head(decoder: DecoderConfig | None, host: HeadHost, quantize: str | None = None) -> Backend:
    """The backend that runs the target, if it can also run the head; else torch.

    decoder   config of the head's decoder layers; None: it has none.
    quantize  None, "int8", "w8a16" or "w8a8".
    """
    if quantize is not None:
        one_of("quantize", quantize, QUANTISATIONS)
    found = backend(host.runtime.backend if host.runtime.backend in BACKENDS else "torch")
    why = (
        None
        if decoder is None
        else found.refusal(decoder, RunSettings(host.device, host.dtype, quantize, role="draft"))
    )
    if why is None:
        return found
    log.warning("the %s backend cannot run this head (%s): torch runs it instead, slower", found.name, why)
    return backend("torch")
