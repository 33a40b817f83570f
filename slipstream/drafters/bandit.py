"""Chooses a drafter and a draft length for each request, online.

Every step it picks the option with the highest expected tokens per second. Drafting k tokens yields 1 + S(1) + ... +
S(k) expected tokens, where S(j) is the probability that the first j draft tokens are accepted. The time is that of
drafting k tokens and verifying the rows. Plain decoding is one of the options: 1 token per decode step. S is estimated
from the acceptance rates observed in this request (`DepthStats`); one step of a drafter informs all its draft lengths.
Costs are measured once, when the drafter is created.

Lookup drafters are asked every step, because drafting is almost free. Their drafts are compared with the emitted text
whether they were verified or not, so there is nothing to explore; statistics are kept by length of match. A lookup
draft is cut at the depth with the highest expected tokens per second.

A draft model or head can only be observed in steps in which it runs. It starts with the acceptance rate `prior`. While
it is not chosen, it is retried with exponential back-off: after 2, 4, 8, ... idle steps. (The idle time is not doubled
if the retry gained time unexpectedly.) So n steps spend about log2(n) retries on it, and a change of the text is
noticed. With one member, the bandit switches that drafter on and off and sets its draft length.

The choice depends on the costs, the tokens so far and past steps, never on the token just drawn, so the output
distribution is the target's. At temperature 0, and under the rule `coupled`, the text does not depend on the costs at
all. With `rejection` and a seed, two processes that measured different costs may draft differently and so sample
different texts. Pass `costs` and `draft_costs` to avoid that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.acceptance_stats import RESTART_BELOW, DepthStats, accepted_prefix
from slipstream.drafters.draft_costs import measure_draft_costs
from slipstream.drafters.hybrid import Lookup, Member, current_names, joint_taps, members_of
from slipstream.drafters.merge import Part, merge
from slipstream.errors import ParameterError
from slipstream.targets.target_costs import measure_costs
from slipstream.theory.cost_curve import CostCurve

MATCH_CLASSES = 7  # statistics of a lookup are kept for matches of 0, 1, 2-3, 4-7, ... tokens
FIRST_IDLE = 2  # idle steps before the first retry
DEEPEST = 16  # deeper draft tokens share one record
SHARED_RECORD_STEPS = 512  # steps that the record shared by all requests reaches back


@dataclass(frozen=True)
class BanditConfig(Strict):
    """lengths        draft lengths of neural drafters, increasing from 1. Four, because a draft model keeps four
                   compiled. Using only these loses at most 4.4 % of the speed of the best length, for acceptance rates
                   of 0.5 to 0.9 and draft tokens that cost 0.05 to 0.2 of a decode step each.
    prior          assumed acceptance rate of a drafter before any of its draft tokens was verified, in (0, 1).
    weight         number of draft tokens that this assumption counts as.
    margin         minimum predicted gain of a neural member over plain decoding, as a share. The prediction uses few
                   steps and costs measured beforehand. Without a margin, a member that is about even would run half of
                   the time and lose. On a machine with other load, costs are accurate to about a tenth: use 0.1.
    memory         time constant of a record in steps: after this many, the weight of a step has fallen to 1/e.
    longest_rest   most idle steps before a drafter is retried.
    carry          weight, in steps, of what other requests have shown when a request begins, idle times included. With
                   0, requests are independent of each other. Otherwise a sampled text depends on earlier requests as
                   well as on its seed, with the same distribution (under the rule `coupled` it does not). 16 is good
                   for requests of one kind.
    branch_tokens  most lookup tokens to add as branches of a neural draft, as in `hybrid`, if they save time. The rule
                   "block" does not take branches.
    batch          number of sequences usually decoded together; rows are priced for a batch of that size.
    """

    lengths: tuple[int, ...] = (1, 3, 5, 8)
    prior: float = 0.7
    weight: float = 4.0
    margin: float = 0.03
    memory: int = 32
    longest_rest: int = 64
    carry: float = 0.0
    branch_tokens: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] != 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ParameterError(f"lengths are {self.lengths}", fix="give increasing numbers from 1 on")
        check_number("prior", self.prior, 0.0, 1.0, open_low=True)
        check_number("weight", self.weight, 0.0, float("inf"), open_low=True)
        check_number("carry", self.carry, 0.0, float("inf"))
        check_number("margin", self.margin, 0.0, float("inf"))
        for name, low in (("memory", 1), ("longest_rest", FIRST_IDLE), ("branch_tokens", 0), ("batch", 1)):
            check_integer(name, getattr(self, name), low)


@dataclass
class _Record:
    """Statistics of one member for one sequence.

    depth_stats  one for a neural member, one for each class of match lengths of a lookup.
    width        verified draft tokens per depth: 1 for a chain.
    idle         steps since a neural member last ran; idle_limit: it is retried after this many.
    """

    depth_stats: list[DepthStats]
    width: float = 1.0
    idle: int = 0
    idle_limit: int = 0  # 0: every member is tried at first


@dataclass
class _Proposal:
    """The last draft of a member for one sequence: number `b` of `draft`. asked: depth that it was asked for; match:
    length of the match, 0 for a neural member."""

    draft: Draft
    b: int
    asked: int
    match: int = 0


@dataclass(frozen=True)
class _Arm:
    """An option. member: None for plain decoding. rate: expected tokens in the time of one decode step."""

    rate: float
    member: int | None = None
    depth: int = 0


@dataclass
class _State:
    records: list[_Record]
    proposals: dict[int, _Proposal] = field(default_factory=dict)  # by member, since the last observation
    lookup_arms: list[_Arm] = field(default_factory=list)  # drafts of lookups, each cut at its best depth
    retried: int | None = None  # neural member that runs as a retry in this step
    retry_cost: float = 0.0  # of that step, in decode steps; infinite if it was expected to gain time anyway
    wide: bool = False  # the last step verified draft tokens
    neural_arms: dict[tuple[int, bool], list[tuple[_Arm, float]]] = field(default_factory=dict)  # see `_neural_arms`


FORMER_NAMES = {"beside": "branch_tokens"}
"""Former option names, still accepted by `make`."""


class BanditDrafter:
    """members      drafters to choose from; those that are a `Lookup` are asked every step.
    costs        seconds of a target forward by rows.
    draft_costs  for each member, seconds of a step in excess of `costs` of its rows, by draft tokens, at temperature 0
                 and above it (see `measure_draft_costs`); None for a lookup, which counts as free.
    """

    name = "bandit"

    def __init__(
        self,
        members: Seq[Drafter],
        vocab_size: int,
        costs: CostCurve,
        draft_costs: Seq[tuple[CostCurve, CostCurve] | None],
        config: BanditConfig | None = None,
        device: torch.device | str = "cpu",
    ):
        self.members, self.vocab_size, self.device = tuple(members), vocab_size, device
        self.config = config or BanditConfig()
        self.remembers = self.config.carry > 0
        self.taps = joint_taps(members)
        self.lookups = [m for m, member in enumerate(members) if isinstance(member, Lookup)]
        self.neural = [m for m in range(len(members)) if m not in self.lookups]
        if not members or len(draft_costs) != len(members):
            raise ParameterError(
                f"a bandit was given {len(members)} members and the draft costs of {len(draft_costs)}",
                fix="give at least one member, and draft costs for each",
            )
        missing = [members[m].name for m in self.neural if draft_costs[m] is None]
        if missing:
            raise ParameterError(
                f"draft costs of {', '.join(missing)} are missing", fix="give them; only lookups need none"
            )
        self.costs, self.draft_costs = costs, tuple(draft_costs)
        self._jump = costs.jump(self.config.batch)
        self._shared = [
            _Record(self._stats(m, SHARED_RECORD_STEPS, 0.0)) for m in range(len(members))
        ]  # of all requests
        self._states: dict[int, _State] = {}

    # --- choosing ------------------------------------------------------------------------------------------------

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        offers = {m: self.members[m].propose(seqs, budget) for m in self.lookups}
        arms = []
        for b, seq in enumerate(seqs):
            if budget[b]:
                state = self._state(seq.id)
                state.proposals.clear()
                for m, offer in offers.items():
                    self._remember(state, m, seq, _Proposal(offer, b, budget[b]))
                arms.append(self._choose(state, seq.params.greedy, budget[b]))
            else:
                arms.append(_Arm(1.0))
        parts: list[list[Part]] = [[] for _ in seqs]
        for m in range(len(self.members)):
            depths = [arm.depth if arm.member == m else 0 for arm in arms]
            if not any(depths):
                continue
            draft = offers[m] if m in offers else self.members[m].propose(seqs, depths)
            for b, depth in enumerate(depths):
                if depth:
                    parts[b].append(Part(draft, depth, name=self.members[m].name))
                    if m not in offers:
                        state = self._state(seqs[b].id)
                        self._remember(state, m, seqs[b], _Proposal(draft, b, depth))
                        for arm in state.lookup_arms if self.config.branch_tokens else ():
                            assert arm.member is not None
                            name = self.members[arm.member].name
                            parts[b].append(Part(offers[arm.member], arm.depth, self.config.branch_tokens, name))
        return merge(seqs, parts, self.vocab_size, self.device)

    def _choose(self, state: _State, greedy: bool, budget: int) -> _Arm:
        """The arm with the highest rate, or a neural member that is due for a retry."""
        neural = self._neural_arms(state, greedy, budget)
        least = 1 + self.config.margin
        best = max([_Arm(1.0), *(arm for arm, _ in neural if arm.rate > least)], key=_rate)
        cuts = [self._best_cut(state, m) for m in self.lookups]
        state.lookup_arms = [arm for arm in cuts if arm.member is not None]
        best_lookup = max(state.lookup_arms, key=_rate, default=best)
        state.retried = None
        if best_lookup.rate > best.rate:
            return best_lookup  # no retry: it would cost the most here
        due = None
        for arm, best_case in neural:
            assert arm.member is not None
            record = state.records[arm.member]
            if arm.member == best.member:
                self._set_idle(arm.member, record, 0, FIRST_IDLE)
            elif best_case > best.rate:
                self._set_idle(arm.member, record, record.idle + 1, record.idle_limit)
                if due is None and record.idle > record.idle_limit:
                    due = arm
        if due is None:
            return best
        assert due.member is not None
        state.retried = due.member
        state.retry_cost = self._time(state, due.member, greedy, due.depth) if due.rate <= 1 else float("inf")
        return due

    def _neural_arms(self, state: _State, greedy: bool, budget: int) -> list[tuple[_Arm, float]]:
        """For each neural member, its arm of the best length and its rate if every draft token were accepted. Cached
        until something is learned: if no drafter helps, most steps are plain and should cost no more than plain
        decoding."""
        key = min(budget, self.config.lengths[-1]), state.wide
        arms = state.neural_arms.get(key)
        if arms is None:
            arms = state.neural_arms[key] = [
                (self._best_length(state, m, greedy, budget), self._best_case(state, m, greedy, budget))
                for m in self.neural
            ]
        return arms

    def _best_length(self, state: _State, m: int, greedy: bool, budget: int) -> _Arm:
        """The best draft length of a neural member, at least 1."""
        record = state.records[m]
        lengths = self._lengths(budget)
        tokens = [1.0, *accumulate(record.depth_stats[0].acceptance_by_depth(lengths[-1]), initial=1.0)][1:]
        rates = [_Arm(tokens[k] / self._time(state, m, greedy, k), m, k) for k in lengths]
        return max(rates, key=_rate)

    def _best_case(self, state: _State, m: int, greedy: bool, budget: int) -> float:
        """The member's rate if every draft token were accepted."""
        return max((1 + k) / self._time(state, m, greedy, k) for k in self._lengths(budget))

    def _best_cut(self, state: _State, m: int) -> _Arm:
        """The depth at which to cut the draft of a lookup; member None if no depth is faster than plain decoding."""
        proposal = state.proposals[m]
        if not proposal.draft.nodes(proposal.b):
            return _Arm(1.0)
        depths = [proposal.draft.depths[i] for i in proposal.draft.nodes(proposal.b)]
        stats = state.records[m].depth_stats[_match_class(proposal.match)]
        best, tokens, nodes = _Arm(1.0), 1.0, 0
        back = 0.0 if state.wide else self._jump
        for depth, accepted in enumerate(stats.acceptance_by_depth(max(depths)), start=1):
            tokens += accepted
            nodes += depths.count(depth)
            best = max(best, _Arm(tokens / (self._rows(nodes) + back), m, depth), key=_rate)
        return best

    def _lengths(self, budget: int) -> list[int]:
        """Lengths within the budget. A draft model has a compiled graph for each of them, and none in between."""
        return [length for length in self.config.lengths if length <= budget]

    def _time(self, state: _State, m: int, greedy: bool, k: int) -> float:
        """Time of drafting and verifying k tokens, in decode steps. It includes the cost of changing the number of
        rows, unless the last step drafted, too."""
        costs = self.draft_costs[m]
        assert costs is not None
        rows = self._rows(k * state.records[m].width) + (-self._jump if state.wide else self._jump)
        return costs[0 if greedy else 1](k) / self.costs(self.config.batch) + rows

    def _rows(self, nodes: float) -> float:
        """Time of verifying `nodes` draft tokens per sequence, in decode steps."""
        return self.costs(self.config.batch * (1 + nodes)) / self.costs(self.config.batch)

    # --- learning ------------------------------------------------------------------------------------------------

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            state = self._states.get(seq.id)
            if state is None:
                continue
            state.wide = bool(draft.nodes(b))
            if state.proposals:
                self._learn(state, verdict.run(draft, b))
        for member in self.members:
            member.observe(seqs, draft, out, verdict)

    def _learn(self, state: _State, run: list[int]) -> None:
        state.neural_arms.clear()
        for m, proposal in state.proposals.items():
            record = state.records[m]
            accepted, rejected = accepted_prefix(proposal.draft, proposal.b, run)
            if m in self.neural:  # a token that it was asked for and did not draft counts as rejected
                rejected = rejected or accepted < min(proposal.asked, len(run))
            if accepted or rejected:
                for known in (record, self._shared[m]):
                    known.depth_stats[_match_class(proposal.match)].learn(accepted, rejected)
            if state.retried == m:
                limit = record.idle_limit if 1 + accepted > state.retry_cost else 2 * record.idle_limit
                self._set_idle(m, record, 0, min(max(limit, FIRST_IDLE), self.config.longest_rest))
        state.proposals.clear()

    def _set_idle(self, m: int, record: _Record, idle: int, limit: int) -> None:
        """Set the idle steps of a neural member and their limit, also in the record that new requests start from."""
        for known in (record, self._shared[m]):
            known.idle, known.idle_limit = idle, limit

    def _remember(self, state: _State, m: int, seq: Sequence, proposal: _Proposal) -> None:
        """Keep a member's draft until the text shows which of its tokens are accepted."""
        state.proposals[m] = proposal
        member, nodes = self.members[m], proposal.draft.nodes(proposal.b)
        if m in self.lookups:
            proposal.match = cast(Lookup, member).match_length(seq.id)
        elif nodes:
            state.neural_arms.clear()
            width = len(nodes) / max(proposal.draft.depths[i] for i in nodes)
            for known in (state.records[m], self._shared[m]):
                known.width += (width - known.width) / 4

    # --- state ---------------------------------------------------------------------------------------------------

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        for member in self.members:
            member.release(seq_id)

    def _state(self, seq_id: int) -> _State:
        state = self._states.get(seq_id)
        if state is None:
            state = self._states[seq_id] = _State([self._record(m) for m in range(len(self.members))])
        return state

    def _record(self, m: int) -> _Record:
        """The record of a new sequence; with `carry`, it starts from the record of all requests."""
        record = _Record(self._stats(m, self.config.memory, RESTART_BELOW))
        shared, carry = self._shared[m], self.config.carry
        if carry:
            record.idle_limit, record.idle, record.width = shared.idle_limit, shared.idle, shared.width
            for own, theirs in zip(record.depth_stats, shared.depth_stats, strict=True):
                own.inherit(theirs, carry)
        return record

    def _stats(self, m: int, memory: int, restart_below: float) -> list[DepthStats]:
        c, count = self.config, MATCH_CLASSES if m in self.lookups else 1
        return [DepthStats(DEEPEST, c.prior, c.weight, 1 - 1 / memory, restart_below) for _ in range(count)]


