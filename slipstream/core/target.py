"""`Target`: the contract between a step and the large model.

Every target implements `run`, `commit` and `release`. It declares further abilities in `Capabilities`; no code probes
for methods. Code that needs a capability reads it there. If it is None, `require` raises an error that names the
target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.encoder import Encoder
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.errors import PairError

T = TypeVar("T")
Rows = TypeVar("Rows", contravariant=True)
Slice = tuple[int, int] | None
"""(a, b): the layers a..b-1; None: all of them."""


@dataclass(frozen=True, slots=True)
class TargetOut:
    """Holds the result of one forward over a batch of B sequences and a draft of N nodes.

    logits  [B + N, V], packed: sequence b has its last pending token first, then its nodes, so node i of
            sequence b (-1 is the pending token) is row `draft.splits[b] + b + 1 + i`. Valid until the next run.
    hidden  tap -> [M, d], one row per token that was run (every pending token, then the nodes), packed by
            `splits`. Tap i is the residual stream after i layers (0: embeddings), tap -1 is after the final norm.
    splits  B+1 host integers: sequence b owns rows splits[b]:splits[b+1] of `hidden`.
    maxima  id of the first maximum of each row of `logits`, if the target computed it; else None.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    splits: Seq[int] = ()
    maxima: Seq[int] | None = None

    def part(self, first: int, last: int, draft: Draft) -> TargetOut:
        """Return the part for the sequences first..last-1 of the batch, without copies. draft: the draft of the run."""
        start, stop = draft.splits[first] + first, draft.splits[last] + last
        if not self.splits:
            return TargetOut(self.logits[start:stop])
        rows = self.splits[first : last + 1]
        hidden = {tap: states[rows[0] : rows[-1]] for tap, states in self.hidden.items()}
        return TargetOut(self.logits[start:stop], hidden, [row - rows[0] for row in rows])


@runtime_checkable
class Target(Protocol):
    """A model that scores a batch of drafts in one forward. Other code knows nothing of its masks, KV blocks and
    kernels."""

    vocab_size: int
    """Width V of the logits."""
    context: int
    """Largest number of tokens of a sequence."""
    device: torch.device
    """Device of logits and draft tokens."""

    @property
    def capabilities(self) -> Capabilities:
        """Its abilities beyond this protocol. They are declared once, when it is loaded."""
        ...

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """Run each sequence's pending tokens and draft nodes. Their KV is kept only by a following `commit`."""
        ...

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        """Keep the KV of every pending token and of the nodes in `path`; free the rest of the last run.

        Called before the sequences advance, so `seq.kv_len` is still the length before the run.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        ...


# --- what a target may declare --------------------------------------------------------------------------------------


class MultiStep(Protocol[Rows]):
    """Decodes several tokens of each sequence in one call, without host code between the forward passes. A target
    declares a `MultiStep` for its sequences, an executor one for a `Batch`."""

    steps_per_call: int
    """Largest number of plain decoding steps that one call should run; 1 if single steps are as fast."""
    has_states: bool
    """Whether a call returns hidden states, for `taps`."""

    def decode_steps(
        self, rows: Rows, /, steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None, taps: Seq[int] = ()
    ) -> DecodedSteps:
        """Decode `steps` tokens after each sequence. `sampling` picks them from the logits that a run would return, bit
        for bit. KV is written for the pending tokens and for all new tokens but the last.

        exit  run only this many of the first layers (see `EarlyExit`); KV is then written for the last new token, too.
        taps  hidden states to return (see `Target.run`); each sequence must then have one pending token.

        Raises TargetError where logits or hidden states are not finite.
        """
        ...


Fork = Callable[[int, int, int], None]
"""(parent id, child id, length): begins the child sequence, between two runs, with the KV and recurrent states of the
first `length` tokens of the parent. Afterwards they are independent. Raises TargetError if the parent holds fewer
tokens, or if the child holds any."""


class EarlyExit(Protocol):
    """Runs only a target's first layers, final norm and output head (LayerSkip, Elhoushi et al. 2404.16710)."""

    layers: int
    """Number of layers; exits are 1..layers-1."""

    def run_first_layers(self, seqs: Seq[Sequence], chains: Seq[Seq[int]], exit: int) -> Tensor:
        """Return logits [B, V] of the first `exit` layers, after each sequence's pending tokens and its chain of draft
        tokens. Each row is run once: later calls, and the `Target.run` that verifies the chain, reuse what the first
        call computed."""
        ...

    def run_layers(
        self, seqs: Seq[Sequence], draft: Draft, layers: tuple[int, int], hidden: Tensor | None = None
    ) -> TargetOut:
        """Run only layers a..b-1, from `hidden` [M, d] if a > 0, then apply the output head. `TargetOut.hidden[b]` is
        the input of the next layers, for the same sequences and draft."""
        ...


