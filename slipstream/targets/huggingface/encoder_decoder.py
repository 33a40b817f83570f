"""An encoder-decoder of transformers (T5, BART, Marian, ...) as a `Target`.

A request's prompt is its source, which the encoder reads once (`encoded_sources`). The text begins with the model's
start token. Its decoder runs like a decoder without an encoder: packed over our own KV blocks, with the cross-attention
of each sequence (`packed_cross`), or one sequence after another, each with a cache of transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from slipstream.core.draft import Draft
from slipstream.core.encoder import Encoder
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Runtime, TargetOut
from slipstream.errors import UnsupportedModelError
from slipstream.host.torch_threads import all_threads
from slipstream.models.executor import Batch
from slipstream.models.module_shape import ModuleShape, shape_of
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.activation_rounding import measured_limit, runtime_of
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.encoded_sources import EncodedSources
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.output_rules import OutputRules
from slipstream.targets.huggingface.packed_cross import CrossAttention, CrossCache, PackedPositions
from slipstream.targets.huggingface.packed_module import PackedModule
from slipstream.targets.huggingface.packed_pass import PackedError, PackedPass, Picked
from slipstream.targets.huggingface.rollback import RollbackCache, attends, new_cache
from slipstream.targets.huggingface.trials import (
    NOT_ROLLED_BACK,
    WITHOUT_SPECULATION,
    Limit,
    check_chains,
    check_packed,
    fault_of,
    refused_if_it_fails,
    same,
)

log = logging.getLogger("slipstream")


class PackedAnswers(PackedModule):
    """The decoder of an encoder-decoder as an `Executor`. sources: what its sequences answer."""

    def __init__(self, parts: ModuleParts, shape: ModuleShape, runtime: Runtime, sources: EncodedSources):
        super().__init__(parts, shape, runtime)
        self.sources = sources
        self._cross_cache = CrossCache(shape.layers)
        self._positions = PackedPositions(parts.decoder, sources.pad)

    def read(self, seqs: Seq[Sequence]) -> None:
        """See `EncodedSources.read`. Waits for a pass of another thread, in which the model has another attention."""
        with self._calls:
            self.sources.read(seqs)

    def _run(self, batch: Batch, layers: int, apart: bool = False, picked: Picked | None = None) -> Tensor:
        cross = CrossAttention([self.sources.of(seq_id) for seq_id in batch.seq_ids], self._cross_cache)
        try:
            logits = self._pass(batch, layers, apart, picked, cross)
            if cross.attended != layers:
                raise PackedError(f"{cross.attended} of {layers} layers used the cross-attention that was given")
        except BaseException:
            cross.forget()
            raise
        return logits

    def _inputs(self, one: PackedPass) -> dict[str, Any]:
        assert one.cross is not None
        given = {
            "decoder_input_ids": one.tokens[None],
            "decoder_attention_mask": torch.ones_like(one.tokens)[None],  # or some models count the cache's tokens
            "encoder_outputs": self.sources.output(one.cross.hidden),
            "past_key_values": EncoderDecoderCache(self._cache, self._cross_cache),
        }
        if "decoder_position_ids" in self._takes:
            given["decoder_position_ids"] = one.positions[None]
        return given

    @contextmanager
    def _attending(self) -> Iterator[None]:
        with super()._attending(), self._positions.given():
            yield


class PackedEncoderDecoder(Decoder):
    """A `Target` around `PackedAnswers`: rows of several sequences in one forward, trees."""

    def __init__(self, executor: PackedAnswers, encoder: Encoder, chunk: int = 512, source: Path | None = None):
        super().__init__(executor, chunk, source=source)
        self.encoder, self.sources, self._read = encoder, executor.sources, executor.read

    @property
    def capabilities(self) -> Capabilities:
        """See `Target`. What is kept of a text is no use to a text that answers another source, so the KV cache is not
        declared."""
        return replace(super().capabilities, encoder=self.encoder, fork=self.fork, memory=None)

    @all_threads()
    @torch.inference_mode()
    def run(
        self,
        seqs: Seq[Sequence],
        draft: Draft,
        taps: Seq[int] = (),
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> TargetOut:
        """See `Decoder.run`. Raises TargetError for a sequence without a source."""
        self._read(seqs)
        out = super().run(seqs, draft, taps, layers, hidden)
        return replace(out, logits=self.sources.ruled(seqs, draft, out.logits))

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self.sources.release(seq_id)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `core.target.Fork`. Both answer the same source. Raises TargetError for what `OutputRules.check_beams`
        does not let pass."""
        self.sources.check_beams()
        self.executor.fork(parent_id, child_id, length)
        self.sources.share(parent_id, child_id)


