"""The contract of an executor, which owns the weights and the KV cache of one decoder: it runs a `Batch` and returns an
`Output`. It knows nothing of drafters, sampling or rules. `make_batch` packs sequences and their drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.checkpoints.module_shape import ModelShape
from slipstream.core.draft import Draft, build_mask
from slipstream.core.sequence import Sequence
from slipstream.core.target import MultiStep, Runtime, Slice
from slipstream.errors import TargetError
from slipstream.kv.kv_memory import KVMemory


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of B sequences, packed; M tokens in all. A worked example with two sequences:

        sequence 7 has 3 tokens of KV and runs [a, b] plus a draft of two siblings x, y, children of b;
        sequence 9 is new and runs the prompt [p, q]

        tokens    = [a, b, x, y,  p, q]          seq_ids = [7, 9]
        positions = [3, 4, 5, 5,  0, 1]          past    = [3, 0]
        splits    = [0, 4, 6]                    trees   = [[[1,0,0,0],    None]
        select    = [1, 2, 3, 5]                             [1,1,0,0],
                    (rows whose logits are computed)         [1,1,1,0],
                                                             [1,1,0,1]],

    seq_ids    B keys of the KV cache.
    tokens     int64 [M], on the executor's device.
    positions  M host integers, rotary / learned positions. Siblings share a position.
    splits     B+1 host integers: sequence b owns rows splits[b]:splits[b+1].
    past       B host integers: KV slots of the sequence that are valid and visible to every new token. New token i of
               the sequence is written to slot past + i and overwrites the slot, so a smaller `past` rolls back.
    trees      for each sequence, None (causal among its new tokens) or bool [n, n]: row i sees column j. A row sees
               itself and its ancestors among the new tokens.
    select     host integers, rows of the batch whose logits are computed, increasing.
    certain    B host integers: number of leading rows of the sequence that are no draft tokens. They are never rolled
               back: `past` of the next pass includes them. Empty: unknown.
    """

    seq_ids: Seq[int]
    tokens: Tensor
    positions: Seq[int]
    splits: Seq[int]
    past: Seq[int]
    trees: Seq[Tensor | None]
    select: Seq[int]
    certain: Seq[int] = ()

    def cut(self, spans: Seq[range]) -> Batch:
        """Return the rows spans[b] of each sequence, counted within the sequence; sequences with an empty span are
        dropped. The rows before a span must be in the cache and visible to the whole span. `select` is empty."""
        left = [b for b, span in enumerate(spans) if span]
        rows = [self.splits[b] + i for b in left for i in spans[b]]
        splits = [0]
        trees: list[Tensor | None] = []
        for b in left:
            start, stop, tree = spans[b].start, spans[b].stop, self.trees[b]
            splits.append(splits[-1] + stop - start)
            trees.append(None if tree is None else tree[start:stop, start:stop])
        return Batch(
            seq_ids=[self.seq_ids[b] for b in left],
            tokens=self.tokens[rows],
            positions=[self.positions[i] for i in rows],
            splits=splits,
            past=[self.past[b] + spans[b].start for b in left],
            trees=trees,
            select=(),
        )


def make_batch(
    seqs: Seq[Sequence], draft: Draft, device: torch.device, starts: Seq[int] = (), stop: int | None = None
) -> Batch:
    """Pack the pending tokens of each sequence, then its nodes. Logits are computed for the last pending token and
    every node.

    Slots: the KV of token i of a sequence is in slot i, the KV of node j of the draft in slot len(tokens) + j. A node's
    position is the last pending token's plus the node's depth, so siblings share a position.

    starts  slot of the first token to run, if part of a long prompt has run already; by default `seq.kv_len`.
    stop    slot at which a chunk of a long prompt ends, before `end`.
    """
    ids, tokens, positions, past = list[int](), list[int](), list[int](), list[int]()
    splits, select = [0], list[int]()
    trees: list[Tensor | None] = []
    certain: list[int] = []
    for b, seq in enumerate(seqs):
        first, last = draft.splits[b], draft.splits[b + 1]
        start, end = starts[b] if starts else seq.kv_len, seq.end if stop is None else stop
        pending = end - start
        ids.append(seq.id)
        past.append(start)
        certain.append(pending)
        tokens += seq.tokens[start:end]
        if first == last or draft.is_chain:
            positions += range(start, end + last - first)
            trees.append(None)
        else:
            positions += range(start, end)
            positions += [end - 1 + depth for depth in draft.depths[first:last]]
            trees.append(build_mask(draft.parents[first:last], pending))
        if first != last:
            tokens += draft.ids[first:last]
        select += range(splits[-1] + pending - 1, splits[-1] + pending + last - first)
        splits.append(splits[-1] + pending + last - first)
    return Batch(
        seq_ids=ids,
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),  # [M]
        positions=positions,
        splits=splits,
        past=past,
        trees=trees,
        select=select,
        certain=certain,
    )


@dataclass(frozen=True, slots=True)
class Output:
    """logits [R, V] for the selected rows (float32, or float64 if the weights are). taps: tap -> [M, d] (tap i is the
    residual stream after i layers, 0 the embeddings, -1 after the final norm). hidden [M, d]: the residual stream after
    the last layer that ran. All tensors are valid until the next forward pass. finite: whether the executor knows that
    no hidden state behind the logits is infinite or NaN. maxima: id of the first maximum of each row of logits, if the
    executor has found it. experts_read: number of experts that the pass read, over all layers; 0 if unknown."""

    logits: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    finite: bool = False
    maxima: Seq[int] | None = None
    experts_read: int = 0


