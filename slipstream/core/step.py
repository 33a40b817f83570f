"""One step of speculative decoding: the loop around which the project is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType

import torch

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft, Verdict, index_rows
from slipstream.core.drafter import Budget, Drafter, read_prompts
from slipstream.core.rules import RULES, Rule, follow, verify
from slipstream.core.sequence import Sequence
from slipstream.core.stats import PHASES, TokenLogprob
from slipstream.core.stop import stop
from slipstream.core.target import Target, TargetOut
from slipstream.core.warp import distributions, distributions_and_dead_ends, find_allowed, first_maxima, list_histories
from slipstream.errors import TargetError
from slipstream.host.torch_threads import host_threads


def step(
    seqs: Seq[Sequence],
    target: Target,
    drafter: Drafter,
    rule: Rule,
    budgets: int | Seq[Budget],
    prompts: Seq[Sequence] = (),
    reading: int | None = None,
) -> tuple[Draft, Verdict]:
    """Advance every sequence by one step: at least one token each, at most its draft tokens + 1. Return the draft that
    was verified, and the verdict.

    Plain decoding is this function with a drafter that drafts nothing, and prefill is its first call: the prompt
    is pending and nothing is drafted.

    budgets  limits for the draft of each sequence; a number is the largest draft length of every sequence (see
             `budget`). If there are fewer budgets than sequences, the drafter is not shown the last sequences.
    prompts  sequences that read a chunk of their prompt (see `Sequence.chunk_end`) in the same forward. They draft
             nothing and gain no token.
    reading  the drafter is shown this many of `prompts`, from the first on; None: all.
    """
    if isinstance(budgets, int):
        budgets = [budget(seq, budgets) for seq in seqs]
    shown, read = seqs[: len(budgets)], prompts[:reading]
    with host_threads(target.capabilities.torch_threads), StepClock([*seqs, *prompts]) as clock:
        with clock("draft"):
            draft = drafter.propose(shown, budgets)
            draft = prune(shown, draft).pad(len(seqs) - len(shown))
        with clock("target"):
            whole = draft.pad(len(prompts))
            out = target.run([*seqs, *prompts], whole, drafter.traits.taps)
        with clock("verify"):
            verdict = decide(seqs, draft, out.logits[: len(seqs) + len(draft)], rule, out.maxima)
            verdict = stop(seqs, draft, verdict)
        with clock("target"):
            target.commit([*seqs, *prompts], verdict.path + [[]] * len(prompts))
        record(seqs, draft, out, verdict)
        for seq in prompts:
            seq.read_chunk()
        with clock("draft"):
            if shown:
                drafter.observe(shown, draft, out, verdict)
            if read:
                read_prompts(drafter, read, out.part(len(seqs), len(seqs) + len(read), whole))
    return draft, verdict


def budget(seq: Sequence, draft_tokens: int) -> Budget:
    """Return the budget of a sequence. Its depth is at most the number of tokens that may still be emitted, less the
    last token, which needs no draft. It is 0 for the first token of an output. Otherwise drafts, and the text that a
    seed gives, would depend on whether the prompt was read in chunks or came from the prefix cache."""
    if seq.unread > 1 or len(seq.tokens) == seq.prompt:
        return Budget(0)
    return Budget(max(0, min(limit_depth(seq, draft_tokens), seq.room - 1)))


def limit_depth(seq: Sequence, draft_tokens: int) -> int:
    """Return the largest number of draft tokens that both the engine and the request allow."""
    return draft_tokens if seq.params.draft_tokens is None else min(draft_tokens, seq.params.draft_tokens)


def prune(seqs: Seq[Sequence], draft: Draft) -> Draft:
    """Return the draft without the point masses that the sequences' constraints forbid, and without the nodes below
    them.

    Only tokens that were chosen deterministically are removed. Removing a token that was drawn from q because it is
    forbidden would bias the output: with p = (.5, .5, 0) and q = (.6, .2, .2) the texts would have (.6, .4, 0). Such a
    token stays in the draft, verification rejects it (p is 0), and the next token is drawn from norm((p - q)+). A tree
    with nodes that may not be accepted is not changed, because its drafter finds them by their indices.
    """
    if not len(draft) or all(seq.constraint is None for seq in seqs):
        return draft
    kept: list[int] = []  # packed nodes
    parents: list[int] = []
    splits = [0]
    for b, seq in enumerate(seqs):
        place = {-1: -1}  # node -> its new index in the sequence
        nodes = draft.nodes(b)
        whole = draft.acceptable is not None and not all(draft.acceptable[i] for i in nodes)
        allowed = find_allowed(seq, list_histories(seq, draft, b)) if nodes and not whole else None
        for i in nodes:
            parent = draft.parents[i]
            forbidden = allowed is not None and not allowed[parent + 1, draft.ids[i]]
            if parent in place and not (forbidden and _certain(draft, i)):
                place[i - draft.splits[b]] = len(kept) - splits[-1]
                kept.append(i)
                parents.append(place[parent])
        splits.append(len(kept))
    return draft if len(kept) == len(draft) else draft.only(kept, parents, splits)


def _certain(draft: Draft, i: int) -> bool:
    """Return whether packed node i was chosen deterministically: removing it then depends on no random draw."""
    return draft.q is None or float(draft.q[i, draft.ids[i]]) == 1.0


def decide(
    seqs: Seq[Sequence], draft: Draft, logits: torch.Tensor, rule: Rule, maxima: Seq[int] | None = None
) -> Verdict:
    """Return the verdict of each sequence under its own rule, or under `rule` if it has none. Sequences of the same
    `_kind` are decided together; each has the verdict that it would have alone. maxima: see `TargetOut`."""
    kinds = [_kind(seq, rule) for seq in seqs]
    if len(set(kinds)) < 2:
        return _decide(seqs, draft, logits, rule if not seqs else seqs[0].rule or rule, maxima)
    parts = []
    for kind in dict.fromkeys(kinds):
        members = [b for b, other in enumerate(kinds) if other == kind]
        rows = [row for b in members for row in range(draft.splits[b] + b, draft.splits[b + 1] + b + 1)]
        some = [seqs[b] for b in members]
        parts.append((members, _decide(some, draft.part(members), logits[index_rows(rows)], some[0].rule or rule)))
    return Verdict.join(parts)


def _kind(seq: Sequence, rule: Rule) -> tuple[str, bool]:
    """Return the rule's name, and whether only the argmax counts. Sequences with equal kinds are decided together."""
    applied = seq.rule or rule
    return applied.name, seq.params.argmax_only


