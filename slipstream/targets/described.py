"""`Described`: what is known of a model before its weights are read. Each runner has one of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.core.target import Target
from slipstream.models.facts import ModelFacts, facts
from slipstream.models.load_settings import LoadSettings
from slipstream.models.weights import Progress
from slipstream.targets.huggingface.kinds import Kind


@dataclass(frozen=True)
class Described(ABC):
    """A model in files, and how it will be run.

    source    folder, hub id or GGUF file.
    settings  resolved: device and dtype are those of PyTorch.
    runner    what runs it: a backend of our own decoder, "transformers" or "llamacpp".
    refusals  why the runners that "auto" prefers do not run it.
    """

    source: str | Path
    settings: LoadSettings
    runner: str
    refusals: tuple[str, ...] = ()

    @cached_property
    def facts(self) -> ModelFacts:
        """Shape, sizes and tokenizer. Raises UnsupportedModelError for a model whose own code says them."""
        return facts(self.source)

    @property
    def vocab_size(self) -> int:
        return self.facts.config.vocab_size

    @property
    def context(self) -> int:
        return self.facts.config.context

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.facts.config.eos_ids

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

    def usual_kv_tokens(self, requests: int) -> int | None:
        """Tokens for which a KV cache has room that serves so many requests; None: that is not known before loading."""
        return self.settings.kv_tokens

    @abstractmethod
    def load(self, progress: Progress | None = None) -> Target:
        """The model in memory. progress: called with (bytes read, bytes in all). Raises the family of LoadError, and
        ParameterError for a setting that cannot be honoured."""
