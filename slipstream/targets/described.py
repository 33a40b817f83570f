"""`Described`: how a model in files will be run, before its weights are read. `MemoryPlan`: the memory for the model
with its draft and a KV cache. `targets.describe` chooses the runner whose subclass describes a model."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.backends.table import backend, choose_for_head
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.config_values import object_of
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import ModelShape
from slipstream.checkpoints.recurrence import SNAPSHOTS
from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.checkpoints.weights import Progress
from slipstream.core.target import Runtime, Target
from slipstream.errors import CheckpointError, LoadError, SlipstreamError
from slipstream.heads.mtp_names import count_mtp_layers
from slipstream.host.machine import RESERVE, available_bytes
from slipstream.kv.blocks import BLOCK
from slipstream.settings import BACKENDS
from slipstream.targets.huggingface.kinds import Kind
from slipstream.templates.sizes import size
from slipstream.tokens.token_map import TokenMap, token_map

HeadFiles = tuple[str, Checkpoint, str | None]
"""A draft head: the name of its drafter, its checkpoint, and the drafter's option `quantize`."""

_UNREAD = re.compile(r".*(inv_freq|\.scale)$|verifier_|confidence_head|(d2t|t2d|token_map)$")
"""Names of tensors in heads that are not read, or that are small."""


@dataclass(frozen=True)
class Described(ABC):
    """How a model in files will be run, before its weights are read. Each runner has a subclass.

    checkpoint  the described checkpoint.
    settings  resolved settings: device and dtype are PyTorch objects.
    runner    name of a backend of our own decoder, or "transformers".
    refusals  for each runner that "auto" prefers: why that runner does not run the model. "decoder": our own decoder.
    """

    checkpoint: Checkpoint
    settings: LoadSettings
    runner: str
    refusals: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def config(self) -> ModelShape:
        """The model's sizes, for every runner. Raises UnsupportedModelError if only the model's own code tells them."""
        raise NotImplementedError  # not abstract: subclasses may implement it as a dataclass field

    @property
    def token_map(self) -> TokenMap | None:
        """The map from ids to tokens; None if the checkpoint has no tokenizer. Raises LoadError."""
        return token_map(self.checkpoint)

    @property
    def stored(self) -> Mapping[str, int] | None:
        """Bytes of the weight files by dtype; None for a hub id whose weights are not downloaded. Raises
        CheckpointError if files of a folder are missing or damaged."""
        try:
            return self.checkpoint.stored
        except CheckpointError:
            if self.checkpoint.is_local:
                raise
            return None

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """The abilities of this target: trees, draft heads, early exit, batches. `DrafterSpec.refusal` reads it."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Approximate bytes of the weights in memory."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one token."""
        return self.config.kv_bytes(self.settings.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in recurrent layers that our own kernels run."""
        return 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.config.eos_ids

    @cached_property
    def mtp_layers(self) -> int:
        """Number of MTP layers in the checkpoint that can draft for this target."""
        return count_mtp_layers(self.checkpoint, native=self.runner == "native")

    @property
    def mtp_bytes(self) -> tuple[int, int]:
        """(bytes of the MTP layers' weights, bytes of their KV cache of one token), by their share of layers."""
        share = self.mtp_layers / self.config.layers
        return round(share * self.weight_bytes), round(share * self.kv_bytes)

    @property
    def stored_as(self) -> str | None:
        """The format of the weights in memory if they are quantised, as in `Runtime.quantize`; otherwise None."""
        return None

    def usual_kv_tokens(self, requests: int) -> int | None:
        """Return the size, in tokens, of a KV cache for `requests` requests; None: not known before loading."""
        return self.settings.kv_tokens

    @abstractmethod
    def load(self, progress: Progress | None = None) -> Target:
        """Load the model. progress: called with (bytes read, bytes in all). Raises the family of LoadError, and
        ParameterError for a setting that is not supported."""


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates the bytes of a target, its draft and a KV cache of a fixed size, without loading weights.

    weights    bytes of the target's weights. draft: bytes of the draft model's or head's weights; 0 without a draft.
    per_token  bytes of the KV cache of one token, with the draft's.
    kv_tokens  number of tokens in the KV cache, all requests together.
    available  bytes of memory that are free now, on the device of the target.
    per_sequence  bytes of one sequence's recurrent states, with the draft model's. sequences: how many run at once.
    """

    weights: int
    draft: int
    per_token: int
    kv_tokens: int
    available: int
    per_sequence: int = 0
    sequences: int = 1

    @property
    def kv(self) -> int:
        return self.per_token * self.kv_tokens

    @property
    def states(self) -> int:
        return self.per_sequence * self.sequences

    @property
    def snapshots(self) -> int:
        """Upper bound of the bytes of recurrent states that are kept for later requests: the bytes of the KV cache."""
        return min(self.kv, SNAPSHOTS * self.per_sequence)

    @property
    def headroom(self) -> int:
        """Bytes that stay free; negative if the model does not fit."""
        return self.available - self.weights - self.draft - self.kv - self.states - self.snapshots

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest KV cache that leaves `RESERVE` of the memory free, in whole blocks."""
        room = (1 - RESERVE) * self.available - self.weights - self.draft - self.states
        room = max(room - SNAPSHOTS * self.per_sequence, room / 2) if self.per_sequence else room
        return max(0, int(room / max(1, self.per_token)) // BLOCK * BLOCK)

    def check(self) -> None:
        """Raise LoadError if the model does not fit into memory."""
        if self.headroom < 0:
            most, cache = self.most_tokens, f"a KV cache for {self.kv_tokens} tokens"
            many = "a sequence" if self.sequences == 1 else f"{self.sequences} sequences"
            states = f"the states of {many} ({size(self.per_sequence)} each)"
            parts = {"weights": self.weights, "the draft's weights": self.draft, cache: self.kv, states: self.states,
                     "states of earlier texts": self.snapshots}  # fmt: skip
            needed = ", ".join(f"{size(count)} for {what}" for what, count in parts.items() if count)
            raise LoadError(
                f"{size(self.available)} of memory are free, and {needed} are needed",
                fix=f"choose at most kv_tokens={most}" if most else "choose a smaller model, or quantize it",
            )


def plan(
    target: Described,
    kv_tokens: int,
    models: Seq[Described] = (),
    heads: Seq[HeadFiles] = (),
    mtp: bool = False,
    *,
    weights: bool = False,
    sequences: int = 1,
) -> MemoryPlan:
    """Make the memory plan. models: draft models; heads: draft heads; mtp: whether the target's MTP layers draft.
    weights: whether to download weights from the hub, because only the files tell their size. sequences: how many run
    at once. Raises the errors of reading these files."""
    for each in (target, *models) if weights else ():
        each.checkpoint.download()
    beside = [target.mtp_bytes] if mtp else []
    beside += [(model.weight_bytes, model.kv_bytes) for model in models] + [_of_head(target, *head) for head in heads]
    draft = sum(weights for weights, _ in beside)
    per_token = target.kv_bytes + sum(kv for _, kv in beside)
    states = sum(model.state_bytes for model in (target, *models))
    free = available_bytes(target.settings.device)
    return MemoryPlan(target.weight_bytes, draft, per_token, kv_tokens, free, states, sequences)


def _of_head(target: Described, kind: str, checkpoint: Checkpoint, quantize: str | None) -> tuple[int, int]:
    """Return (bytes of weights, bytes of the KV cache of one token) of a draft head, including copies that it reads of
    the target's tables; (0, 0) if the head cannot be read: loading will raise the error."""
    try:
        checkpoint.download()
        config, tensors = checkpoint.config, checkpoint.tensors
        layers = object_of(config, "transformer_layer_config") or config
        decoder = None if kind == "medusa" else DecoderConfig.from_dict({**layers, "model_type": "llama"})
    except SlipstreamError:
        return 0, 0
    on, runtime = target.settings, Runtime(target.runner, target.settings.dtype, target.stored_as)
    dtype = (backend(target.runner).load_dtype if target.runner in BACKENDS else None) or on.dtype
    chosen, settings, _ = choose_for_head(decoder, runtime, on.device, dtype, quantize)
    native, kinds = chosen.name == "native", {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    whole = per_weight = float(dtype.itemsize if not native else 2 if kinds <= {"F16", "BF16"} else 4)
    if native and (quantised := settings.weight_format or (QUANTISED["w8a8"] if "I8" in kinds and decoder else None)):
        per_weight = quantised.bytes_per_weight
    read = {name.removeprefix("model."): each.shape for name, each in tensors.items() if not _UNREAD.match(name)}
    total = sum(math.prod(shape) * (per_weight if len(shape) > 1 and "embed" not in name else whole)
                for name, shape in read.items())  # fmt: skip
    table, tied = target.config.vocab_size * target.config.hidden_size, target.config.tie_embeddings
    own_head = any("lm_head" in name for name in read) or kind == "eagle3"
    if not own_head and not (native and kind == "dflash"):
        total += table * per_weight
    if decoder and not native and "embed_tokens.weight" not in read and (own_head or not tied):
        total += table * whole
    return round(total), 0 if decoder is None else 2 * decoder.kv_width * (4 if native else dtype.itemsize)


def check_memory(
    target: Described | None, kv_tokens: int | None = None, models: Seq[Described] = (), *more: Any
) -> None:
    """Raise LoadError if a model and its drafts do not fit into memory. Arguments as in `plan`; target None: it is in
    memory. Downloads weights from the hub. For runners other than our own decoder, only a KV cache of a given size is
    checked. With several devices nothing is checked, because a plan knows only one."""
    if target is None:
        for model in models:
            check_memory(model)
    elif target.settings.device_map is None and (kv_tokens is not None or target.runner in BACKENDS):
        plan(target, kv_tokens or 0, models, *more, weights=True).check()