def _decide(
    seqs: Seq[Sequence], draft: Draft, logits: torch.Tensor, rule: Rule, maxima: Seq[int] | None = None
) -> Verdict:
    """Return the verdict of `verify` under the rule, but compute it at less cost where possible. At temperature 0 the
    distribution is a point mass, so every rule accepts exactly the draft tokens that equal the target's argmax. If also
    nothing edits the logits, the distribution is not computed. Nodes after which no token is possible are dead ends."""
    if not seqs:
        return Verdict([], [], [], [])
    try:
        if all(seq.params.argmax_only for seq in seqs):
            return follow(draft, first_maxima(logits) if maxima is None else maxima)
        probs, dead = distributions(logits, seqs, draft), set[int]()
    except TargetError:  # some row has none; plain decoding might not reach it
        probs, dead = distributions_and_dead_ends(logits, seqs, draft)
    if all(seq.params.greedy for seq in seqs):
        rule = RULES["greedy"]
    verdict = verify(draft, probs, rule, dice(seqs, draft))
    return end_at(verdict, draft, dead) if dead else verdict


def end_at(verdict: Verdict, draft: Draft, dead: set[int]) -> Verdict:
    """Cut the verdict of each sequence at its first accepted dead end, which becomes its next token. A dead end is a
    node after which no token is possible. It may be accepted: rejecting a drawn token because of what follows it would
    bias the output. The next step then fails, as in plain decoding. dead: packed rows of the dead ends."""
    path, following, cut = list(verdict.path), list(verdict.next), list(verdict.cut)
    for b in range(draft.batch):
        for n, node in enumerate(path[b]):
            if draft.splits[b] + b + 1 + node in dead:
                path[b], following[b], cut[b] = path[b][:n], draft.ids[draft.splits[b] + node], True
                break
    return Verdict(path, following, verdict.finish, cut)


def dice(seqs: Seq[Sequence], draft: Draft) -> Dice:
    counts = [len(draft.nodes(b)) for b in range(len(seqs))]
    return Dice([seq.random for seq in seqs], [len(seq.tokens) for seq in seqs], counts)


def record(seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
    """Append the tokens of the verdict to every sequence, and count them."""
    for b, seq in enumerate(seqs):
        if seq.params.logprobs is not None:
            rows = [draft.splits[b] + b + 1 + node for node in (-1, *verdict.path[b])]
            seq.logprobs += logprobs(out.logits[rows], verdict.run(draft, b), seq.params.logprobs)
        seq.advance(verdict, draft, b)


def logprobs(logits: torch.Tensor, run: Seq[int], top: int) -> list[TokenLogprob]:
    """Compute log-probabilities of the tokens `run` under the target's own logits [len(run), V]. Each comes with the
    `top` most likely tokens, except tokens of probability 0."""
    logs = torch.log_softmax(logits.double(), -1)
    best = logs.topk(min(top, logs.shape[-1]), -1)
    return [
        TokenLogprob(token, float(row[token]), tuple((i, v) for i, v in zip(ids, values, strict=True) if v > -math.inf))
        for token, row, ids, values in zip(run, logs, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


class StepClock:
    """Times the phases of a step (see `SpecStats.seconds`), and at the end divides the time among the sequences:

        with StepClock(seqs) as clock:
            with clock("draft"):
                draft = drafter.propose(seqs, budgets)

    Time that belongs to no other phase counts as "host". A step that raises is not counted.
    """

    def __init__(self, seqs: Seq[Sequence]):
        self._seqs = seqs
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += perf_counter() - began

    def __enter__(self) -> StepClock:
        self._began = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.seconds["host"] = perf_counter() - self._began - sum(self.seconds.values())
            for seq in self._seqs:
                seq.stats.add_seconds(self.seconds, len(self._seqs))
