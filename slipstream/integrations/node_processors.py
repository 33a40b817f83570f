"""transformers' logits processors on every node of a draft, each with the history of that node.

A processor gets ids [n, L] and scores [n, V]. transformers calls it once a token, for the whole batch, with the padded
texts. A step verifies several tokens, so here it is called for the nodes of each depth, with the text that leads to
each node: the padded prompt, the output, and the draft tokens above it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Target, TargetOut
from slipstream.errors import ParameterError

_OF_SCORES = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor",
)  # fmt: skip
"""Processors of transformers that read the scores alone."""

_OF_HISTORY = (
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "PrefixConstrainedLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty", "SuppressTokensAtBeginLogitsProcessor",
)  # fmt: skip
"""Processors of transformers that are a function of one text and its scores."""


class NodeProcessors:
    """processors: as transformers prepared them; vocab_size: width V of the scores.

    Raises ParameterError, which names the processor, for one that is no function of one text and its scores."""

    def __init__(self, processors: Seq[Any], vocab_size: int):
        self._all = list(processors)
        self.of_scores = all(_is(one, _OF_SCORES) for one in self._all)
        for one in self._all:
            if not _is(one, _OF_SCORES + _OF_HISTORY):
                _check_stateless(one, vocab_size)

    def without_history(self) -> NodeProcessors:
        """Those that read the scores alone: for a draft model, whose distribution need not be the target's."""
        return NodeProcessors([one for one in self._all if _is(one, _OF_SCORES)], 0)

    def __call__(self, ids: Tensor, scores: Tensor, batch_id: int) -> Tensor:
        """ids [n, L], scores float32 [n, V] -> [n, V]. batch_id: which text of the batch this is."""
        for one in self._all:
            scores = _of_text(one, batch_id, len(ids))(ids, scores)
        return scores


class ProcessedTarget:
    """A `Target` whose logits are what processors make of those of `inner`, in float32, as in transformers.

    history   seq_id -> (which text of the batch it is, ids that precede its tokens: the padding).
    recorded  seq_id -> for each token that it gained, the row (logits, scores) that it was chosen by; None: not kept.
    """

    def __init__(self, inner: Target, processors: NodeProcessors):
        self.inner, self.processors = inner, processors
        self.vocab_size, self.context, self.device = inner.vocab_size, inner.context, inner.device
        self.history: dict[int, tuple[int, list[int]]] = {}
        self.recorded: dict[int, list[tuple[Tensor, Tensor]]] | None = None
        self._last: tuple[Draft, Tensor, Tensor] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, multi_step=None, fork=None)

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        out = self.inner.run(seqs, draft, taps)
        raw = out.logits.to(torch.float32, copy=True)  # [B + N, V]
        if self.processors.of_scores:
            scores = self.processors(torch.zeros(len(raw), 1, dtype=torch.int64, device=raw.device), raw.clone(), 0)
        else:
            scores = self._at_each_node(seqs, draft, raw)
        self._last = draft, raw, scores
        return replace(out, logits=scores)

    def _at_each_node(self, seqs: Seq[Sequence], draft: Draft, raw: Tensor) -> Tensor:
        scores = raw.clone()
        for b, seq in enumerate(seqs):
            batch_id, padding = self.history.get(seq.id, (0, []))
            text, start = [*padding, *seq.tokens[: seq.end]], draft.splits[b]
            root = start + b  # row of the last pending token; node i is i + 1 rows below
            levels: dict[int, list[int]] = {0: [-1]}
            for node in range(draft.splits[b + 1] - start):
                levels.setdefault(draft.depths[start + node], []).append(node)
            for nodes in levels.values():
                paths = [[draft.ids[start + i] for i in draft.ancestors(b, node)] for node in nodes]
                ids = torch.tensor([text + path for path in paths], device=raw.device)  # [n, L]
                rows = [root + 1 + node for node in nodes]
                scores[rows] = self.processors(ids, raw[rows], batch_id)
        return scores

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        if self.recorded is not None:
            assert self._last is not None
            draft, raw, scores = self._last
            for b, (seq, nodes) in enumerate(zip(seqs, path, strict=True)):
                for node in (-1, *nodes) if seq.chunk_end is None else ():
                    row = draft.splits[b] + b + 1 + node
                    self.recorded.setdefault(seq.id, []).append((raw[row], scores[row]))
        self.inner.commit(seqs, path)

    def release(self, seq_id: int) -> None:
        self.history.pop(seq_id, None)
        self.inner.release(seq_id)


def _is(processor: Any, names: Seq[str]) -> bool:
    kind = type(processor)
    return kind.__name__ in names and kind.__module__.startswith("transformers.")


def _of_text(one: Any, batch_id: int, rows: int) -> Any:
    """The processor for so many rows of one text, where it knows texts by their place in the batch."""
    if isinstance(one, transformers.PrefixConstrainedLogitsProcessor):
        allowed = one._prefix_allowed_tokens_fn
        return transformers.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(batch_id, ids), 1)
    if _is(one, ("RepetitionPenaltyLogitsProcessor",)) and isinstance(one.prompt_ignore_length, Tensor):
        made = copy.copy(one)
        made.prompt_ignore_length = one.prompt_ignore_length[batch_id : batch_id + 1].expand(rows)
        return made
    return one


def _check_stateless(processor: Any, vocab_size: int) -> None:
    """Raise ParameterError for a processor that changes when it is called, or answers differently the second time.
    A draft token that is rejected would leave its mark."""
    name = type(processor).__name__
    refused = ParameterError(
        f"the logits processor {name} has a state, or depends on more than one text and its scores",
        why="draft tokens that are rejected would change it, and with it the text",
        fix="leave it out, or generate without custom_generate",
    )
    if type(processor).__module__.startswith("transformers."):
        raise refused
    ids, scores = torch.zeros(1, 3, dtype=torch.int64), torch.linspace(-1, 1, vocab_size)[None]
    before = _state(processor)
    first = processor(ids, scores.clone())
    second = processor(ids, scores.clone())
    if _state(processor) != before or not torch.equal(first, second):
        raise refused


def _state(processor: Any) -> object:
    try:
        return pickle.dumps(vars(processor)) if hasattr(processor, "__dict__") else b""
    except Exception:  # what it holds cannot be stored: names and texts of its attributes are compared
        return sorted((name, repr(value)) for name, value in vars(processor).items())
