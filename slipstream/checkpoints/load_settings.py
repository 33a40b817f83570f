"""`LoadSettings`: how a model is loaded and run, with one field for each setting. Importing this module does not import
torch.

`LLM`, the command line, `targets.describe` and the executors read this object. Command-line options and their help are
derived from the fields. A new setting needs a field here, its type in `LoadKeywords`, and the code that uses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

from slipstream import settings
from slipstream.checkpoints.weight_formats import (
    BY_ROLE,
    DRAFT_QUANTISATIONS,
    KV_FORMATS,
    QUANTISATIONS,
    QUANTISED,
    WeightFormat,
)
from slipstream.core.params import integer, option
from slipstream.core.strict import Strict
from slipstream.errors import ParameterError, did_you_mean
from slipstream.kv.blocks import BLOCK

if TYPE_CHECKING:
    import torch

    Dtype = str | torch.dtype
    Device = str | torch.device
    DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device]
    Folder = str | Path
    Resolved = Any
else:  # the command line takes text
    Dtype = Device = DeviceMap = Folder = str
    Resolved = str | None
"""Type of a dtype or device: as the user gave it, until `describe` replaces it with torch's object."""


class LoadKeywords(TypedDict, total=False):
    """The keywords of `LLM` that are fields of `LoadSettings`, for type checkers."""

    executor: str
    dtype: Dtype | None
    device: Device | None
    quantize: str | None
    draft_quantize: str | None
    draft_tokenizer: str
    threads: int | None
    kv_dtype: str | None
    kv_tokens: int | None
    generation_config: str
    device_map: DeviceMap | None
    lora: Folder | None
    trust_remote_code: bool


def _one_of(*known: str) -> Callable[[str, str], str]:
    return partial(settings.one_of, known=known)


def _check_dtype(name: str, value: Dtype) -> Dtype:
    return settings.one_of(name, value, settings.DTYPES) if isinstance(value, str) else value


