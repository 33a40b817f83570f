"""The table of backends, and the choice of a backend.

To add a backend, add a folder `NAME` here with a module `NAME_backend.py` that defines `BACKEND`, and add the name to
`slipstream.settings.BACKENDS`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_formats import QUANTISED, few_bits
from slipstream.errors import ParameterError, UnsupportedModelError
from slipstream.settings import AUTO, BACKENDS, DTYPES, TRANSFORMERS

if TYPE_CHECKING:
    from slipstream.checkpoints.weights import Weights
    from slipstream.core.target import HeadHost, Runtime
    from slipstream.executor.executor import Executor
    from slipstream.heads.dflash_head import DFlashHead
    from slipstream.heads.eagle_head import EagleHead
    from slipstream.heads.eagle_rows import DFlashRuntime, EagleRuntime
    from slipstream.heads.medusa_heads import MedusaHeads, MedusaRuntime

log = logging.getLogger("slipstream")


class Backend(Protocol):
    """Declares a backend. `refusal` returns why it cannot run a decoder with these settings, or None."""

    name: str
    automatic: bool
    """Whether `executor="auto"` may choose it."""
    load_dtype: torch.dtype | None
    """Dtype of the tensors that `executor` reads; None: the dtype of the arithmetic."""

    def check(self, settings: LoadSettings) -> None:
        """Raise ParameterError for settings that this backend supports for no model."""
        ...

    def refusal(self, config: DecoderConfig, settings: LoadSettings) -> str | None: ...

    def executor(self, config: DecoderConfig, weights: Weights, settings: LoadSettings) -> Executor:
        """Make an executor. Raises ParameterError for a setting that this backend does not support."""
        ...

    def eagle(self, head: EagleHead, host: HeadHost, settings: LoadSettings) -> EagleRuntime: ...

    def dflash(self, head: DFlashHead, host: HeadHost, settings: LoadSettings) -> DFlashRuntime: ...

    def medusa(self, heads: MedusaHeads, settings: LoadSettings) -> MedusaRuntime: ...


def backend(name: str) -> Backend:
    """Return the backend with this name. Its module is imported on the first call."""
    backend: Backend = import_module(f"slipstream.backends.{name}.{name}_backend").BACKEND
    return backend


def resolve(settings: LoadSettings) -> LoadSettings:
    """Return these settings with a torch.device and a torch.dtype. If `device` is None, it becomes CUDA if a CUDA
    device exists and the executor can use it, else the CPU. If `dtype` is None, it becomes bfloat16 on CUDA, else
    float32. Raises ParameterError for a device or dtype that cannot be used."""
    device = settings.device
    if device is None:
        only_cpu = settings.executor == "native" or settings.quantize
        device = "cuda" if not only_cpu and torch.cuda.is_available() else "cpu"
    on, dtype = usable_device(device), settings.dtype
    if dtype is None:
        dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    elif isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    elif dtype not in (getattr(torch, name) for name in DTYPES):
        raise ParameterError(
            f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}", fix="choose one, or leave it out"
        )
    if settings.quantize and dtype == torch.bfloat16 and on.type == "cpu":
        raise ParameterError(
            f"quantize={settings.quantize!r} and dtype='bfloat16' were given together",
            why="our CPU kernels for quantised weights compute in float32",
            fix="leave one of them out",
        )
    return replace(settings, device=on, dtype=dtype)


def usable_device(device: torch.device | str, of: str = "device") -> torch.device:
    """Return the device with this name. of: name of the setting, for errors. Raises ParameterError if PyTorch does not
    know the device or cannot use it here."""
    either, cpu = f"choose {of}='cpu' or 'cuda'", f"choose {of}='cpu'"
    try:
        on = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError(f"{of} is {device!r}, which is not a device of PyTorch", fix=either) from error
    named = f"{of} is {str(on)!r},"
    if on.type == "meta":
        raise ParameterError(f"{named} on which tensors have shapes but no values", fix=either)
    if on.type == "cpu" and on.index:
        raise ParameterError(f"{named} which does not exist: PyTorch has one CPU", fix=either)
    if on.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"{named} but PyTorch finds no CUDA device", fix=cpu)
    try:
        torch.empty(0, device=on)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:200]
        raise ParameterError(f"{named} which PyTorch cannot use here", why=why, fix=cpu) from error
    return on


def choose(config: DecoderConfig, settings: LoadSettings) -> tuple[Backend, dict[str, str]]:
    """Return the requested backend, or for "auto" the first backend that can run the decoder with these settings. Also
    return why each backend before it in the table cannot. settings: as `resolve` returns them. Raises
    UnsupportedModelError if the requested backend cannot run the decoder, and ParameterError if no backend supports the
    format of quantised weights or of the KV cache."""
    executor = settings.executor
    if executor == TRANSFORMERS:
        raise ParameterError(
            f"executor is {executor!r}, but this needs our own decoder",
            why="with the code of transformers, a model can only generate text",
            fix="give another executor, or load the target with LLM",
        )
    if executor != AUTO:
        chosen = backend(executor)
        chosen.check(settings)
        why = chosen.refusal(config, settings)
        if why is not None:
            raise UnsupportedModelError(
                f"executor={executor!r} cannot run this {config.model_type} model with these settings",
                why=why,
                fix="give executor='auto' or another executor, or leave quantize out",
            )
        return chosen, {}
    refusals: dict[str, str] = {}
    for name in BACKENDS:
        if not backend(name).automatic:
            continue
        why = backend(name).refusal(config, settings)
        if why is None:
            return backend(name), refusals
        refusals[name] = why
    why, other = _list_refusals(refusals), f", or give another of {', '.join(QUANTISED)}" if settings.quantize else ""
    of = f"given for a {config.model_type} model, and no backend can run the model with it"
    settings.refuse(("quantize", "kv_dtype"), of, why, f"leave it out{other}")
    raise UnsupportedModelError(
        f"no backend of our own decoder can run this {config.model_type} model with these settings",
        why=why,
        fix="give executor='auto', with which transformers runs the model",
    )


def _list_refusals(refusals: Mapping[str, str]) -> str:
    return "; ".join(f"the {name} backend cannot run this model ({why})" for name, why in refusals.items())


def warn_slower(refusals: Mapping[str, str], name: str, settings: LoadSettings) -> None:
    """Log that a slower backend runs a model, and why faster backends cannot. Logs nothing if the faster backends are
    for other devices or dtypes."""
    if refusals and settings.device.type == "cpu" and settings.dtype in (torch.float32, torch.bfloat16):
        log.warning("%s: %s runs it instead, slower", _list_refusals(refusals), name)


def backend_for_head(
    decoder: DecoderConfig | None, host: HeadHost, quantize: str | None = None
) -> tuple[Backend, LoadSettings]:
    """Call `choose_for_head` for a loaded target. Warns if the target's own backend cannot run the head, and why."""
    chosen, settings, why = choose_for_head(decoder, host.runtime, host.device, host.dtype, quantize)
    if why is not None:
        name = host.runtime.backend
        log.warning("the %s backend cannot run this head (%s): torch runs it instead, slower", name, why)
    return chosen, settings


def choose_for_head(
    decoder: DecoderConfig | None, runtime: Runtime, device: torch.device, dtype: torch.dtype, quantize: str | None
) -> tuple[Backend, LoadSettings, str | None]:
    """Choose the backend of a draft head: the target's backend if it can run the head, else torch. Returns the backend,
    the settings of the head, and why the target's backend cannot run the head (or None).

    decoder   config of the head's decoder layers; None: it has no decoder layers.
    dtype     dtype of the target's weights.
    quantize  one of `weight_formats.DRAFT_QUANTISATIONS`. None: decoder layers of a head for a quantised native
              target get about as many bits as the target's weights.
    """
    if quantize is None and decoder and runtime.backend == "native" and runtime.quantize:
        quantize = "int4" if few_bits(runtime.quantize) else "int8"
    asked = None if quantize == "none" else quantize
    settings = LoadSettings(device=device, dtype=dtype, quantize=asked, threads=runtime.threads, role="draft")
    chosen = backend(runtime.backend if runtime.backend in BACKENDS else "torch")
    why = None if decoder is None else chosen.refusal(decoder, settings)
    return (chosen if why is None else backend("torch")), settings, why
