"""`describe`: how a model will be run, before its weights are read; `plan`: what it will take with its draft and a KV
cache; and `as_target`, which also loads it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slipstream.backends.table import usable_device
from slipstream.core.sizes import size
from slipstream.core.target import Target
from slipstream.errors import LoadError, ParameterError, UnsupportedModelError
from slipstream.heads.mtp_names import mtp_layer_count
from slipstream.heads.recognition import recognise
from slipstream.host.machine import available_bytes
from slipstream.kv.blocks import BLOCK
from slipstream.models.checkpoint import is_gguf, resolve
from slipstream.models.facts import ModelFacts, facts
from slipstream.models.load_settings import DEFAULTS, LoadSettings
from slipstream.models.weights import Progress
from slipstream.settings import AUTO, LLAMACPP, TRANSFORMERS
from slipstream.targets.huggingface.kinds import Kind
from slipstream.zoo import checkpoint_of

log = logging.getLogger("slipstream")

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")
"""What a device map may say instead of a device."""

RESERVE = 0.1
"""Share of the available memory that is left for activations and for the process itself."""


@dataclass(frozen=True)
class Described(ABC):
    """A model in files, before its weights are read, and how it will be run. Each runner has one of its own.

    checkpoint    folder, hub id or GGUF file.
    settings  resolved: device and dtype are those of PyTorch.
    runner    what runs it: a backend of our own decoder, "transformers" or "llamacpp".
    refusals  runner that "auto" prefers -> why it does not run it. "decoder": our own, with whichever backend.
    """

    checkpoint: str | Path
    settings: LoadSettings
    runner: str
    refusals: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def facts(self) -> ModelFacts:
        """Shape, sizes and tokenizer. Raises UnsupportedModelError for a model whose own code says them."""
        return facts(self.checkpoint)

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """How it takes part: trees, draft heads, early exit, batches (see `plan.support_matrix`)."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory, about."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one token."""
        return self.facts.kv_bytes(self.settings.dtype.itemsize)

    @cached_property
    def mtp_share(self) -> float:
        """The MTP layers that its checkpoint brings, by its own layers: about what they add to weights and KV cache."""
        return mtp_layer_count(self.checkpoint) / self.facts.config.layers

    def usual_kv_tokens(self, requests: int) -> int | None:
        """Tokens for which a KV cache has room that serves so many requests; None: that is not known before loading."""
        return self.settings.kv_tokens

    @abstractmethod
    def load(self, progress: Progress | None = None) -> Target:
        """The model in memory. progress: called with (bytes read, bytes in all). Raises the family of LoadError, and
        ParameterError for a setting that cannot be honoured."""


def describe(checkpoint: str | Path, settings: LoadSettings = DEFAULTS) -> Described:
    """A folder, a hub id, a GGUF file or "embedded", without its weights; of a hub id the small files are downloaded.

    Our own decoder runs what it can, llama.cpp the rest of GGUF files, transformers that of the others. Raises the
    family of LoadError, and ParameterError for a setting that cannot be honoured."""
    from slipstream.targets.decoder import DescribedDecoder

    checkpoint = checkpoint_of(checkpoint, settings.role)
    gguf = is_gguf(checkpoint)
    other = LLAMACPP if gguf else TRANSFORMERS  # runs what our own decoder does not
    if not gguf:
        settings.check_device_map()
        if kind := recognise(resolve(checkpoint, weights=False)):
            fix = f"give it to the target that it drafts for: slipstream bench -m TARGET --draft {checkpoint}"
            model = "a draft model" if settings.role == "draft" else "a model"
            raise ParameterError(f"{str(checkpoint)!r} is a draft head ({kind}), not {model}", fix=fix)
    if settings.role == "draft" and settings.executor == (TRANSFORMERS if gguf else LLAMACPP):
        settings = replace(settings, executor=AUTO)  # it was chosen for the target
    if gguf:
        settings.refuse(
            ("lora", "device_map", *(["executor"] if settings.executor == TRANSFORMERS else [])),
            "given with a GGUF file",
            "adapters are merged into checkpoints, and transformers runs those",
            "leave it out, or give the folder of the checkpoint that the file was made of",
        )
    elif settings.executor == LLAMACPP:
        raise ParameterError(
            f"executor={LLAMACPP!r} was asked for {str(checkpoint)!r}, which is no GGUF file",
            fix="write one with `slipstream convert`, or leave executor out",
        )
    if settings.device_map is not None:
        _check_places(settings.device_map)
        return _by_other(checkpoint, settings, "a device_map was given")
    if settings.executor == other:
        return _by_other(checkpoint, settings)
    try:
        return DescribedDecoder.of(checkpoint, settings)
    except UnsupportedModelError as refused:
        if settings.executor != AUTO and not (gguf and settings.role == "draft"):
            raise
        return _by_other(checkpoint, settings, f"{refused.what}: {refused.why}" if gguf else refused.what)


def _by_other(checkpoint: str | Path, settings: LoadSettings, refused: str | None = None) -> Described:
    """Run by llama.cpp or transformers, whose import takes long. refused: why our own decoder does not."""
    refusals = {} if refused is None else {"decoder": refused}
    if is_gguf(checkpoint):
        from slipstream.targets.gguf.gguf_target import DescribedGguf

        return DescribedGguf.of(checkpoint, settings, refusals)
    from slipstream.targets.huggingface.load_module import DescribedModule

    return DescribedModule.of(checkpoint, settings, refusals)


@dataclass(frozen=True)
class MemoryPlan:
    """What a target, its draft and a KV cache of a fixed size will take, from files that need no loading: bytes, about.

    weights    of the target. draft: weights of the draft model or head; 0 without one.
    per_token  KV cache of one token, that of the draft included.
    kv_tokens  tokens for which the KV cache has room, all requests together.
    available  memory that is free now, on the device of the target.
    """

    weights: int
    draft: int
    per_token: int
    kv_tokens: int
    available: int

    @property
    def kv(self) -> int:
        return self.per_token * self.kv_tokens

    @property
    def headroom(self) -> int:
        """What stays free; negative: it does not fit."""
        return self.available - self.weights - self.draft - self.kv

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest KV cache that leaves `RESERVE` of the memory free, in whole blocks."""
        room = (1 - RESERVE) * self.available - self.weights - self.draft
        return max(0, int(room / max(1, self.per_token)) // BLOCK * BLOCK)

    def check(self) -> None:
        """Raise LoadError if it does not fit."""
        if self.headroom < 0:
            most, cache = self.most_tokens, f"a KV cache for {self.kv_tokens} tokens"
            parts = {"weights": self.weights, "the draft's weights": self.draft, cache: self.kv}
            needed = ", ".join(f"{size(count)} for {what}" for what, count in parts.items() if count)
            raise LoadError(
                f"{size(self.available)} of memory are free, and {needed} are needed",
                fix=f"choose at most kv_tokens={most}" if most else "choose a smaller model, or quantize it",
            )


def plan(
    target: Described, kv_tokens: int, models: Seq[Described] = (), heads: Seq[str | Path] = (), mtp: bool = False
) -> MemoryPlan:
    """models: the draft models; heads: folders of draft heads; mtp: whether the target's MTP layers draft. Raises what
    reading their facts raises."""
    share = target.mtp_share if mtp else 0.0
    draft = round(share * target.weight_bytes) + sum(model.weight_bytes for model in models) + sum(map(_of_head, heads))
    per_token = round((1 + share) * target.kv_bytes) + sum(model.kv_bytes for model in models)
    return MemoryPlan(target.weight_bytes, draft, per_token, kv_tokens, available_bytes(target.settings.device))


def _of_head(head: str | Path) -> int:
    """Bytes of a draft head: its weights are computed in float32. Its one layer of KV is little."""
    folder = Path(head).expanduser()
    return 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def as_target(model: Any, progress: Progress | None = None, **settings: Any) -> Target:
    """A `Target` out of what `describe` takes, a loaded transformers model, or a `Target` itself. A warning says so
    where transformers runs what our own decoder does not.

    settings  fields of `LoadSettings`. progress: as in `Described.load`. Raises ParameterError for other objects, and
              for settings that are given with a `Target`: it is loaded already, and would ignore them.
    """
    return loaded(model, LoadSettings.of(settings, "as_target"), progress)


def loaded(model: Any, settings: LoadSettings, progress: Progress | None = None) -> Target:
    """See `as_target`."""
    if isinstance(model, Target):
        settings.refuse(
            tuple(settings.given),
            "given with a loaded target",
            "these settings take effect when a target is loaded; this one would ignore them",
            "give the path of the checkpoint, or load the target with them: Decoder.load(path, ...)",
        )
        return model
    if isinstance(model, (str, Path)):
        return describe(model, settings).load(progress)
    if not isinstance(model, torch.nn.Module):
        raise ParameterError(
            f"{model!r} is no model",
            fix="give a folder, a hub id, a GGUF file, 'embedded', a loaded transformers model or a Target",
        )
    return _of_module(model, settings)


def _check_places(device_map: Any) -> None:
    """Raise ParameterError for a device that is not there; transformers would fail while it loads."""
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if isinstance(place, int) and torch.accelerator.is_available():
            continue  # the number of an accelerator of any kind
        if place not in _WORDS:
            usable_device(f"cuda:{place}" if isinstance(place, int) else place, "device_map")


def _of_module(module: torch.nn.Module, settings: LoadSettings) -> Target:
    from slipstream.targets.decoder import Decoder
    from slipstream.targets.huggingface.load_module import around

    settings.refuse(
        ("lora", "device_map"),
        "given with a loaded model",
        "its weights stay as they are, and where they are",
        "give its folder, or merge by peft (merge_and_unload), or load it by from_pretrained(..., device_map=...)",
    )
    places = {str(weight.device) for weight in module.parameters()}
    if len(places) > 1 or "meta" in places:  # "meta": offloaded, and read when it is used
        if settings.device is not None:
            raise ParameterError(
                f"device is {str(settings.device)!r}, the loaded model is spread over several", fix="leave it out"
            )
        if settings.executor not in (AUTO, TRANSFORMERS):
            raise ParameterError(
                f"executor is {settings.executor!r}, the loaded model is spread over several devices",
                why="our own decoder runs on one",
                fix="leave it out: transformers runs it",
            )
        why = "the model is spread over several devices"
    else:
        here = next(module.parameters()).device
        wanted = here if settings.device is None else torch.device(settings.device)
        if wanted.type != here.type or wanted.index not in (None, here.index):
            raise ParameterError(
                f"device is {str(wanted)!r}, the loaded model is on {str(here)!r}", fix=f"model.to({str(wanted)!r})"
            )
        if settings.executor == TRANSFORMERS:
            return around(module, settings)
        try:
            return Decoder.of_module(module, settings)
        except LoadError as fault:  # another architecture, or modules that a tool has put into one of these
            if settings.executor != AUTO:
                raise
            why = fault.what
    target = around(module, settings)
    log.warning("%s: transformers runs it instead, slower", why)
    return target
