"""`Drafter`: the contract of every drafter. `DrafterTraits`: the properties that a drafter declares.

A drafter sees sequences, proposes a draft, and is then shown which of its tokens were accepted. The step and the
verification do not depend on whether it drafts with a model, an n-gram lookup or a head. It declares abilities beyond
`Drafter` in `DrafterTraits`, as a target does in `Capabilities`; no code probes for methods.
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
    """Limits the draft for one sequence, and says what its tokens cost.

    depth      largest number of draft tokens in a row; 0: draft nothing.
    row_costs  cost of verifying draft token 1, 2, .., as the smallest acceptance probability with which it pays; the
               last value is for all further tokens. Empty: not measured, so the drafter's own options decide.
    draw_cost  cost of drawing one more draft token, in the same unit.
    reached    probability that all draft tokens before this draft are accepted (see `Lookup.continue_from`).
    """

    depth: int
    row_costs: Seq[float] = ()
    draw_cost: float = 0.0
    reached: float = 1.0

    def row_cost(self, n: int) -> float:
        """Return the cost of verifying draft token `n`, counted from 0."""
        return self.row_costs[min(n, len(self.row_costs) - 1)]


@dataclass(frozen=True)
class DrafterTraits:
    """Declares what a drafter needs and does beyond `Drafter`.

    taps            target layers whose hidden states `observe` needs (see `TargetOut.hidden`).
    drafts          False: it never drafts or learns, and the engine skips it.
    chains_only     its drafts are chains, never trees.
    lookup          it finds its draft tokens in text: it is a `Lookup`.
    prices_rows     it ends a draft before a token that costs more than it gains (see `Budget`).
    reads_predictions  it copies draft tokens from `Sequence.prediction`, too.
    remembers       it uses what it learned in one request in later requests.
    reads_prompts   it is a `PromptReader`.
    keeps_prefixes  it is a `PrefixKeeper`.
    composite       it is a `CompositeDrafter`.
    predicted_lookups  its n-gram lookups draft only for requests with a prediction.
    longest         largest number of draft tokens in a row that it can draft; None: any number.
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
        """Draft tokens for each sequence, at most `budgets[b].depth` deep; nothing if that is 0.

        Whether to draft, and how far, may depend on everything except the draft token just drawn: dropping a sampled
        token because its own q was low biases the output. An exception that depends on this token biases it, too,
        because the step then continues without the whole draft. So after an error, return the tokens drawn before it.
        """
        ...

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Learn from a step. The sequences have already advanced by `verdict`. Draft, out and verdict may have further
        sequences at their end, which this drafter is not shown."""
        return

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        return


class Lookup(Drafter, Protocol):
    """A drafter that finds its draft tokens in text. Drafting costs little, and it knows the length of its match."""

    def match_length(self, seq_id: int) -> int:
        """Return the length of the match of the sequence's last draft: how many of its last tokens occurred earlier."""
        ...

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> tuple[list[int], int]:
        """Return draft tokens that follow the sequence *and* another drafter's tokens `drafted`, within the budget, and
        the length of the match."""
        ...


class PromptReader(Drafter, Protocol):
    """A drafter that reads each prompt chunk by chunk, as the target does, so that no step reads a long one."""

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """Read a chunk of each sequence's prompt. The target has just read it: the KV now ends at `kv_len`, and more of
        the prompt is pending. `out` has the hidden states of the chunks, and logits that are not needed."""
        ...


class PrefixKeeper(Drafter, Protocol):
    """A drafter with its own KV cache, which may keep its state for the beginning of a prompt. It then drafts as well
    if the target takes this beginning from its prefix cache as if the target had read the whole prompt. The methods
    here are right for a drafter that needs nothing of the earlier tokens."""

    def match_prefix(self, seq: Sequence) -> int:
        """Return after how many leading tokens it could begin, if the target takes their KV from its prefix cache."""
        return len(seq.tokens)

    def begin(self, seq: Sequence, length: int) -> None:
        """Begin the sequence after its first `length` tokens, as the target does; at most `match_prefix`."""
        return

    def keep(self, seq: Sequence) -> None:
        """Keep the state computed for the sequence, for later requests."""
        return


class CompositeDrafter(Drafter, Protocol):
    """A drafter that combines several drafters."""

    members: tuple[Drafter, ...]


def read_prompts(drafter: Drafter, seqs: Seq[Sequence], out: TargetOut) -> None:
    """Show chunks of prompts to the drafter, if it is a `PromptReader`."""
    if drafter.traits.reads_prompts:
        cast(PromptReader, drafter).read_prompts(seqs, out)


def parts(drafter: Drafter) -> list[Drafter]:
    """Return the drafters that a drafter combines, at every level, or itself if it is not composite."""
    if drafter.traits.composite:
        return [part for member in cast(CompositeDrafter, drafter).members for part in parts(member)]
    return [drafter]


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding, which is the baseline of every speed-up and runs the same code as drafting."""

    name = "none"
    traits = DrafterTraits(drafts=False)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.empty(len(seqs))
