"""The contract of a drafter, and nothing else.

A drafter sees sequences, proposes a draft, and is shown what became of it. Whether it drafts by a model, a lookup or a
head is its own business: the step and the verification never ask. What it does beyond `Drafter` it declares in
`DrafterTraits`, as a target does in `Capabilities`; nobody probes for members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut


@dataclass(frozen=True)
class Budget:
    """Limits the draft for one sequence, and prices its tokens.

    depth      most draft tokens in a row; 0 asks for none.
    row_costs  the least acceptance probability with which draft token 1, 2, .. pays for its row; the last one counts
               for all further tokens. Empty: not measured, so the drafter's own options hold.
    draw_cost  what it costs to draw a further draft token, in the same unit.
    reached    probability that draft tokens before these are all accepted (see `Lookup.continue_from`).
    """

    depth: int
    row_costs: Seq[float] = ()
    draw_cost: float = 0.0
    reached: float = 1.0

    def row_cost(self, n: int) -> float:
        """Return the cost of the row of draft token `n`, counted from 0."""
        return self.row_costs[min(n, len(self.row_costs) - 1)]


@dataclass(frozen=True)
class DrafterTraits:
    """Declares what a drafter needs and does beyond `Drafter`.

    taps            target layers whose hidden states `observe` needs (see `TargetOut.hidden`).
    drafts          False: it never drafts or learns; the engine skips it.
    chains_only     it drafts at most one token for each depth.
    lookup          it finds its draft tokens in text: it is a `Lookup`.
    prices_rows     it ends a draft where a token is not worth its row (see `Budget`).
    reads_predictions  it copies from `Sequence.prediction`, too.
    remembers       it keeps something of one request for the next ones.
    reads_prompts   it is a `PromptReader`.
    keeps_prefixes  it is a `PrefixKeeper`.
    composite       it is a `CompositeDrafter`.
    predicted_lookups  its lookups draft only for requests with a prediction.
    longest         most draft tokens in a row that it can draft; None: any number.
    """

    taps: tuple[int, ...] = ()
    drafts: bool = True
    chains_only: bool = False
    lookup: bool = False
    prices_rows: bool = False
    reads_predictions: bool = False
    remembers: bool = False
    reads_prompts: bool = False
    keeps_prefixes: bool = False
    composite: bool = False
    predicted_lookups: bool = False
    longest: int | None = None

    @staticmethod
    def of_members(members: Iterable[Drafter]) -> DrafterTraits:
        """Return the traits of a composite drafter: the union of its members' needs."""
        traits = [member.traits for member in members]
        return DrafterTraits(
            taps=tuple(dict.fromkeys(tap for each in traits for tap in each.taps)),
            chains_only=all(each.chains_only for each in traits),
            prices_rows=all(each.prices_rows for each in traits),
            reads_predictions=any(each.reads_predictions for each in traits),
            remembers=any(each.remembers for each in traits),
            reads_prompts=any(each.reads_prompts for each in traits),
            composite=True,
        )


@runtime_checkable
class Drafter(Protocol):
    name: str
    """Short name for tables, e.g. "model" or "ngram"."""
    traits: DrafterTraits

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        """Draft tokens for each sequence, at most `budgets[b].depth` deep; 0 asks for none.

        Whether to draft, and how far, may depend on everything except the draft token just drawn: dropping a sampled
        token because its own q was low biases the output. So does an exception that depends on it, because the step
        then goes on without the whole draft: after a fault, return what was drawn before.
        """
        ...

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Learn from a step. The sequences have already advanced by `verdict`. Draft, out and verdict may go on with
        sequences that this drafter is not shown."""
        return

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        return


class Lookup(Drafter, Protocol):
    """A drafter that finds its draft tokens in text. It is cheap to ask and knows the length of its match."""

    def match_length(self, seq_id: int) -> int:
        """Length of the match of the sequence's last draft: how many of its last tokens occurred earlier."""
        ...

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> tuple[list[int], int]:
        """Draft tokens that follow the sequence *and* another drafter's tokens `drafted`, within the budget, and the
        length of their match."""
        ...


class PromptReader(Drafter, Protocol):
    """A drafter that reads prompts along with the target, chunk by chunk, so that no step has to read a long one."""

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """Each sequence has read a chunk: its KV now ends at `kv_len`, and more of its prompt is waiting. `out` has the
        hidden states of the chunks, and the logits after each, which are of no use."""
        ...


class PrefixKeeper(Drafter, Protocol):
    """A drafter with a KV cache of its own, which may keep its state for the beginning of a text. Then it drafts as
    well for a request whose target begins in the middle of a prompt as for one that read all of it. The defaults suit
    a drafter that needs nothing of the text before."""

    def match_prefix(self, seq: Sequence) -> int:
        """After how many leading tokens of the sequence, read by the target for an earlier one, it could begin."""
        return len(seq.tokens)

    def begin(self, seq: Sequence, length: int) -> None:
        """The target begins the sequence after its first `length` tokens, at most `match_prefix`."""
        return

    def keep(self, seq: Sequence) -> None:
        """Keep what was computed for the sequence, for later ones."""
        return


class CompositeDrafter(Drafter, Protocol):
    """A drafter that is made of others."""

    members: tuple[Drafter, ...]


def read_prompts(drafter: Drafter, seqs: Seq[Sequence], out: TargetOut) -> None:
    """Show chunks of prompts to the drafter, if it reads them."""
    if drafter.traits.reads_prompts:
        cast(PromptReader, drafter).read_prompts(seqs, out)


def parts(drafter: Drafter) -> list[Drafter]:
    """The drafter, or the drafters that it is made of, none of which is made of others."""
    if drafter.traits.composite:
        return [part for member in cast(CompositeDrafter, drafter).members for part in parts(member)]
    return [drafter]


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding, the baseline of every speed-up, through the same code as everything else."""

    name = "none"
    traits = DrafterTraits(drafts=False)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.empty(len(seqs))
