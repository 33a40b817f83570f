"""Combines several drafters in order of precedence.

A lookup costs microseconds and is accurate if the text repeats itself. A neural drafter (draft model or head) costs a
share of the target's step and is accurate on more kinds of text. So the lookup runs first. If its match is long, its
draft is used and the neural drafter does not run (SAM decoding, Hu et al. 2411.10666, section 3.3, also chooses by the
length of the match). Otherwise the neural draft is used, or the lookup's if the neural drafter proposes none.

After the last token of a neural chain, the lookup runs once more, with the chain as context: the model predicts the
start of a repeated passage, the lookup copies the rest. This saves time only if the whole chain is accepted, so it is
done only while this request's acceptance rate is high enough.

    ... the cat sat . a             model: the, cat       lookup after it, match of 2: sat, .

         the ── cat ── sat ── .     q of the last two: point masses

Every member observes every step with the draft that was verified, even if another member proposed it, and updates its
state from the emitted tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from slipstream.core.draft import Draft, Verdict, index_rows
from slipstream.core.drafter import Budget, Drafter, DrafterTraits, Lookup, read_prompts
from slipstream.core.params import Strict, integer, number, option
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.acceptance_stats import DepthStats, count_accepted
from slipstream.drafters.registry import make_drafter
from slipstream.errors import ParameterError
from slipstream.heads.mtp_names import count_mtp_layers
from slipstream.zoo import head_dir

HEAD_READS = 4
"""How many times longer the unread text may be for a head than for a draft model (see `max_prefill_ratio`)."""


@dataclass(frozen=True)
class HybridConfig(Strict):
    """min_match           a lookup with a match of at least this length overrides every drafter after it.
    neural              largest number of draft tokens in a path of a neural draft; a lookup may use the whole budget.
    append_tokens       largest number of lookup tokens after a neural chain, within the budget; 0: none.
    append_match        shortest match to append tokens from.
    append_probability  append tokens only if the whole chain is accepted with at least this probability, estimated from
                        this request's neural chains.
    max_prefill_ratio   skip a neural drafter for a request whose unread text is longer than this many times the
                        remaining output: prefilling the text would cost more than drafts save.
    """

    min_match: int = option(4, check=integer(1))
    neural: int = option(5, check=integer(1))
    append_tokens: int = option(6, check=integer(0))
    append_match: int = option(3, check=integer(1))
    append_probability: float = option(0.4, check=number(0.0, 1.0))
    max_prefill_ratio: float = option(4.0, check=number(0.0, float("inf")))


class HybridDrafter:
    """Combines drafters. members: drafters in order of precedence, usually lookups before one neural drafter. Of
    several neural drafters, the first that drafts anything is used; lookups after it are asked only if it drafts
    nothing. name: the members' names, as a user writes them. predicted: only the last member drafts for requests
    without a prediction, and the hybrid has the name of this member."""

    def __init__(
        self,
        members: Seq[Drafter],
        vocab_size: int,
        config: HybridConfig | None = None,
        device: torch.device | str = "cpu",
        predicted: bool = False,
    ):
        if not members:
            raise ParameterError("drafter 'hybrid' has no members", fix='give some, as in members=("suffix", "eagle3")')
        self.members, self.vocab_size, self.device = tuple(members), vocab_size, device
        self.name = members[-1].name if predicted else ",".join(member.name for member in members)
        self.config = config or HybridConfig()
        self.traits = replace(DrafterTraits.of_members(members), predicted_lookups=predicted)
        self._chain_stats: dict[int, DepthStats] = {}  # for each sequence that a neural member has read
        self._uncompared: dict[int, tuple[Draft, int]] = {}  # sequence id -> its neural chain: (draft, index in it)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        left = list(budgets)  # depth 0 once a sequence has its draft
        parts: list[DraftPart | None] = [None] * len(seqs)
        drawn = [0] * len(seqs)
        asked: list[Lookup] = []
        for member in self.members:
            if not any(each.depth for each in left):
                break
            is_lookup = member.traits.lookup
            deep = (self._lookup_depth if is_lookup else self._neural_depth)(seqs, [each.depth for each in left])
            if is_lookup and not any(deep):  # the usual case: no request has a prediction
                continue
            draft = member.propose(seqs, [replace(each, depth=d) for each, d in zip(left, deep, strict=True)])
            drawn = list(map(max, drawn, draft.drawn or drawn))
            if is_lookup:
                asked.append(cast(Lookup, member))
            for b, seq in enumerate(seqs):
                if not draft.nodes(b):
                    continue
                if not self._stacks(seq):
                    parts[b] = DraftPart(draft)
                elif not is_lookup:
                    parts[b] = DraftPart(draft, member.name, *self._continue_chain(seq, draft, b, budgets[b], asked))
                    left[b] = Budget(0)
                elif asked[-1].match_length(seq.id) >= self.config.min_match:
                    parts[b] = DraftPart(draft, member.name)
                    left[b] = Budget(0)
                elif parts[b] is None:  # used if no later member drafts
                    parts[b] = DraftPart(draft, member.name)
        return join_drafts(parts, self.vocab_size, self.device).with_drawn(drawn if any(drawn) else None)

    def _stacks(self, seq: Sequence) -> bool:
        """Return whether members before the last one draft for this sequence, too."""
        return bool(seq.prediction) or not self.traits.predicted_lookups

    def _lookup_depth(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[int]:
        return [d if self._stacks(seq) else 0 for seq, d in zip(seqs, depth, strict=True)]

    def _neural_depth(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[int]:
        deep = [min(d, self.config.neural) if self._stacks(seq) else d for seq, d in zip(seqs, depth, strict=True)]
        for b, seq in enumerate(seqs):
            if not self._stacks(seq):
                continue
            if seq.id not in self._chain_stats and self._is_long(seq):
                deep[b] = 0
            elif deep[b] and seq.id not in self._chain_stats:  # initial estimate: a chain of five is accepted with 0.44
                self._chain_stats[seq.id] = DepthStats(self.config.neural, prior=0.85, weight=4.0, fade=31 / 32)
        return deep

    def _is_long(self, seq: Sequence) -> bool:
        """Return whether reading this text would cost the neural drafter more than drafts save. A head is one layer, a
        draft model several: SmolLM2's draft model reads a text in a twelfth of the target's time."""
        ratio = self.config.max_prefill_ratio * (HEAD_READS if self.traits.taps else 1)
        return self._stacks(seq) and len(seq.tokens) > ratio * seq.room

    def _continue_chain(
        self, seq: Sequence, draft: Draft, b: int, budget: Budget, lookups: Seq[Lookup]
    ) -> tuple[list[int], str]:
        """Return the lookup tokens after the neural chain of sequence b, and the lookup's name; [] if no lookup has
        any, or if the draft is a tree."""
        chain = draft.ids[draft.splits[b] : draft.splits[b + 1]]
        depth = min(self.config.append_tokens, budget.depth - len(chain))
        if not chain or depth <= 0 or any(draft.depths[i] != n for n, i in enumerate(draft.nodes(b), start=1)):
            return [], ""
        self._uncompared[seq.id] = draft, b
        if self._chain_stats[seq.id].acceptance_by_depth(len(chain))[-1] < self.config.append_probability:
            return [], ""
        for lookup in lookups:
            more, match = lookup.continue_from(seq, chain, replace(budget, depth=depth))
            if more and match >= self.config.append_match:
                return more, lookup.name
        return [], ""

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            if seq.id in self._uncompared:
                self._chain_stats[seq.id].learn(*count_accepted(*self._uncompared.pop(seq.id), verdict.run(draft, b)))
        for member in self.members:
            member.observe(seqs, draft, out, verdict)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """Show prompts to the members (see `PromptReader`), except prompts that are too long for neural members."""
        short, whole = [b for b, seq in enumerate(seqs) if not self._is_long(seq)], Draft.empty(len(seqs))
        parts = [([seqs[b]], out.part(b, b + 1, whole)) for b in short]
        for some, chunks in [(seqs, out)] if len(short) == len(seqs) else parts:
            for member in self.members:
                read_prompts(member, some, chunks)

    def release(self, seq_id: int) -> None:
        self._chain_stats.pop(seq_id, None)
        self._uncompared.pop(seq_id, None)
        for member in self.members:
            member.release(seq_id)


@dataclass(frozen=True, eq=False)
class DraftPart:
    """Describes the draft of one sequence.

    draft  draft of the batch, which holds the nodes of this sequence.
    name   name of the drafter that proposed them; "": `draft` has the names, or none is needed.
    then   lookup tokens after the last node of a chain. by: name of the drafter that proposed these tokens.
    """

    draft: Draft
    name: str = ""
    then: Seq[int] = ()
    by: str = ""


def join_drafts(parts: Seq[DraftPart | None], vocab_size: int, device: torch.device | str = "cpu") -> Draft:
    """Join drafts of several drafters, each for some sequences of the batch, into one. None stands for an empty draft.

    Lookup tokens after a chain are point masses: they are deterministic given the chain, which may be sampled. The
    draft *after* a token may depend on it; only siblings must not depend on each other (see `core.rules`)."""
    drafts = {(id(part.draft), part.name): part for part in parts if part is not None}
    if not drafts:
        return Draft.empty(len(parts), device)
    only = next(iter(drafts.values()))
    if len(drafts) == 1 and not any(only.draft.nodes(b) if part is None else part.then for b, part in enumerate(parts)):
        return only.draft.with_name(only.name) if only.name else only.draft
    ids, parents, acceptable, by, splits = list[int](), list[int](), list[bool](), list[str](), [0]
    sampled: dict[int, tuple[Draft, list[int], list[int]]] = {}  # draft with q, its nodes, their places here
    for b, part in enumerate(parts):
        if part is not None:
            draft, nodes = part.draft, part.draft.nodes(b)
            if draft.q is not None:
                _, there, here = sampled.setdefault(id(draft), (draft, [], []))
                there += nodes
                here += range(len(ids), len(ids) + len(nodes))
            ids += [*(draft.ids[i] for i in nodes), *part.then]
            parents += [*(draft.parents[i] for i in nodes), *range(len(nodes) - 1, len(nodes) + len(part.then) - 1)]
            acceptable += [draft.acceptable is None or draft.acceptable[i] for i in nodes] + [True] * len(part.then)
            by += [part.name if draft.by is None else draft.by[i] for i in nodes] + [part.by] * len(part.then)
        splits.append(len(ids))
    q = None
    if sampled:
        q = torch.zeros(len(ids), vocab_size, dtype=torch.float64, device=device)  # [N, V]
        q[range(len(ids)), ids] = 1.0
        for draft, there, here in sampled.values():
            if there and draft.q is not None:
                q[index_rows(here)] = draft.q[index_rows(there)]
    return Draft.of(ids, parents, splits, q, None if all(acceptable) else acceptable, device, by if any(by) else None)


def with_predictions(drafter: Drafter, target: Target) -> Drafter:
    """Return a drafter that also copies from a request's predicted output: `drafter` itself if it reads predictions; a
    suffix tree instead of plain decoding; otherwise `drafter` after a suffix tree, which drafts for requests with a
    prediction only (a tree alone was slower than a draft model on short edits)."""
    if drafter.traits.reads_predictions:
        return drafter
    suffix = make_drafter("suffix", target)
    if not drafter.traits.drafts:
        return suffix
    return HybridDrafter((suffix, drafter), target.vocab_size, device=target.device, predicted=True)


def make(
    target: Target, *, members: Seq[Drafter] | None = None, model: Target | None = None, **options: Any
) -> HybridDrafter:
    """Make the drafter `hybrid`, as `registry` requires. options: as in `HybridConfig`. members: None: suffix lookup,
    then the draft `model`, else the EAGLE-3 head that ships for the target, else its MTP layers. `DraftPlan` turns
    names into members."""
    config = HybridConfig(**options)
    if members is None:
        members = _usual(target, model)
    elif model is not None:
        raise ParameterError("members and model were given together", fix="leave model out, or make it a member")
    for member in members:
        if not isinstance(member, Drafter):
            raise ParameterError(f"{member!r} is not a drafter", fix="give names to LLM: draft=['suffix', ...]")
    return HybridDrafter(members, target.vocab_size, config, target.device)


def _usual(target: Target, model: Target | None) -> list[Drafter]:
    suffix = make_drafter("suffix", target)
    if model is not None:
        return [suffix, make_drafter("model", target, model=model)]
    runtime = target.capabilities.runtime
    checkpoint = None if runtime is None else runtime.checkpoint
    try:
        head = head_dir("eagle3", checkpoint)
    except ParameterError:  # no head ships for this target
        if runtime is None or checkpoint is None or not count_mtp_layers(checkpoint, runtime.backend == "native"):
            return [suffix]
        return [suffix, make_drafter("mtp", target)]
    return [suffix, make_drafter("eagle3", target, head=head)]
