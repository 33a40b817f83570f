"""`Target`: the contract between a step and the large model.

Every target runs, commits and releases. It declares further abilities in `Capabilities`; no code probes for members.
Code that needs a capability reads it there. If it is None, `require` raises an error that names the target.
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
    maxima  id of the first maximum of each row of `logits`, if the target has found it.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    splits: Seq[int] = ()
    maxima: Seq[int] | None = None

    def part(self, first: int, last: int, draft: Draft) -> TargetOut:
        """Return the part for the sequences first..last-1 of the batch, without copies. `draft` is the draft of the
        run."""
        start, stop = draft.splits[first] + first, draft.splits[last] + last
        if not self.splits:
            return TargetOut(self.logits[start:stop])
        rows = self.splits[first : last + 1]
        hidden = {tap: states[rows[0] : rows[-1]] for tap, states in self.hidden.items()}
        return TargetOut(self.logits[start:stop], hidden, [row - rows[0] for row in rows])


@runtime_checkable
class Target(Protocol):
    """A model that scores a batch of drafts in one forward. It alone knows modules, masks, pages and kernels."""

    vocab_size: int
    """Width V of the logits."""
    context: int
    """Most tokens that a sequence may hold."""
    device: torch.device
    """Where logits and draft tokens live."""

    @property
    def capabilities(self) -> Capabilities:
        """Its abilities beyond this protocol, declared once, when it is loaded."""
        ...

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


# --- what a target may declare --------------------------------------------------------------------------------------


class MultiStep(Protocol[Rows]):
    """Decodes several tokens of each sequence in one call: no host code runs between the forwards. A target declares
    one for its sequences, an executor one for a `Batch`."""

    steps_per_call: int
    """Most steps of plain decoding that are worth one call; 1 where a single step is as fast."""
    has_states: bool
    """Whether a call returns hidden states, for `taps`."""

    def decode_steps(
        self, rows: Rows, /, steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None, taps: Seq[int] = ()
    ) -> DecodedSteps:
        """Decode `steps` tokens after each sequence, picked by `sampling` from the same logits that a run would return,
        bit for bit. KV is written for the pending tokens and for all new ones but the last.

        exit  run this many of the first layers only (see `EarlyExit`); then KV is written for the last new token, too.
        taps  whose hidden states are returned (see `Target.run`); then each sequence has one pending token.

        Raises TargetError where logits or hidden states are not finite.
        """
        ...


Fork = Callable[[int, int, int], None]
"""(parent id, child id, length): begins a sequence, between two runs, with the keys and values, or states, of the first
`length` tokens of another; both then go on by themselves. Raises TargetError if the parent does not hold so many, or if
the child holds any."""


class EarlyExit(Protocol):
    """Leaves a target after its first layers: final norm and output head are applied there (LayerSkip, Elhoushi et al.
    2404.16710)."""

    layers: int
    """Number of layers; exits are 1..layers-1."""

    def run_first_layers(self, seqs: Seq[Sequence], chains: Seq[Seq[int]], exit: int) -> Tensor:
        """Return logits [B, V] of the first `exit` layers, after each sequence's pending tokens and its chain of draft
        tokens. Each row is run once: later calls, and the `Target.run` that verifies it, use what the first one
        computed."""
        ...

    def run_layers(
        self, seqs: Seq[Sequence], draft: Draft, layers: tuple[int, int], hidden: Tensor | None = None
    ) -> TargetOut:
        """Run layers a..b-1 only, from `hidden` [M, d] if a > 0, and apply the head there. `TargetOut.hidden[b]` is
        what the next slice of the same sequences and draft starts from."""
        ...


@dataclass(frozen=True)
class Usage:
    """Blocks of a KV cache. capacity: None for one that grows; used: held by sequences; kept: only for later texts."""

    capacity: int | None
    used: int
    kept: int


class Memory(Protocol):
    """The KV cache of a model, in blocks that sequences may share (see `kv.kv_memory`), by the ids of sequences."""

    @property
    def block(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def capacity(self) -> int | None:
        """Blocks in all; None: as many as the machine's memory holds."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether requests may have to wait for room: for blocks, or for states of recurrent layers."""
        ...

    @property
    def usage(self) -> Usage:
        """Counts of its blocks, by holder."""
        ...

    def count_missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """Count the blocks that are missing to write slots start..stop-1 of each of these sequences (id, start, stop),
        or the states of recurrent layers that have no room; 0 if they fit."""
        ...

    def match(self, tokens: Seq[int]) -> int:
        """Count the leading tokens whose KV is kept from an earlier text."""
        ...

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        """Begin a sequence with the kept KV of at most its first `most` tokens; returns their number."""
        ...

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keep a sequence's KV for later texts. tokens: its tokens that have KV."""
        ...