def _rate(arm: _Arm) -> float:
    return arm.rate


def _match_class(match: int) -> int:
    return min(match.bit_length(), MATCH_CLASSES - 1)


def make(
    target: Target,
    *,
    members: Seq[Member] | str | None = None,
    model: Target | None = None,
    costs: CostCurve | None = None,
    draft_costs: Seq[CostCurve | tuple[CostCurve, CostCurve] | None] | None = None,
    **options: Any,
) -> BanditDrafter:
    """See `registry`; members and model as in `hybrid.members_of`, options as in `BanditConfig` (also by
    `FORMER_NAMES`).

    costs, draft_costs: as in `BanditDrafter`; a single curve is used for both temperatures. Those not given are
    measured here, once, in some dozens of forwards.
    """
    config = BanditConfig(**current_names(FORMER_NAMES, options))
    made = members_of(target, members, model)
    costs = costs or measure_costs(target)
    if draft_costs is None:
        draft_costs = [
            None if isinstance(member, Lookup) else _measured(target, member, config, costs) for member in made
        ]
    pairs = [(curve, curve) if isinstance(curve, CostCurve) else curve for curve in draft_costs]
    return BanditDrafter(made, target.vocab_size, costs, pairs, config, target.device)


def _measured(target: Target, member: Drafter, config: BanditConfig, costs: CostCurve) -> tuple[CostCurve, CostCurve]:
    greedy, sampled = (
        measure_draft_costs(target, member, config.lengths, temperature=t, costs=costs) for t in (0.0, 1.0)
    )
    return greedy, sampled
