"""An encoder-decoder of transformers (T5, BART, Marian, ...) as a `Target`.

A request's prompt is its source, which the encoder reads once (`encoded_sources`). The output text begins with the
model's start token. The decoder runs like any other: packed over our own KV blocks, with the cross-attention of each
sequence (`packed_cross`), or one sequence after another, each with a cache of transformers.
"""

from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from slipstream.checkpoints.module_shape import ModuleShape
from slipstream.core.draft import Draft
from slipstream.core.encoder import Encoder
from slipstream.core.sequence import Sequence
from slipstream.core.target import Fork, Runtime, TargetOut
from slipstream.errors import UnsupportedModelError
from slipstream.executor.executor import Batch
from slipstream.host.torch_threads import all_threads
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.encoded_sources import EncodedSources
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.packed_cross import CrossAttention
from slipstream.targets.huggingface.packed_inputs import CrossCache, PackedPositions
from slipstream.targets.huggingface.packed_module import PackedModule
from slipstream.targets.huggingface.packed_pass import PackedPass
from slipstream.targets.huggingface.rollback import RollbackCache


class PackedAnswers(PackedModule):
    """The decoder of an encoder-decoder as an `Executor`. sources: the encoded sources of its sequences."""

    def __init__(self, parts: ModuleParts, shape: ModuleShape, runtime: Runtime, sources: EncodedSources, kind: str):
        super().__init__(parts, shape, runtime, kind)
        self._calls, self._sources = sources.calls, sources
        self._cross_cache = CrossCache(shape.layers)
        self._positions = PackedPositions(parts.decoder, sources.pad)

    def _cross(self, batch: Batch) -> CrossAttention:
        return CrossAttention([self._sources.of(seq_id) for seq_id in batch.seq_ids], self._cross_cache.layer_of)

    def _inputs(self, one: PackedPass) -> dict[str, object]:
        assert one.cross is not None
        given = {
            "decoder_input_ids": one.tokens[None],
            "decoder_attention_mask": torch.ones_like(one.tokens)[None],  # without it, models count cached tokens
            "encoder_outputs": self._sources.output(one.cross.hidden),
            self._cache_name: EncoderDecoderCache(self._cache, self._cross_cache),
        }
        if "decoder_position_ids" in self._takes:
            given["decoder_position_ids"] = one.positions[None]
        return given

    @contextmanager
    def _attend(self) -> Iterator[None]:
        with super()._attend(), self._positions.given():
            yield


class ChainsAnswers(ChainsOnly):
    """The decoder of an encoder-decoder that cannot be packed. sources: the encoded sources of its sequences; more:
    `chunk` and `one_by_one` of `ChainsOnly`."""

    def __init__(self, parts: ModuleParts, shape: ModuleShape, runtime: Runtime, sources: EncodedSources, **more: Any):
        super().__init__(parts, shape, runtime, **more)
        self._sources = sources

    def _inputs(self, seq: Sequence, cache: RollbackCache, ids: Tensor) -> dict[str, object]:
        source = self._sources.of(seq.id)
        return {
            "decoder_input_ids": ids,
            "encoder_outputs": self._sources.output(source.hidden),
            self._cache_name: EncoderDecoderCache(cache.cache, source.cross),
        }

    def _forward(
        self, seq: Sequence, cache: RollbackCache, tokens: Seq[int], keep: int, taps: Seq[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run as in `ChainsOnly`; texts with padding tokens run one token at a time, because some models (M2M100) would
        number the positions after a padding token differently."""
        if self._sources.pad in tokens[:-1]:
            return self._apart(seq, cache, tokens, keep, taps)
        return super()._forward(seq, cache, tokens, keep, taps)


class EncoderDecoder:
    """An encoder-decoder. runner: its decoder, in `PackedAnswers` or `ChainsAnswers`. sources: the encoded sources."""

    def __init__(self, runner: Decoder | ChainsOnly, encoder: Encoder, sources: EncodedSources):
        self.runner, self.encoder, self.sources = runner, encoder, sources
        self.vocab_size, self.context, self.device = runner.vocab_size, runner.context, runner.device
        can = runner.capabilities
        assert can.fork is not None
        # `memory` is not declared: cached KV would only help sequences with the same source.
        self.capabilities = replace(can, encoder=encoder, fork=partial(fork_answer, can.fork, sources), memory=None)

    @all_threads()
    @torch.inference_mode()
    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """Run as `Target.run`. Raises TargetError for a sequence without a source."""
        self.sources.read(seqs)
        try:
            out = self.runner.run(seqs, draft, taps)
        except BaseException:  # perhaps only some layers have written keys of new sources
            for seq in seqs:
                self.sources.of(seq.id).cross = DynamicCache()
            raise
        return replace(out, logits=self.sources.apply_rules(seqs, draft, out.logits))

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        self.runner.commit(seqs, path)

    def release(self, seq_id: int) -> None:
        self.runner.release(seq_id)
        self.sources.release(seq_id)


def fork_answer(fork: Fork, sources: EncodedSources, parent_id: int, child_id: int, length: int) -> None:
    """Fork a text as `core.target.Fork`; the child answers the same source. Raises TargetError for rules that beams do
    not allow (`OutputRules.check_beams`)."""
    if sources.rules is not None:
        sources.rules.check_beams()
    fork(parent_id, child_id, length)
    sources.share(parent_id, child_id)


def start_of(module: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids that texts begin with, as transformers chooses them. Raises UnsupportedModelError for a model that
    does not read text, or that names no such id."""
    name, config, generation = type(module).__name__, module.config, module.generation_config
    if module.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"the input of a {name} is {module.main_input_name}, not text",
            fix="use a model whose encoder reads token ids",
        )
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
        f"the {name} has no decoder_start_token_id, the token with which the decoder begins",
        why="the decoder needs at least one token to begin with",
        fix="set model.generation_config.decoder_start_token_id to one id",
    )


def pad_of(module: PreTrainedModel) -> int | None:
    value = getattr(module.generation_config, "pad_token_id", None)
    value = getattr(module.config, "pad_token_id", None) if value is None else value
    return value if isinstance(value, int) and value >= 0 else None
