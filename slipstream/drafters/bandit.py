"""Bandit: learns, for each request while it runs, which drafter and which draft length pay, "none" among them.

A round that drafts k guesses with a drafter yields 1 + S(1) + ... + S(k) tokens, S(j) being the chance that the first
j guesses stand, and takes the time of drafting k guesses and of verifying the rows. The arm of the most tokens a
second is pulled; plain decoding is the arm of 1 token a plain step. What has to be learnt is S alone (`Reach`): one
round tells it of every length of that drafter, and the times are measured beforehand.

Lookups cost next to nothing, so they are asked every round, and what they offer is judged by the text that came
whether it was verified or not: of them everything is known, by length of match, and there is nothing to explore.
An offer is cut where its next depth no longer pays.

A neural drafter that is not used shows nothing of itself. It begins with the benefit of the doubt (`prior`) and is
given a round now and then: after 2 rounds of rest, and after twice as many each time that it does not come out ahead
(as many again if the round paid for itself and nobody expected it).
So n rounds spend about log2(n) on it, and a text that changes is noticed. With one member this is nothing but an
off-switch with a choice of length: any drafter "under its own control".

The costs are frozen when the drafter is made, and the choice is a function of them, of the tokens so far and of past
rounds, never of the token just drawn: the law of the text is the target's, and at temperature 0 and under the rule
`coupled` the text does not depend on the costs at all. With `rejection` and a seed, two processes that measured
different costs may draft differently and so say different texts of that law: hand in `costs` and `draft_costs` to
rule that out.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch

from slipstream.core.cost_curve import CostCurve
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.draft_costs import measure_draft_costs
from slipstream.drafters.hybrid import Lookup, Member, joint_taps, members_of
from slipstream.drafters.merge import Part, merge
from slipstream.drafters.odds import SURPRISE, Reach, accepted_prefix
from slipstream.errors import ParameterError
from slipstream.targets.target_costs import measure_costs

MATCHES = 7  # records of a lookup: matches of 0, 1, 2-3, 4-7, ... tokens
FIRST_REST = 2  # rounds
DEEPEST = 16  # deeper guesses share one record
LASTING = 512  # rounds that the record of all requests reaches back


@dataclass(frozen=True)
class BanditConfig(Strict):
    """lengths  draft lengths of neural drafters, increasing from 1 on. Four, because a draft model keeps as many
                compiled; between them at most 4.4 % of the best length's speed is lost, for guesses that stand 5 to 9
                times in 10 and cost 0.05 to 0.2 of a plain step each.
    prior       rate at which guesses of a drafter are taken to stand before any was seen, in (0, 1).
    weight      how many guesses that is worth.
    margin      by how much a neural member has to promise to be faster than plain decoding. What it promises rests on
                few rounds and on costs measured beforehand, so one that is about even would be on half the
                time, and lose. On a machine that others use, too, costs are good for a tenth: then 0.1.
    memory      rounds that a record reaches back: the weight of a round falls by 1/e in so many.
    longest_rest  most rounds that a drafter waits for its next chance.
    carry       how many rounds what other requests taught is worth when a request begins, its rests included. With 0
                requests are independent of each other; otherwise a sampled text, though of the same law, depends on
                them besides its seed (under the rule `coupled` it does not). 16 suits requests of one kind.
    beside      most guesses of a lookup that hang beside a neural draft, as in `hybrid`, if they pay at all. The rule
                "block" takes no branches.
    batch       sequences that are usually decoded together: rows then cost what they cost beside so many.
    """

    lengths: tuple[int, ...] = (1, 3, 5, 8)
    prior: float = 0.7
    weight: float = 4.0
    margin: float = 0.03
    memory: int = 32
    longest_rest: int = 64
    carry: float = 0.0
    beside: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] != 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ParameterError(f"lengths are {self.lengths}", fix="give increasing numbers from 1 on")
        check_number("prior", self.prior, 0.0, 1.0, open_low=True)
        check_number("weight", self.weight, 0.0, float("inf"), open_low=True)
        check_number("carry", self.carry, 0.0, float("inf"))
        check_number("margin", self.margin, 0.0, float("inf"))
        for name, low in (("memory", 1), ("longest_rest", FIRST_REST), ("beside", 0), ("batch", 1)):
            check_integer(name, getattr(self, name), low)


@dataclass
class _Record:
    """What one sequence has learnt of one member.

    reaches  one for a neural member, one for each length of match of a lookup.
    width    guesses verified for each depth drafted: 1 for a chain.
    """

    reaches: list[Reach]
    width: float = 1.0
    resting: int = 0
    rest: int = 0  # at first everybody is given a round


@dataclass
class _Guess:
    """What a member last proposed: the guesses of `draft` for its sequence b. asked: depth that it was asked for;
    match: 0 for a neural member."""

    draft: Draft
    b: int
    asked: int
    match: int = 0


@dataclass(frozen=True)
class _Arm:
    """member: None decodes plainly. rate: tokens in the time of a plain step."""

    rate: float
    member: int | None = None
    depth: int = 0


@dataclass
class _State:
    records: list[_Record]
    made: dict[int, _Guess] = field(default_factory=dict)  # by member, since the last observation
    found: list[_Arm] = field(default_factory=list)  # what lookups have to offer, each cut where it pays
    probed: int | None = None  # member that was given a chance
    price: float = 0.0  # of that round, in plain steps; infinite where it was expected to pay anyway
    wide: bool = False  # the last round verified guesses
    outlook: dict[tuple[int, bool], list[tuple[_Arm, float]]] = field(default_factory=dict)  # see `_outlook`


class BanditDrafter:
    """members      drafters to choose from; a `Lookup` among them is always asked.
    costs        seconds of a forward of the target by rows.
    draft_costs  for each member, seconds by guesses that a round takes beyond `costs` of its rows, at temperature 0 and
                 above it (see `measure_draft_costs`); None for a lookup, which counts as free.
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
        self.taps = joint_taps(members)
        self.lookups = [m for m, member in enumerate(members) if isinstance(member, Lookup)]
        self.neural = [m for m in range(len(members)) if m not in self.lookups]
        if not members or len(draft_costs) != len(members):
            raise ParameterError(
                f"a bandit was given {len(members)} members and the draft costs of {len(draft_costs)}",
                fix="give one or more members, and the costs of each",
            )
        missing = [members[m].name for m in self.neural if draft_costs[m] is None]
        if missing:
            raise ParameterError(f"draft costs of {', '.join(missing)} are missing", fix="only a lookup can do without")
        self.costs, self.draft_costs = costs, tuple(draft_costs)
        self._jump = costs.jump(self.config.batch)
        self._past = [_Record(self._reaches(m, LASTING, 0.0)) for m in range(len(members))]  # of all requests
        self._states: dict[int, _State] = {}

    # --- choosing ------------------------------------------------------------------------------------------------

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        offers = {m: self.members[m].propose(seqs, budget) for m in self.lookups}
        arms = []
        for b, seq in enumerate(seqs):
            if budget[b]:
                state = self._state(seq.id)
                state.made.clear()
                for m, offer in offers.items():
                    self._note(state, m, seq, _Guess(offer, b, budget[b]))
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
                    parts[b].append(Part(draft, depth))
                    if m not in offers:
                        state = self._state(seqs[b].id)
                        self._note(state, m, seqs[b], _Guess(draft, b, depth))
                        for found in state.found if self.config.beside else ():
                            assert found.member is not None
                            parts[b].append(Part(offers[found.member], found.depth, self.config.beside))
        return merge(seqs, parts, self.vocab_size, self.device)

    def _choose(self, state: _State, greedy: bool, budget: int) -> _Arm:
        """The arm of the best rate, or a neural member whose turn it is to show itself."""
        neural = self._outlook(state, greedy, budget)
        least = 1 + self.config.margin
        best = max([_Arm(1.0), *(arm for arm, _ in neural if arm.rate > least)], key=_rate)
        cuts = [self._best_cut(state, m) for m in self.lookups]
        state.found = [arm for arm in cuts if arm.member is not None]
        found = max(state.found, key=_rate, default=best)
        state.probed = None
        if found.rate > best.rate:
            return found  # nobody else is given a chance: it would cost the most here
        due = None
        for arm, best_case in neural:
            assert arm.member is not None
            record = state.records[arm.member]
            if arm.member == best.member:
                self._rests(arm.member, record, 0, FIRST_REST)
            elif best_case > best.rate:
                self._rests(arm.member, record, record.resting + 1, record.rest)
                if due is None and record.resting > record.rest:
                    due = arm
        if due is None:
            return best
        assert due.member is not None
        state.probed = due.member
        state.price = self._time(state, due.member, greedy, due.depth) if due.rate <= 1 else float("inf")
        return due

    def _outlook(self, state: _State, greedy: bool, budget: int) -> list[tuple[_Arm, float]]:
        """Of each neural member the best length, and its rate if every guess stood. Worked out anew only where
        something was learnt: where nobody helps most rounds are plain, and they should cost what plain rounds cost."""
        key = min(budget, self.config.lengths[-1]), state.wide
        found = state.outlook.get(key)
        if found is None:
            found = state.outlook[key] = [
                (self._best_length(state, m, greedy, budget), self._best_case(state, m, greedy, budget))
                for m in self.neural
            ]
        return found

    def _best_length(self, state: _State, m: int, greedy: bool, budget: int) -> _Arm:
        """The best of a neural member's lengths, none being no choice here."""
        record = state.records[m]
        lengths = self._lengths(budget)
        tokens = [1.0, *accumulate(record.reaches[0].stands(lengths[-1]), initial=1.0)][1:]
        rates = [_Arm(tokens[k] / self._time(state, m, greedy, k), m, k) for k in lengths]
        return max(rates, key=_rate)

    def _best_case(self, state: _State, m: int, greedy: bool, budget: int) -> float:
        """The member's rate if every guess stood."""
        return max((1 + k) / self._time(state, m, greedy, k) for k in self._lengths(budget))

    def _best_cut(self, state: _State, m: int) -> _Arm:
        """How deep to follow what a lookup found."""
        guess = state.made[m]
        if not guess.draft.nodes(guess.b):
            return _Arm(1.0)
        depths = [guess.draft.depths[i] for i in guess.draft.nodes(guess.b)]
        reach = state.records[m].reaches[_bucket(guess.match)]
        best, tokens, nodes = _Arm(1.0), 1.0, 0
        back = 0.0 if state.wide else self._jump
        for depth, stands in enumerate(reach.stands(max(depths)), start=1):
            tokens += stands
            nodes += depths.count(depth)
            best = max(best, _Arm(tokens / (self._rows(nodes) + back), m, depth), key=_rate)
        return best

    def _lengths(self, budget: int) -> list[int]:
        """Those within the budget, uncut: a draft model has a compiled graph for each, none for what lies between."""
        return [length for length in self.config.lengths if length <= budget]

    def _time(self, state: _State, m: int, greedy: bool, k: int) -> float:
        """Drafting and verifying k deep, in plain steps: the number of rows changes there and back, unless the last
        round drafted, too."""
        costs = self.draft_costs[m]
        assert costs is not None
        rows = self._rows(k * state.records[m].width) + (-self._jump if state.wide else self._jump)
        return costs[0 if greedy else 1](k) / self.costs(self.config.batch) + rows

    def _rows(self, nodes: float) -> float:
        """Verifying so many guesses a sequence, in plain steps."""
        return self.costs(self.config.batch * (1 + nodes)) / self.costs(self.config.batch)

    # --- learning ------------------------------------------------------------------------------------------------

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            state = self._states.get(seq.id)
            if state is None:
                continue
            state.wide = bool(draft.nodes(b))
            if state.made:
                self._learn(state, verdict.run(draft, b))
        for member in self.members:
            member.observe(seqs, draft, out, verdict)

    def _learn(self, state: _State, run: list[int]) -> None:
        state.outlook.clear()
        for m, guess in state.made.items():
            record = state.records[m]
            stood, fell = accepted_prefix(guess.draft, guess.b, run)
            if m in self.neural:  # what it was asked for and had no guess for counts as wrong: no token came of it
                fell = fell or stood < min(guess.asked, len(run))
            if stood or fell:
                for known in (record, self._past[m]):
                    known.reaches[_bucket(guess.match)].learn(stood, fell)
            if state.probed == m:
                rest = record.rest if 1 + stood > state.price else 2 * record.rest
                self._rests(m, record, 0, min(max(rest, FIRST_REST), self.config.longest_rest))
        state.made.clear()

    def _rests(self, m: int, record: _Record, resting: int, rest: int) -> None:
        """Of a neural member: rounds since its last chance, and until the next. What a request begins with is what the
        last one had come to."""
        for known in (record, self._past[m]):
            known.resting, known.rest = resting, rest

    def _note(self, state: _State, m: int, seq: Sequence, guess: _Guess) -> None:
        """Keep what a member proposed until the text shows how it fared."""
        state.made[m] = guess
        member, nodes = self.members[m], guess.draft.nodes(guess.b)
        if m in self.lookups:
            guess.match = cast(Lookup, member).match_length(seq.id)
        elif nodes:
            state.outlook.clear()
            width = len(nodes) / max(guess.draft.depths[i] for i in nodes)
            for known in (state.records[m], self._past[m]):
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
        """Of a sequence that begins: with what the others have taught."""
        record, past, carry = _Record(self._reaches(m, self.config.memory, SURPRISE)), self._past[m], self.config.carry
        if carry:
            record.rest, record.resting, record.width = past.rest, past.resting, past.width
            for own, theirs in zip(record.reaches, past.reaches, strict=True):
                own.inherit(theirs, carry)
        return record

    def _reaches(self, m: int, memory: int, surprise: float) -> list[Reach]:
        c, count = self.config, MATCHES if m in self.lookups else 1
        return [Reach(DEEPEST, c.prior, c.weight, 1 - 1 / memory, surprise) for _ in range(count)]


def _rate(arm: _Arm) -> float:
    return arm.rate


def _bucket(match: int) -> int:
    return min(match.bit_length(), MATCHES - 1)


def make(
    target: Target,
    *,
    members: Seq[Member] | str | None = None,
    model: Target | None = None,
    costs: CostCurve | None = None,
    draft_costs: Seq[CostCurve | tuple[CostCurve, CostCurve] | None] | None = None,
    **options: Any,
) -> BanditDrafter:
    """See `registry`; members and model as in `hybrid.members_of`, options as in `BanditConfig`.

    costs, draft_costs: as in `BanditDrafter`, one curve standing for both temperatures. What is not given is measured
    now, in some dozens of forwards, and never again.
    """
    config = BanditConfig(**options)
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