@dataclass(frozen=True)
class Usage:
    """Numbers of KV blocks. capacity: in all, None if the cache grows; used: held by sequences; kept: only in the
    prefix cache."""

    capacity: int | None
    used: int
    kept: int


class Memory(Protocol):
    """The KV cache of a model, in blocks that sequences, given by ids, may share (see `kv.kv_memory`)."""

    @property
    def block(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def capacity(self) -> int | None:
        """Number of blocks in all; None: as many as fit into the machine's memory."""
        ...

    @property
    def bounded(self) -> bool:
        """True if requests may have to wait for free blocks, or for free states of recurrent layers."""
        ...

    @property
    def usage(self) -> Usage:
        """Numbers of used and kept blocks."""
        ...

    def count_missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """Count the blocks that are missing to write slots start..stop-1 of each sequence (id, start, stop); 0 if they
        fit. States of recurrent layers for which there is no room count, too."""
        ...

    def match(self, tokens: Seq[int]) -> int:
        """Count the leading tokens whose KV is in the prefix cache."""
        ...

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        """Begin a sequence with the cached KV of at most its first `most` tokens; returns their number."""
        ...

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keep a sequence's KV in the prefix cache. tokens: the tokens of the sequence that have KV."""
        ...


@dataclass(frozen=True, eq=False)
class HeadHost:
    """Gives a draft head the target's sizes, hidden states (taps 0..layers and -1), and weights to share.

    hidden_size      width of the hidden states.
    layers           number of layers of the target.
    embedding        () -> [V, hidden_size], on the target's device.
    lm_head          () -> [V, hidden_size], the output head.
    tied             True if the output head has the weights of the embedding.
    dtype            dtype of these weights.
    packed_tables    embedding and output head in the format of the target's backend, for heads of the same backend;
                     None if the backend does not keep them.
    module           the transformers model that runs, whose checkpoint may have MTP layers; None for other targets.
    family           `model_type` in the model's config.json.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    context: int
    device: torch.device
    dtype: torch.dtype
    embedding: Callable[[], Tensor]
    lm_head: Callable[[], Tensor]
    tied: bool
    runtime: Runtime
    packed_tables: Any = None
    module: Any = None
    family: str = ""


@dataclass(frozen=True)
class Runtime:
    """Describes how the model runs, for banners, result files and heads that are to run the same way.

    backend   name of the backend, e.g. "native".
    dtype     dtype of the arithmetic.
    quantize  None, "int8", "w8a16" or "w8a8"; for a quantised checkpoint its method, e.g. "torchao".
    kv_dtype  dtype of the KV cache.
    threads   number of CPU threads; None if the backend does not set it.
    checkpoint  folder of the checkpoint; None for a model made in memory.
    rollback  how many of the last tokens can be rolled back, as a draft model must do; None: all. Recurrent layers keep
              the states of few tokens.
    weights_only  True if only the weights are quantised, and activations have `dtype`.
    """

    backend: str
    dtype: torch.dtype
    quantize: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    checkpoint: Path | None = None
    weights_only: bool = False
    rollback: int | None = None

    @property
    def weights(self) -> str:
        """The format of the weights, e.g. "float32", "w8a8" or "Q4_1"."""
        return self.quantize or str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Capabilities:
    """Declares what a target can do beyond `Target`; None: it cannot. No field refers to the target, so that a target
    is freed as soon as nothing else refers to it.

    eos_ids        ids that end a text.
    trees          whether siblings can be run in one forward; False: only chains can.
    multi_step     decodes several tokens in one call.
    early_exit     drafts with the target's own first layers.
    max_pending    largest number of pending tokens of a sequence in a call of `multi_step` or `early_exit`; longer
                   prompts are run by `Target.run`.
    head_host      hidden states and weights for draft heads.
    runtime        backend, dtypes and formats.
    memory         its KV cache in blocks; None: its cache is not in blocks.
    fork           begins a sequence with what was computed for another sequence.
    torch_threads  largest number of threads that torch should use at the same time (see `host.torch_threads`); None:
                   any.
    experts        (experts per token, experts) of a mixture of experts; None for a dense model.
    relative_cost  number of rows -> expected cost of a pass, divided by the cost of a pass with one row, from the
                   weights that it reads. The estimate changes as passes are observed. None: every pass reads the same
                   weights.
    encoder        reads the source of each sequence; None: the model has no encoder.
    mask_token     id of the mask token with which it predicts several tokens in one pass (PARD); None: it was not
                   trained to do that.
    """

    eos_ids: frozenset[int] = frozenset()
    trees: bool = True
    multi_step: MultiStep[Seq[Sequence]] | None = None
    early_exit: EarlyExit | None = None
    max_pending: int = 512
    head_host: HeadHost | None = None
    runtime: Runtime | None = None
    memory: Memory | None = None
    fork: Fork | None = None
    torch_threads: int | None = None
    experts: tuple[int, int] | None = None
    relative_cost: Callable[[float], float] | None = None
    encoder: Encoder | None = None
    mask_token: int | None = None


def start_sequence(target: Target, prompt: Seq[int], **more: Any) -> Sequence:
    """Return a sequence that continues `prompt`. If the target has an encoder, `prompt` is its source instead. more:
    fields of `Sequence`."""
    encoder = target.capabilities.encoder
    if encoder is None:
        return Sequence(list(prompt), **more)
    return SourcedSequence(list(encoder.start), source=tuple(prompt), **more)


def rewind(target: Target, seqs: Seq[Sequence]) -> None:
    """Prepare these sequences for running a step again. A KV cache needs no preparation. Recurrent layers may have read
    further tokens, so their sequences are read again from the beginning."""
    runtime = target.capabilities.runtime
    if runtime is not None and runtime.rollback is not None:
        for seq in seqs:
            target.release(seq.id)
            seq.kv_len = 0


@contextmanager
def release_after(target: Target, *seqs: Sequence) -> Iterator[Sequence]:
    """Context manager: the target releases these sequences at the end of the block. Yields the first sequence."""
    try:
        yield seqs[0]
    finally:
        for seq in seqs:
            target.release(seq.id)


HEAD_HOST = "the hidden states and weights of the target"
EARLY_EXIT = "an early exit after some layers of the target"
"""How errors name capabilities; see `require`."""


def require(capability: T | None, target: Target, what: str, asked_by: str) -> T:
    """Return `capability`. Raises PairError if it is None, because the target does not declare it.

    what      names the capability in the error, e.g. `HEAD_HOST`.
    asked_by  names who needs it, e.g. "drafter 'layerskip'".
    """
    if capability is None:
        raise PairError(
            f"{asked_by} needs {what}, which a target of the class {type(target).__name__} does not provide",
            why="a target declares in `capabilities` what it can do beyond a forward pass",
            fix="use another drafter, or load the target from its checkpoint with LLM or Decoder.load",
        )
    return capability