class Executor(Protocol):
    @property
    def config(self) -> ModelShape: ...

    device: torch.device
    kv_memory: KVMemory
    """The blocks of the KV cache."""
    runtime: Runtime
    """Describes how the decoder runs: backend, dtype, quantisation, threads. The decoder fills in `checkpoint`."""

    @property
    def slices(self) -> bool:
        """Return whether `forward` accepts `layers`."""
        ...

    @property
    def torch_threads(self) -> int | None:
        """Maximum number of torch threads while this executor runs (see `host.torch_threads`); None: no limit."""
        ...

    @property
    def multi_step(self) -> MultiStep[Batch] | None:
        """Return the executor itself if it can decode several tokens in one call; otherwise None."""
        ...

    @property
    def packed_tables(self) -> Any:
        """Embedding and output head in the backend's format, for heads of the same backend; None if it has none."""
        ...

    def forward(
        self, batch: Batch, taps: tuple[int, ...] = (), layers: Slice = None, hidden: Tensor | None = None
    ) -> Output:
        """Run one pass. `layers=(a, b)` runs only layers a..b-1: from the embeddings if a is 0, otherwise from `hidden`
        [M, d], the residual stream that an earlier slice of the same batch returned. Logits are computed by the final
        norm and head after layer b-1 (early exit, LayerSkip section 4.3). With an empty `batch.select`, only KV and
        `hidden` are computed.

        Raises TargetError if `past` is greater than the number of slots that a sequence holds, or if the KV cache is
        full; other sequences are unchanged."""
        ...

    def move(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> None:
        """Copy KV slots `src` of a sequence to `dst`, in every layer, to make an accepted branch contiguous. `dst[i] <=
        src[i]`, both increasing. Raises TargetError for slots that the sequence does not hold."""
        ...

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """Start sequence `child_id` with the first `length` KV slots of `parent_id`, as if the child had run the same
        tokens. Both share memory until one of them writes. Raises TargetError if the parent does not hold these slots,
        or if the child already holds any."""
        ...

    def release(self, seq_id: int) -> None:
        """Free the KV of a sequence, except blocks that it shares with others. Unknown ids are ignored."""
        ...

    def kv(self, seq_id: int, length: int) -> Tensor:
        """Return a copy of the first `length` slots, [L, 2, Hk, length, D], or [numbers, length] if layers differ in
        shape (for tests and tools). Raises TargetError for slots that the sequence does not hold."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes held: {"weights": ..., "kv": ...}."""
        ...


def check_ids(ids: Tensor, count: int, what: str = "token id") -> None:
    """Raise TargetError unless all `ids` [M] are rows of a table of `count` rows. Kernels of embeddings do not check
    this: on CUDA one invalid id ends the process. On CUDA this check waits for the ids."""
    if len(ids) and bool(((ids < 0) | (ids >= count)).any()):
        raise make_unknown_ids(f"a {what} is outside the model's embedding, which has {count} rows")


def make_unknown_ids(what: str) -> TargetError:
    return TargetError(
        what,
        why="target and draft model may have different vocabularies, or the prompt contains such an id",
        fix="compare the two models with `slipstream info TARGET DRAFT`, and check the ids of the prompt",
    )


def make_not_finite() -> TargetError:
    """Return the error for a call that would draw tokens from infinite or NaN hidden states."""
    return TargetError(
        "the draft model or head computed hidden states that are NaN or infinite",
        why="no draft token can be sampled from them",
        fix="check the weights of the draft model or head",
    )


def check_slice(config: ModelShape, first: int, last: int, taps: Seq[int]) -> None:
    """Raise TargetError unless the model has layers first..last-1 and the taps are within them."""
    if not 0 <= first < last <= config.layers:
        raise TargetError(f"layers {first}..{last - 1} were requested, but the model has {config.layers} layers")
    outside = [t for t in taps if t != -1 and not first <= t <= last]
    if outside:
        raise TargetError(f"taps {outside} are not among the layers {first}..{last - 1} that run")


def check_steps(steps: int, exit: int | None = None, layers: int = 0) -> None:
    """Raise TargetError for fewer than 1 step, or for an exit that is not one of 1..layers."""
    if steps < 1:
        raise TargetError(f"steps is {steps}, but must be at least 1")
    if exit is not None and not 1 <= exit <= layers:
        raise TargetError(f"an exit after {exit} layers was requested, but the model has {layers} layers")


def check_finite(logits: Tensor, seqs: Seq[Sequence], draft: Draft) -> None:
    """Raise TargetError if the logits after a sequence's last pending token are not finite. Logits after a node are not
    checked: plain decoding might never reach the node (see `core.step.decide`)."""
    # A state that overflowed makes its whole row NaN, so one column is enough (`warp` refuses a single logit that
    # is not finite). On CUDA this check would be a second synchronisation per step.
    rows = [draft.splits[b] + b for b in range(len(seqs))]
    if logits.device.type != "cpu" or all(map(math.isfinite, logits[rows, 0].tolist())):
        return
    bad = [seq.id for seq, row in zip(seqs, rows, strict=True) if not logits[row].isfinite().all()]
    raise TargetError(
        f"the target computed logits that are NaN or infinite for the sequences {bad}",
        why="no token can be sampled from them",
        fix="use dtype='float32' if the model overflows in float16, and check the weights",
    )