@dataclass(frozen=True)
class LoadSettings(Strict):
    """How to load a model. Raises ParameterError for values that are wrong for every model.

    executor   "auto": on a CPU native if it supports the model, otherwise torch; transformers runs models that our own
               decoder does not. "native" (our own CPU kernels), "torch", "transformers", "cuda" (our own kernels on an
               NVIDIA GPU; experimental).
    dtype      name or torch.dtype of the arithmetic. None: bfloat16 on CUDA, float32 on a CPU. "bfloat16" on a CPU:
               native if the processor has bfloat16 products, otherwise torch.
    device     None: CUDA if there is one and the executor can use it, otherwise the CPU.
    quantize   weight format of the native executor: None; "w8a16" or "w8a8" (int8 weights, activations in 16 or 8
               bits); "int8": w8a16 for a target, w8a8 for a draft model; "w4a8", or "int4": weights in 4 bits.
    draft_quantize  weight format of the draft model, or "none". None: the format of the target.
    draft_tokenizer  "same": a draft model with another tokenizer is refused. "string": its text is split by the
                     target's tokenizer (see `drafters.string_match`).
    threads    number of CPU threads. None: as many as can run at once. PyTorch's number applies to the whole process.
    kv_dtype   format of the native executor's KV cache: None, "float32", "float16" or "q8_0" (8 bits, with a float16
               scale for 32 numbers of a key or value).
    kv_tokens  size of the KV cache in tokens, all sequences together; None: as many as fit into memory.
    device_map  devices of the target's layers, as in transformers' `from_pretrained`: a word such as "auto", or a
                mapping of modules to devices.
    lora       folder or hub id of a LoRA adapter to merge into the target's weights (see `checkpoints.lora`).
    trust_remote_code  whether to run Python code of the target's checkpoint if transformers does not know the model.
    generation_config  "auto" or "none" (see `checkpoints.generation_defaults`).
    role       "target" or "draft": the model's role.
    """

    PANEL: ClassVar[str] = "Loading"
    executor: str = option(
        settings.AUTO,
        "What runs the target: auto, native, torch or transformers. On a CPU, auto prefers native.",
        check=_one_of(*settings.EXECUTORS),
    )
    dtype: Resolved = option(
        None, "Dtype: float32, bfloat16, float16 or float64; native supports float32 and bfloat16.", check=_check_dtype
    )
    device: Resolved = option(None, "Device: cpu, cuda, cuda:1, ...")
    quantize: str | None = option(
        None,
        "Quantise the target's weights while they are loaded, on a CPU: "
        + ", ".join(f"{name} ({f.bits} bits, activations {f.activations})" for name, f in QUANTISED.items())
        + ", int8 (w8a16; draft: w8a8) or int4 (w4a8).",
        check=_one_of(*QUANTISATIONS),
    )
    draft_quantize: str | None = option(
        None,
        "Quantisation of the draft model: int8 (w8a8), int4 (w4a8), w8a16 or none.",
        shown="as --quantize",
        check=_one_of(*DRAFT_QUANTISATIONS),
    )
    draft_tokenizer: str = option(
        settings.SAME,
        "Draft model with another tokenizer: same refuses it; string translates its tokens through their text.",
        check=_one_of(*settings.DRAFT_TOKENIZERS),
    )
    threads: int | None = option(None, "Number of CPU threads.", check=settings.check_threads)
    kv_dtype: str | None = option(
        None,
        "KV cache dtype of the native executor: float32, float16 or q8_0 (8 bits).",
        shown="float32",
        check=_one_of(*KV_FORMATS),
    )
    kv_tokens: int | None = option(
        None,
        "Size of the KV cache: number of tokens, for all requests together.",
        shown="as many as fit into memory",
        check=integer(BLOCK),
    )
    generation_config: str = option(
        settings.AUTO,
        "auto: use the defaults in the target's generation_config.json (penalties, forbidden ids; in chat and serve "
        "also sampling). none: use only its end-of-text tokens.",
        check=_one_of(settings.AUTO, settings.OFF),
    )
    device_map: DeviceMap | None = option(
        None, "Let transformers spread the target over several devices: auto, balanced, sequential, ..."
    )
    lora: Folder | None = option(None, "LoRA adapter (PEFT) to merge into the target's weights: folder or hub id.")
    trust_remote_code: bool = option(False, "Allow running the Python code that the target's checkpoint brings.")
    role: str = option("target")

    @staticmethod
    def of(
        values: Mapping[str, object] | LoadKeywords, caller: str = "LoadSettings", more: tuple[str, ...] = ()
    ) -> LoadSettings:
        """Make settings from keywords of the function `caller`. Raises ParameterError for unknown keywords. more: other
        parameters of this function, for the error's suggestion."""
        names = [f.name for f in fields(LoadSettings)]
        for name in values:
            if name not in names:
                raise ParameterError(f"{caller} has no parameter {name!r}", fix=did_you_mean(name, [*names, *more]))
        return LoadSettings(**values)  # type: ignore[arg-type]  # checked by the fields

    @property
    def kv_blocks(self) -> int | None:
        """`kv_tokens` in blocks."""
        return None if self.kv_tokens is None else -(-self.kv_tokens // BLOCK)

    @property
    def keywords(self) -> LoadKeywords:
        """These settings as keywords of `LLM`."""
        return {name: getattr(self, name) for name in LoadKeywords.__annotations__}  # type: ignore[return-value]

    @property
    def given(self) -> dict[str, object]:
        """The settings that differ from their defaults, of the settings that decide what runs and how."""
        beside = ("draft_quantize", "draft_tokenizer", "generation_config", "trust_remote_code")
        values = {name: value for name, value in self.keywords.items() if name not in beside}
        return {name: value for name, value in values.items() if value not in (None, getattr(DEFAULTS, name))}

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of quantised weights; None: weights keep their stored format."""
        name = BY_ROLE.get(self.quantize or "", {}).get(self.role, self.quantize)
        return None if name is None else QUANTISED[name]

    def of_draft(self) -> LoadSettings:
        """Return the settings of the draft model for a target with these settings."""
        asked = self.quantize if self.draft_quantize is None else self.draft_quantize
        return replace(
            self,
            quantize=None if asked == "none" else asked,
            draft_quantize=None,
            device_map=None,
            lora=None,
            trust_remote_code=False,
            role="draft",
        )

    def refuse(self, names: tuple[str, ...], of: str, why: str, fix: str) -> None:
        """Raise ParameterError if one of the settings `names` is given. of: the end of the message, after "... was"."""
        asked = {name: value for name, value in self.given.items() if name in names}
        if asked:
            each = " and ".join(f"{name}={value!r}" for name, value in asked.items())
            raise ParameterError(f"{each} was {of}", why=why, fix=fix)

    def check_device_map(self) -> None:
        """Raise ParameterError if a device map would have no effect."""
        if self.executor not in (settings.AUTO, settings.TRANSFORMERS):
            why = "only transformers can spread a model over several devices"
            fix = "leave device_map out, or choose executor='transformers'"
            self.refuse(("device_map",), f"given with executor={self.executor!r}", why, fix)
        if self.device is not None and self.device_map is not None:
            raise ParameterError(
                f"device={str(self.device)!r} and device_map={self.device_map!r} are both given",
                why="both decide where the weights go",
                fix="give one of them",
            )


DEFAULTS = LoadSettings()

F = TypeVar("F", bound=Callable[..., object])


def show_settings(before: str | None = None) -> Callable[[F], F]:
    """Make `help` and editors show the fields of `LoadSettings` instead of `**settings`, before this parameter."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        at = next((i for i, each in enumerate(parameters) if each.name == before), len(parameters))
        parameters[at:at] = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields(LoadSettings)
            if f.name in LoadKeywords.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate
