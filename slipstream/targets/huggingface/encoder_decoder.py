"""`EncoderDecoder`: an encoder-decoder of transformers (T5, BART, Marian, ...) as a `Target`.

A request's prompt is its source. The encoder reads it once, together with the sources of the requests that join in the
same step. What it made of it, and the keys and values of the cross-attention, stay with the request. The text begins
with the model's start token; its own keys and values are cropped after a rejection, as in `ChainsOnly`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Encoder, Runtime, TargetOut
from slipstream.core.torch_threads import all_threads
from slipstream.errors import TargetError, UnsupportedModelError
from slipstream.models.executor import check_ids
from slipstream.models.module_shape import ModuleShape, shape_of
from slipstream.targets.huggingface.activation_rounding import measured_limit, runtime_of
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.output_rules import OutputRules, ruled
from slipstream.targets.huggingface.rollback import RollbackCache
from slipstream.targets.huggingface.trials import (
    NOT_ROLLED_BACK,
    WITHOUT_SPECULATION,
    Limit,
    check_chains,
    fault_of,
    same,
)

MOST_ENCODED = 8192
"""Most tokens, padding included, of sources that are encoded together."""


@dataclass
class Source:
    """hidden [1, S, d]: what the encoder made of a source. cross: keys and values of the cross-attention, filled by the
    first pass of the decoder. rules: the processors of its text."""

    hidden: Tensor
    cross: DynamicCache
    rules: list[Any]


class EncoderDecoder(ChainsOnly):
    """rules: what the model forces and forbids in its texts; None: nothing.

    together  whether several sources are encoded in one pass, padded. False for models that then compute something
              else, such as mixtures of experts with a limited capacity.
    """

    def __init__(
        self,
        parts: ModuleParts,
        shape: ModuleShape,
        runtime: Runtime,
        encoder: Encoder,
        pad: int | None,
        chunk: int = 512,
    ):
        super().__init__(parts, shape, runtime, None, chunk)
        self.encoder, self.together = encoder, True
        self.rules: OutputRules | None = None
        self._reads: Any = parts.module.get_encoder()
        self._pad = pad
        self._output_type: Any = BaseModelOutput  # of the encoder; mixtures of experts have one of their own
        self._sources: dict[int, Source] = {}

    @property
    def capabilities(self) -> Capabilities:
        """See `Target`."""
        return replace(super().capabilities, encoder=self.encoder)

    @all_threads()
    @torch.inference_mode()
    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for a sequence without a source, and for a draft with siblings."""
        self._encode([seq for seq in seqs if seq.id not in self._sources])
        out = super().run(seqs, draft, taps)
        parts = []
        for b, seq in enumerate(seqs):
            first, last = draft.splits[b], draft.splits[b + 1]
            logits, rules = out.logits[first + b : last + b + 1], self._sources[seq.id].rules
            parts.append(ruled(rules, seq.tokens[: seq.end], draft.ids[first:last], logits) if rules else logits)
        return replace(out, logits=torch.cat(parts))

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self._sources.pop(seq_id, None)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `core.target.Fork`. Both read the same source. Raises TargetError for what `OutputRules.check_beams` does
        not let pass."""
        if self.rules is not None:
            self.rules.check_beams()
        super().fork(parent_id, child_id, length)
        self._sources[child_id] = self._sources[parent_id]

    def source(self, seq_id: int) -> Source:
        """What is kept of a sequence's source (for tests and tools). Raises TargetError for unknown ids."""
        if seq_id not in self._sources:
            raise TargetError(f"no source of sequence {seq_id} is kept", why="it was never run, or is released already")
        return self._sources[seq_id]

    # --- parts -------------------------------------------------------------------------------------------------

    def _encode(self, seqs: Seq[Sequence]) -> None:
        """Read the sources of sequences."""
        for seq in seqs:
            if not seq.source:
                raise TargetError(
                    f"sequence {seq.id} has no source",
                    why="an encoder-decoder answers one",
                    fix="see core.target.begun",
                )
            check_ids(torch.tensor(list(seq.source)), self.vocab_size)
        rules = [[] if self.rules is None else self.rules.of(seq) for seq in seqs]
        for group in self._groups([len(seq.source) for seq in seqs]):
            each = self.encoded([seqs[b].source for b in group])
            if len(group) > 1 and not all(bool(hidden.isfinite().all()) for hidden in each):
                # Padding that sees nothing in its window is NaN in some models, which spreads to what is beside it.
                each = [self.encoded([seqs[b].source])[0] for b in group]
            for b, hidden in zip(group, each, strict=True):
                self._sources[seqs[b].id] = Source(hidden, DynamicCache(), rules[b])

    def _groups(self, lengths: Seq[int]) -> Iterator[list[int]]:
        """Which sources are encoded together: those of similar length, so that little is padding."""
        group: list[int] = []
        for b in sorted(range(len(lengths)), key=lambda b: lengths[b]):
            if group and not (self.together and lengths[b] * (len(group) + 1) <= MOST_ENCODED):
                yield group
                group = []
            group.append(b)
        if group:
            yield group

    def encoded(self, sources: Seq[Seq[int]]) -> list[Tensor]:
        """The encoder's hidden states [1, S, d] of each source, from one pass."""
        longest = max(map(len, sources))
        pad = self._pad or 0
        ids = [[*source, *[pad] * (longest - len(source))] for source in sources]
        seen = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        given = torch.tensor(ids, device=self.device), torch.tensor(seen, device=self.device)  # [B, S] each
        out = self._reads(input_ids=given[0], attention_mask=given[1])
        hidden: Tensor = out.last_hidden_state
        self._output_type = type(out)
        return [hidden[b : b + 1, : len(source)].contiguous() for b, source in enumerate(sources)]

    def _inputs(self, seq: Sequence, held: RollbackCache, ids: Tensor) -> dict[str, Any]:
        source = self._sources[seq.id]
        return {
            "decoder_input_ids": ids,
            "encoder_outputs": self._output_type(last_hidden_state=source.hidden),
            self._cache_name: EncoderDecoderCache(held.cache, source.cross),
        }

    def _forward(
        self, seq: Sequence, held: RollbackCache, tokens: Seq[int], keep: int, taps: Seq[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `ChainsOnly`. A padding token ends a pass: some models (M2M100) number the positions after one otherwise
        than when they read the tokens one at a time."""
        ends = [i + 1 for i, token in enumerate(tokens) if token == self._pad and i + 1 < len(tokens)]
        if not ends:
            return super()._forward(seq, held, tokens, keep, taps)
        each = []
        for first, last in zip([0, *ends], [*ends, len(tokens)], strict=True):
            each.append(super()._forward(seq, held, tokens[first:last], last - first, taps))
        logits = torch.cat([logits for logits, _ in each])[-keep:]
        return logits, {tap: torch.cat([seen[tap] for _, seen in each]) for tap in taps}

    def _drop(self, seq_id: int) -> None:
        super()._drop(seq_id)
        self._sources[seq_id].cross = DynamicCache()


def of_encoder_decoder(module: Any, source: Path | None = None, chunk: int = 512) -> EncoderDecoder:
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
    own = _start_of(config, generation, name)
    ids = [token for token in range(width) if token != pad]
    texts = [[ids[(37 * i + 11 + 5 * b) % len(ids)] for i in range(7)] for b in (0, 1)]
    sources, text = [texts[0], texts[1][:5]], [*own, *texts[1]]
    truth = [_own_logits(module, parts, each, text) for each in sources]
    shape = shape_of(config, generation, truth[0].shape[-1])
    assert shape.source_context is not None
    limit = measured_limit(module, lambda output: _own_logits(module, parts, sources[0], output), text)
    runtime = runtime_of(module, limit, source)
    made = EncoderDecoder(parts, shape, runtime, Encoder(shape.source_context, own), pad, chunk)
    made.together = fault_of(_check_together, made, sources, limit) is None
    for each, wanted in zip(sources, truth, strict=True):
        why = fault_of(check_chains, made, text, wanted, limit, each)
        if why is not None:
            raise UnsupportedModelError(
                f"a {name} cannot be rolled back: {why}", why=NOT_ROLLED_BACK, fix=WITHOUT_SPECULATION
            )
    made.rules = OutputRules(generation, len(own), shape.eos_ids, parts.device)
    return made


def _check_together(target: EncoderDecoder, sources: Seq[Seq[int]], limit: Limit) -> None:
    with torch.inference_mode():
        alone = [target.encoded([source])[0] for source in sources]
        for hidden, wanted in zip(target.encoded(sources), alone, strict=True):
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
        found = getattr(place, key, None)
        if isinstance(found, int):
            return (found,)
        if found is not None:
            break
    raise UnsupportedModelError(
        f"a {name} does not say with which token its texts begin (decoder_start_token_id)",
        why="the decoder would begin with nothing",
        fix="set model.generation_config.decoder_start_token_id to one id",
    )


def _pad_of(config: Any, generation: Any) -> int | None:
    found = getattr(generation, "pad_token_id", None)
    found = getattr(config, "pad_token_id", None) if found is None else found
    return found if isinstance(found, int) and found >= 0 else None
