"""What can be a target: the contract between the step and whatever runs the large model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TargetOut:
    """What one forward over a batch of B sequences and a draft of N nodes returned.

    logits  [B + N, V], packed: sequence b has its last pending token first, then its nodes, so node i of
            sequence b (-1 is the pending token) is row `draft.splits[b] + b + 1 + i`. Valid until the next run.
    hidden  tap -> [M, d], one row per token that was run (every pending token, then the nodes), packed by
            `splits`. Tap i is the residual stream after i layers (0: embeddings), tap -1 is after the final norm.
    splits  B+1 host integers: sequence b owns rows splits[b]:splits[b+1] of `hidden`.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    splits: Seq[int] = ()


@runtime_checkable
class Target(Protocol):
    """A model that scores a forest of guesses in one forward. Alone knows modules, masks, pages, kernels.

    One whose forwards are not torch's may have `host_threads`, the most threads that torch should then use beside it
    (see `core.threads`).

    One that runs several steps of plain decoding faster in one call than one by one may have `plain_steps`, the most
    that are worth a call, and `chains(seqs, steps) -> Drawn`: `steps` tokens of each sequence, each the first maximum
    of the same logits that `run` would return, bit for bit. It writes the KV of the pending tokens and of all new ones
    but the last, and raises TargetError where something was not finite (see `core.plain`).
    """

    vocab_size: int
    """Width V of the logits."""
    context: int
    """Most tokens that a sequence may hold."""
    device: torch.device
    """Where logits and draft tokens live."""

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """Run each sequence's pending tokens and its nodes; nothing is kept until `commit`."""
        ...

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        """Keep the KV of every pending token and of the nodes in `path`; free the rest of the last run.

        Called before the sequences advance, so `seq.kv_len` is still the length before the run.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        ...