@dataclass(frozen=True, eq=False)
class HeadHost:
    """Offers a draft head the target's sizes, hidden states (taps 0..layers and -1), and weights to borrow.

    hidden_size      width of the hidden states.
    layers           how many layers the target has.
    embedding        () -> [V, hidden_size], on the target's device.
    lm_head          () -> [V, hidden_size], the output head.
    tied             whether the embedding is the output head, too.
    dtype            of these weights.
    packed_tables    embedding and output head in the format of the backend that runs the target, for heads of the same
                     backend; None where it keeps none.
    module           the model of transformers that runs, whose checkpoint may bring MTP layers; None for another.
    family           `model_type` of its configuration.
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
    dtype     of the arithmetic.
    quantize  None, "int8", "w8a16" or "w8a8"; for a quantised checkpoint its method, e.g. "torchao".
    kv_dtype  of the KV cache.
    threads   CPU threads, None where the backend does not set them.
    checkpoint  its folder, None for a model from memory.
    rollback  most tokens of a text that can be rolled back, which a draft model needs; None: all. Recurrent layers
              keep the states of few tokens.
    weights_only  whether weights alone are quantised, and rows are computed in `dtype`.
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
    """Declares what a target can do beyond `Target`; None: it cannot. Nothing in it refers to the target, so that a
    target is freed with its last name.

    eos_ids        ids that end a text.
    trees          whether siblings can be run in one forward; False: chains only.
    multi_step     several tokens in one call.
    early_exit     drafting with its own first layers.
    max_pending    most pending tokens of a sequence in a call of these two; longer prompts are run by `Target.run`.
    head_host      hidden states and weights for draft heads.
    runtime        what runs it.
    memory         its KV cache in blocks; None: one that cannot be asked.
    fork           beginning a sequence with what was computed for another.
    torch_threads  most threads that torch should use beside it (see `host.torch_threads`); None: as many as it likes.
    experts        (experts per token, experts) of a mixture of experts; None for a dense model.
    relative_cost  number of rows -> expected cost of a pass in units of a pass with one row, by the weights that it
                   reads. It changes with what is learned. None: every pass reads the same weights.
    encoder        what reads the source of each text; None: texts continue their prompts.
    mask_token     id in whose places it predicts several tokens in one pass (PARD); None: it was not trained so.
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
    relative_cost: Callable[[int], float] | None = None
    encoder: Encoder | None = None
    mask_token: int | None = None


def start_sequence(target: Target, prompt: Seq[int], **more: Any) -> Sequence:
    """A text that continues a prompt, or that answers it as its source if the target has an encoder. more: fields of
    `Sequence`."""
    encoder = target.capabilities.encoder
    if encoder is None:
        return Sequence(list(prompt), **more)
    return SourcedSequence(list(encoder.start), source=tuple(prompt), **more)


def rewind(target: Target, seqs: Seq[Sequence]) -> None:
    """Prepare these texts for a step that is run again. A KV cache allows that; recurrent layers may have read on, so
    the texts are read again from their beginning."""
    runtime = target.capabilities.runtime
    if runtime is not None and runtime.rollback is not None:
        for seq in seqs:
            target.release(seq.id)
            seq.kv_len = 0


@contextmanager
def release_after(target: Target, *seqs: Sequence) -> Iterator[Sequence]:
    """The target releases these sequences after the block, of which the first is given."""
    try:
        yield seqs[0]
    finally:
        for seq in seqs:
            target.release(seq.id)


HEAD_HOST = "the hidden states and weights of the target"
EARLY_EXIT = "an early exit after some layers of the target"
"""How errors name capabilities; see `require`."""


def require(capability: T | None, target: Target, what: str, asked_by: str) -> T:
    """`capability`, or PairError where the target does not declare it.

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
