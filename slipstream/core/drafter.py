"""The contract of a drafter, and nothing else.

A drafter sees sequences, proposes a draft, and is shown what became of it. Whether it drafts by a model, a lookup or a
head is its own business: the step and the verification never ask.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut


@runtime_checkable
class Drafter(Protocol):
    name: str
    """Short name for tables, e.g. "model" or "ngram"."""
    taps: tuple[int, ...]
    """Target layers whose hidden states `observe` needs (see `TargetOut.hidden`)."""

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        """Draft tokens for each sequence, at most `budget[b]` deep; 0 asks for none.

        Whether to draft, and how far, may depend on everything except the draft token just drawn: dropping a sampled
        token because its own q was low biases the output. So does an exception that depends on it, because the step
        then goes on without the whole draft: after a fault, return what was drawn before.
        """
        ...

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Learn from a step. The sequences have already advanced by `verdict`."""
        ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        ...


@runtime_checkable
class CompositeDrafter(Drafter, Protocol):
    """A drafter that is made of others."""

    members: tuple[Drafter, ...]


@runtime_checkable
class PromptReader(Drafter, Protocol):
    """A drafter that reads prompts along with the target, chunk by chunk, so that no step has to read a long one."""

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """Each sequence has read a chunk: its KV now ends at `kv_len`, and more of its prompt is waiting. `out` has the
        hidden states of the chunks, and the logits after each, which are of no use."""
        ...


def read_prompts(drafter: Drafter, seqs: Seq[Sequence], out: TargetOut) -> None:
    """Show the chunks to the drafter, or to its members, if they read along."""
    if isinstance(drafter, PromptReader):
        drafter.read_prompts(seqs, out)
    elif isinstance(drafter, CompositeDrafter):
        for member in drafter.members:
            read_prompts(member, seqs, out)


@runtime_checkable
class PrefixDrafter(Drafter, Protocol):
    """A drafter with a KV cache of its own, which may keep what it computed for the beginning of a text. With it, a
    request whose target begins in the middle of a prompt drafts as well as one that read it all."""

    def cached_prefix(self, seq: Sequence) -> int:
        """After how many leading tokens of the sequence, read by the target for an earlier one, it could begin."""
        ...

    def begin(self, seq: Sequence, length: int) -> None:
        """The target begins the sequence after its first `length` tokens, at most `cached_prefix`."""
        ...

    def keep(self, seq: Sequence) -> None:
        """Keep what was computed for the sequence, for later ones."""
        ...


@runtime_checkable
class ChainDrafter(Drafter, Protocol):
    """A drafter that can tell that it drafts chains only, with its options: at most one draft token for each depth."""

    chains_only: bool


def parts(drafter: Drafter) -> list[Drafter]:
    """The drafter, or the drafters that it is made of, none of which is made of others."""
    if isinstance(drafter, CompositeDrafter):
        return [part for member in drafter.members for part in parts(member)]
    return [drafter]


@runtime_checkable
class RememberingDrafter(Drafter, Protocol):
    """A drafter that can keep something of one request for the next ones."""

    remembers: bool
    """Whether it does, with the options that it has."""


@runtime_checkable
class PredictionReader(Drafter, Protocol):
    """A drafter that copies from `Sequence.prediction`, too."""

    reads_predictions: bool


def reads_predictions(drafter: Drafter) -> bool:
    """Whether the drafter, or a member of it, copies from predictions."""
    return any(isinstance(part, PredictionReader) and part.reads_predictions for part in parts(drafter))


def remembers(drafter: Drafter) -> bool:
    """Whether the drafter, or a member of it, keeps something of one request for the next ones."""
    if isinstance(drafter, RememberingDrafter) and drafter.remembers:
        return True
    return isinstance(drafter, CompositeDrafter) and any(map(remembers, drafter.members))


class NoDrafter:
    """Drafts nothing: plain decoding, the baseline of every speed-up, through the same code as everything else.

    It learns nothing either, so it need not be asked, and the target may decode several steps in one call.
    """

    name = "none"
    taps: tuple[int, ...] = ()
    remembers = reads_all = False

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        return Draft.empty(len(seqs))

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def most_nodes(self, depth: int) -> int:
        """Most draft tokens that a draft of this depth has."""
        return 0

    def cached_prefix(self, seq: Sequence) -> int:
        """See `PrefixDrafter`."""
        return len(seq.tokens)

    def begin(self, seq: Sequence, length: int) -> None:
        pass

    def keep(self, seq: Sequence) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def drafts_nothing(drafter: Drafter) -> bool:
    """Whether it is known never to draft nor to learn. A subclass of `NoDrafter` may do either."""
    return type(drafter) is NoDrafter
