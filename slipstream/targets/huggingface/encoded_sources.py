"""`EncodedSources`: keeps the encoder outputs of a transformers model for the sources of running texts.

The encoder reads a source once, together with other sources that join in the same step. The encoder's hidden states and
the keys and values of the cross-attention are kept until the request ends.
"""

import threading
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.cache_utils import DynamicCache

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence, source_of
from slipstream.errors import TargetError
from slipstream.executor.executor import check_ids
from slipstream.host.torch_threads import all_threads
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.output_rules import OutputRules

MOST_ENCODED = 8192
"""Largest number of tokens, padding included, of sources that are encoded together."""


@dataclass(eq=False)
class Source:
    """hidden [1, S, d]: the encoder's output for a source. cross: keys and values of the cross-attention, filled by the
    decoder's first pass. rules: the logits processors of the request's text."""

    hidden: Tensor
    cross: DynamicCache
    rules: list[LogitsProcessor]


class EncodedSources:
    """Sources of running texts. parts: the model; vocab_size: number of ids of a source; pad: the model's padding id.

    together  whether several sources are encoded in one padded pass. False for models whose results it would change,
              such as mixtures of experts with a limited capacity.
    rules     tokens that the model forces and forbids in its texts; None: none.
    calls     lock that is held while the encoder runs, because a packed pass of the decoder replaces the attention.
    """

    def __init__(self, parts: ModuleParts, vocab_size: int, pad: int | None):
        self.parts, self.vocab_size, self.pad = parts, vocab_size, pad
        self.together = True
        self.rules: OutputRules | None = None
        self.calls = threading.RLock()
        self._encoder: Any = parts.module.get_encoder()
        self._output_type: Any = None  # class of the encoder's output; it differs between models
        self._sources: dict[int, Source] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def of(self, seq_id: int) -> Source:
        """Return a sequence's source. Raises TargetError for unknown ids."""
        if seq_id not in self._sources:
            raise TargetError(f"sequence {seq_id} has no encoded source", why="it has not run, or was released")
        return self._sources[seq_id]

    @all_threads()
    @torch.inference_mode()
    def read(self, seqs: Seq[Sequence]) -> None:
        """Encode the sources of sequences that are not encoded yet. Raises TargetError if a sequence has no source."""
        seqs = [seq for seq in seqs if seq.id not in self._sources]
        for seq in seqs:
            if not source_of(seq):
                raise TargetError(
                    f"sequence {seq.id} has no source",
                    why="an encoder-decoder needs a source text",
                    fix="make sequences with core.target.start_sequence",
                )
            check_ids(torch.tensor(list(source_of(seq))), self.vocab_size)
        rules = [[] if self.rules is None else self.rules.of(seq) for seq in seqs]
        for group in self._groups([len(source_of(seq)) for seq in seqs]):
            each = self.encode([source_of(seqs[b]) for b in group])
            if len(group) > 1 and not all(bool(hidden.isfinite().all()) for hidden in each):
                # In some models, padding that sees nothing in its window becomes NaN, which spreads to other rows.
                each = [self.encode([source_of(seqs[b])])[0] for b in group]
            for b, hidden in zip(group, each, strict=True):
                self._sources[seqs[b].id] = Source(hidden, DynamicCache(), rules[b])

    def encode(self, sources: Seq[Seq[int]]) -> list[Tensor]:
        """Return the encoder's hidden states [1, S, d] of each source, from one pass."""
        longest, device = max(map(len, sources)), self.parts.device
        ids = [[*source, *[self.pad or 0] * (longest - len(source))] for source in sources]
        seen = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        given = torch.tensor(ids, device=device), torch.tensor(seen, device=device)  # [B, S] each
        with self.calls:
            out = self._encoder(input_ids=given[0], attention_mask=given[1])
        self._output_type = type(out)
        return [out.last_hidden_state[b : b + 1, : len(source)].contiguous() for b, source in enumerate(sources)]

    def output(self, hidden: Tensor) -> Any:
        """Wrap hidden states [1, S, d] as the model's decoder takes them from its encoder."""
        return self._output_type(last_hidden_state=hidden)

    def apply_rules(self, seqs: Seq[Sequence], draft: Draft, logits: Tensor) -> Tensor:
        """Apply the rules of each text to the logits [B + N, V], each row with the text that leads to it."""
        if not any(self.of(seq.id).rules for seq in seqs):
            return logits
        rows = []
        for b, seq in enumerate(seqs):
            text, first, last = seq.tokens[: seq.end], draft.splits[b], draft.splits[b + 1]
            for node in range(-1, last - first):
                row, path = logits[first + b + 1 + node, None], draft.ancestors(b, node)  # [1, V]
                ids = torch.tensor([[*text, *(draft.ids[first + i] for i in path)]], device=logits.device)
                for rule in self.of(seq.id).rules:
                    row = rule(ids, row)
                rows.append(row)
        return torch.cat(rows).to(logits.dtype)

    def share(self, parent_id: int, child_id: int) -> None:
        """Let a forked text share its parent's source."""
        self._sources[child_id] = self.of(parent_id)

    def release(self, seq_id: int) -> None:
        self._sources.pop(seq_id, None)

    def _groups(self, lengths: Seq[int]) -> Iterator[list[int]]:
        """Group sources of similar length to encode them together with little padding."""
        group: list[int] = []
        for b in sorted(range(len(lengths)), key=lambda b: lengths[b]):
            if group and not (self.together and lengths[b] * (len(group) + 1) <= MOST_ENCODED):
                yield group
                group = []
            group.append(b)
        if group:
            yield group