class ChainsEncoderDecoder(ChainsOnly):
    """For models whose decoder cannot be packed: one forward for each sequence, chains."""

    def __init__(
        self,
        parts: ModuleParts,
        shape: ModuleShape,
        runtime: Runtime,
        encoder: Encoder,
        sources: EncodedSources,
        chunk: int = 512,
    ):
        super().__init__(parts, shape, runtime, None, chunk)
        self.encoder, self.sources = encoder, sources

    @property
    def capabilities(self) -> Capabilities:
        """See `Target`."""
        return replace(super().capabilities, encoder=self.encoder)

    @all_threads()
    @torch.inference_mode()
    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for a sequence without a source, and for a draft with siblings."""
        self.sources.read(seqs)
        out = super().run(seqs, draft, taps)
        return replace(out, logits=self.sources.ruled(seqs, draft, out.logits))

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self.sources.release(seq_id)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `PackedEncoderDecoder.fork`."""
        self.sources.check_beams()
        super().fork(parent_id, child_id, length)
        self.sources.share(parent_id, child_id)

    # --- parts -------------------------------------------------------------------------------------------------

    def _inputs(self, seq: Sequence, cache: RollbackCache, ids: Tensor) -> dict[str, Any]:
        source = self.sources.of(seq.id)
        return {
            "decoder_input_ids": ids,
            "encoder_outputs": self.sources.output(source.hidden),
            self._cache_name: EncoderDecoderCache(cache.cache, source.cross),
        }

    def _forward(
        self, seq: Sequence, cache: RollbackCache, tokens: Seq[int], keep: int, taps: Seq[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `ChainsOnly`. A padding token ends a pass: some models (M2M100) number the positions after one otherwise
        than when they read the tokens one at a time."""
        pad = self.sources.pad
        ends = [i + 1 for i, token in enumerate(tokens) if token == pad and i + 1 < len(tokens)]
        if not ends:
            return super()._forward(seq, cache, tokens, keep, taps)
        each = []
        for first, last in zip([0, *ends], [*ends, len(tokens)], strict=True):
            each.append(super()._forward(seq, cache, tokens[first:last], last - first, taps))
        logits = torch.cat([logits for logits, _ in each])[-keep:]
        return logits, {tap: torch.cat([seen[tap] for _, seen in each]) for tap in taps}

    def _drop(self, seq_id: int) -> None:
        super()._drop(seq_id)
        self.sources.of(seq_id).cross = DynamicCache()


def of_encoder_decoder(module: Any, source: Path | None = None, chunk: int = 512) -> Decoder | ChainsOnly:
    """A target around an encoder-decoder of transformers in memory, which stays as it is.

    Raises UnsupportedModelError for one that reads something else than text, that cannot be rolled back, or whose
    generation configuration has what is not honoured."""
    name = type(module).__name__
    if module.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"a {name} reads {module.main_input_name}, not text", fix="use a model whose encoder reads token ids"
        )
    parts, config, generation = ModuleParts(module), module.config, module.generation_config
    width = int(parts.config.vocab_size)
    pad = _pad_of(config, generation)
    start = _start_of(config, generation, name)
    ids = [token for token in range(width) if token != pad]
    made_up = [[ids[(37 * i + 11 + 5 * b) % len(ids)] for i in range(7)] for b in (0, 1)]
    inputs, texts = [made_up[0], made_up[1][:5]], [[*start, *made_up[1]], [*start, *made_up[0]]]
    with refused_if_it_fails(module):
        truth = [_own_logits(module, parts, *pair) for pair in zip(inputs, texts, strict=True)]
        shape = shape_of(config, generation, truth[0].shape[-1])
        limit = measured_limit(module, lambda output: _own_logits(module, parts, inputs[0], output), texts[0])
    assert shape.source_context is not None
    runtime, encoder = runtime_of(module, limit, source), Encoder(shape.source_context, start)
    sources = EncodedSources(parts, shape.vocab_size, pad)
    sources.together = fault_of(_check_together, sources, inputs, limit) is None
    why = _unpacked(module, parts)
    if why is None:
        packed = PackedAnswers(parts, shape, runtime, sources)
        trial = PackedEncoderDecoder(packed, encoder)
        why = fault_of(check_packed, packed, texts, truth, limit, trial, inputs)
    target: PackedEncoderDecoder | ChainsEncoderDecoder
    if why is None:
        target = PackedEncoderDecoder(packed, encoder, chunk, source)
    else:
        log.info("%s is not packed (%s): each sequence is a forward of its own", name, why)
        target = ChainsEncoderDecoder(parts, shape, runtime, encoder, sources, chunk)
        for each, text, wanted in zip(inputs, texts, truth, strict=True):
            why = fault_of(check_chains, target, text, wanted, limit, each)
            if why is not None:
                raise UnsupportedModelError(
                    f"a {name} cannot be rolled back: {why}", why=NOT_ROLLED_BACK, fix=WITHOUT_SPECULATION
                )
    sources.rules = OutputRules(generation, len(start), shape.eos_ids, parts.device)
    return target


def _unpacked(module: Any, parts: ModuleParts) -> str | None:
    """Why its decoder is not even tried in packed passes; None if it is."""
    if not attends(new_cache(parts.cache_config)):
        return "its cache holds more than keys and values"
    if any(hasattr(part, "expert_capacity") for part in module.modules()):
        return "its experts take a limited number of tokens, of whichever sequence"
    return None


def _check_together(sources: EncodedSources, inputs: Seq[Seq[int]], limit: Limit) -> None:
    with torch.inference_mode():
        alone = [sources.encoded([each])[0] for each in inputs]
        for hidden, wanted in zip(sources.encoded(inputs), alone, strict=True):
            same(hidden[0], wanted[0], limit, "a pass over two sources")


def _own_logits(module: Any, parts: ModuleParts, source: Seq[int], text: Seq[int]) -> Tensor:
    """Logits [n, V] of the model's own forward."""
    ids, out = (torch.tensor([list(each)], device=parts.device) for each in (source, text))
    with torch.inference_mode():
        logits: Tensor = module(input_ids=ids, decoder_input_ids=out, use_cache=False).logits
    return logits[0].to(parts.device).double()


def _start_of(config: Any, generation: Any, name: str) -> tuple[int, ...]:
    """The ids that texts begin with, as transformers chooses them."""
    for place, key in (
        (generation, "decoder_start_token_id"), (config, "decoder_start_token_id"), (generation, "bos_token_id"),
        (config, "bos_token_id"),
    ):  # fmt: skip
        value = getattr(place, key, None)
        if isinstance(value, int):
            return (value,)
        if value is not None:
            break
    raise UnsupportedModelError(
        f"a {name} does not say with which token its texts begin (decoder_start_token_id)",
        why="the decoder would begin with nothing",
        fix="set model.generation_config.decoder_start_token_id to one id",
    )


def _pad_of(config: Any, generation: Any) -> int | None:
    value = getattr(generation, "pad_token_id", None)
    value = getattr(config, "pad_token_id", None) if value is None else value
    return value if isinstance(value, int) and value >= 0 else None
