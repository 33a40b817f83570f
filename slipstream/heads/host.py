"""What a target lends to a draft head: its sizes, its embedding and its output head."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.backends.table import Backend, Wish, backend
from slipstream.core.target import Target
from slipstream.errors import PairError
from slipstream.models.config import DecoderConfig
from slipstream.models.pair_check import PADDING
from slipstream.settings import BACKENDS, QUANTISATIONS, one_of

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Host:
    """hidden_size: width of the hidden states; layers: how many, so taps 0..layers and -1 exist; vocab_size: width of
    the logits; dtype, device: of the weights; executor: name of what runs the target; embedding_record: its embedding
    as the native backend keeps it (`SharedEmbedding`), None elsewhere; threads: of the executor, if it sets them."""

    hidden_size: int
    layers: int
    vocab_size: int
    context: int
    dtype: torch.dtype
    device: torch.device
    executor: str
    source: Path | None
    weights: Any
    embedding_record: Any = None
    threads: int | None = None

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output head, too."""
        return bool(self.weights.head == "embed_tokens.weight")

    def embedding(self) -> Tensor:
        """[V, hidden_size]"""
        return self.weights["embed_tokens.weight"].to(self.device)  # type: ignore[no-any-return]

    def lm_head(self) -> Tensor:
        """[V, hidden_size]"""
        return self.weights[self.weights.head].to(self.device)  # type: ignore[no-any-return]


def host_of(target: Target) -> Host:
    """What `target` can lend. Raises PairError if it lends nothing: a head reads hidden states and borrows weights."""
    config, weights = getattr(target, "config", None), getattr(target, "weights", None)
    lacking = [name for name, value in (("config", config), ("weights", weights)) if value is None]
    lacking += [n for n in ("hidden_size", "layers") if config is not None and not hasattr(config, n)]
    if lacking:
        raise PairError(
            f"the target {type(target).__name__} offers no {' and no '.join(lacking)}",
            why="a draft head reads the target's hidden states and borrows its embedding and output head",
            fix="run the target with Decoder, or use a drafter without a head",
        )
    assert config is not None
    assert weights is not None
    executor = getattr(target, "executor", None)
    return Host(
        hidden_size=config.hidden_size,
        layers=config.layers,
        vocab_size=target.vocab_size,
        context=target.context,
        dtype=getattr(weights, "dtype", torch.float32),
        device=target.device,
        executor=getattr(executor, "name", ""),
        source=getattr(target, "source", None),
        weights=weights,
        embedding_record=getattr(executor, "embedding", None),
        threads=getattr(executor, "threads", None),
    )


def backend_for(decoder: DecoderConfig | None, host: Host, quantize: str | None = None) -> Backend:
    """The backend that runs the target, if it can run a head with layers like this `decoder`'s (None: a head without
    such layers); else torch. quantize: None, "int8", "w8a16" or "w8a8"."""
    if quantize is not None:
        one_of("quantize", quantize, QUANTISATIONS)
    found = backend(host.executor if host.executor in BACKENDS else "torch")
    why = None if decoder is None else found.refusal(decoder, Wish(host.device, host.dtype, quantize, role="draft"))
    if why is None:
        return found
    log.warning("the %s backend cannot run this head (%s): torch runs it instead, slower", found.name, why)
    return backend("torch")


def same_vocabulary(host: Host, vocab_size: int, kind: str) -> None:
    """Raise PairError unless a head made for `vocab_size` ids can belong to this target. Outputs are padded to round
    numbers, so sizes that differ by less than `PADDING` pass; a head brings no tokenizer that would tell more."""
    narrow, wide = sorted((host.vocab_size, vocab_size))
    if wide - narrow > PADDING * wide:
        raise PairError(
            f"the {kind} head was made for a vocabulary of {vocab_size} ids, the target has {host.vocab_size}",
            why="guesses are token ids: that is too far apart to be padding, so they would stand for other tokens",
            fix="take a head that was trained for this target",
        )
