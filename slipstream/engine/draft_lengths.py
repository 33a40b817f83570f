"""`DraftLengths`: how many draft tokens each request of a batch gets, chosen from what past steps took and gave.

A step with the draft lengths k_1..k_B yields  B + sum of S_b(j), j <= k_b  expected tokens, where S_b(j) is the
probability that request b accepts its first j draft tokens. It takes the time of drafting max(k_b) levels and of a
forward over B + sum of k_b rows. The lengths with the most expected tokens per second are taken: draft tokens of all
requests compete for rows, the most probable first (the goodput of SmartSpec, Liu et al. 2406.14066, section 4, with the
lengths of single requests). Length 0 for all is plain decoding.

Nothing is measured beforehand. S is learned from each request's own steps, starting from that of the requests before it
(`Survival`). Times are medians of recent steps; what was never timed is estimated from its neighbours. A drafter that
ends its drafts itself (`whole`) is told what rows cost, and gets all the length that there is.

             TRIAL_STEPS steps drafted, gain at least 1 + MARGIN
    ┌───────┐ ──────────────────────────────────────────────────▶ ┌──────────┐ ──┐ after RENEW steps
    │ TRIAL │                                                     │ DRAFTING │   │ a plain one is timed
    └───────┘ ◀──┐                                                └──────────┘ ◀─┘
        │        │ the pause is over; or a request                      │
        │        │ joins, and the last trial is paid for                │
        │        │                                                      │
        │        └───────────── ┌─────────┐ ◀───────────────────────────┘
        └─────────────────────▶ │ RESTING │   gain below 1
          gain below 1 + MARGIN └─────────┘

The gain is that of the best lengths over plain decoding, as predicted. A drafter that ends its drafts itself rests when
the account is overdrawn instead: texts are copied in places, and steps between them draft nothing. The account holds
plain steps: `SAVED_FIRST`, what drafts gained, up to `MOST_SAVED`, less what they lost, and `TRIAL_SHARE` of each plain
step. A trial is paid for when nothing is owed. Pauses double as long as trials fail.

Prompts must be read anyway. So the time of their rows is not counted as a cost of decoding (see `_without_drafts`). On
a busy server nearly every step has such rows.

Lengths depend on past steps only, never on the random numbers of this one (see `Engine.add`), so every output
distribution is unchanged. They depend on times, though: under `rejection` a seed repeats a text only with fixed ones.
"""

import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence
from slipstream.drafters.lookups import ROW_COST
from slipstream.engine.step_history import SHORTEST, Mean, Survival, Times

log = logging.getLogger("slipstream")

COLD = 4
"""First drafting steps that the account leaves out: the drafter's weights are not in the processor's caches yet."""
DRAW_COST = 0.05
"""Assumed `Budget.draw_cost`: that of an EAGLE-3 head for SmolLM2 is 0.03 in 16 bits and 0.06 in 4 bits."""
FIRST = 4
"""Draft tokens of the first steps that draft."""
TRIAL_STEPS = 3
"""Steps that draft before the drafter may rest (again)."""
TRIAL_SHARE = 0.01
"""What trials may cost, as a share of plain decoding: the cost of a trial over this is the least length of a pause."""
SAVED_FIRST, MOST_SAVED, LOOK = 4.0, 16.0, 0.5
"""The account, in plain steps: its first balance; its upper bound, which is also the largest debt; and the balance at
which drafting is tried again."""
MARGIN = 0.02
"""Least predicted gain over plain decoding, as a share: about as much as a trial may cost."""
FIRST_REST, LONGEST_REST = 32, 4096
"""Tokens per request that the first pause is long, and the longest."""
RENEW = 256
"""Most steps that draft before a plain one is timed again; fewer at first."""
PATIENCE = 8
"""Steps in a row whose time of drafting is not learned because a drafter caught up. With texts as short as that, it
counts."""
SAME = 1 / 8
"""Forwards with prompts whose numbers of rows differ by less than this share are one number among the times."""
LEARN_LAST = 64
"""Plain tokens per request at the end of a rest whose times are learned: the next trial is compared with them. Learning
from all of a rest took 1 % of the time of a target of 14M parameters with int8 weights."""
MORE_ROWS, CHEAPEST, DEAREST = 16, 0.05, 0.7
"""Rows of a request whose costs are told apart, where they were timed; any further one costs their mean. Bounds of the
cost, because times may be those of a bad moment."""
KEEP, KEEP_COSTS = 4, 16
"""Steps for which lengths, or the costs of rows, are kept while nobody joins or leaves: choosing takes 0.1 ms."""


class State(Enum):
    """See the drawing above."""

    TRIAL = "trial"
    DRAFTING = "drafting"
    RESTING = "resting"


@dataclass
class Step:
    """What a step was and took. One entry of `lengths`, `nodes` and `accepted` for each request: the length that it was
    given, its draft tokens, and how many of them were accepted. draft, rest: seconds of drafting, and of all else.
    repeats: plain steps in this call. catching_up: whether a drafter read what it had not followed, such as a prompt:
    that takes its time once, however long the drafts are. prompt_rows: rows of prompts in the forward, of requests that
    are not among `ids`; read_rows: those that the drafter reads, all unless it is given. drawn: the most draft tokens
    that a model drew for a request (see `Draft`)."""

    ids: Seq[int]
    lengths: Seq[int]
    nodes: Seq[int] = ()
    accepted: Seq[int] = ()
    draft: float = 0.0
    rest: float = 0.0
    repeats: int = 1
    catching_up: bool = False
    prompt_rows: int = 0
    read_rows: int | None = None
    drawn: int = 0


class TimedStep:
    """What a step, or a call of several plain ones, took and gave: the difference of the counters before and after.

    seqs     requests that decode, at least one; lengths: their draft lengths.
    sharing  requests among which the time of the step is divided: these, and those whose prompts are read.
    more     further fields of `Step`.
    """

    def __init__(self, seqs: Seq[Sequence], lengths: Seq[int], sharing: int, **more: Any):
        self._seqs, self._lengths, self._sharing, self._more = seqs, lengths, sharing, more
        self._before = [(seq.stats.proposed, seq.stats.accepted, len(seq.tokens)) for seq in seqs]
        self._seconds = dict(seqs[0].stats.seconds)

    def ended(self, draft: Draft | None) -> Step:
        """Return the step, after it. draft: what was verified in it; None after several plain steps."""
        nodes, accepted, gained = [], [], 0
        for seq, (proposed_before, accepted_before, tokens_before) in zip(self._seqs, self._before, strict=True):
            nodes.append(seq.stats.proposed - proposed_before)
            accepted.append(seq.stats.accepted - accepted_before)
            gained = max(gained, len(seq.tokens) - tokens_before)
        spent = {name: self._sharing * (s - self._seconds[name]) for name, s in self._seqs[0].stats.seconds.items()}
        return Step(
            [seq.id for seq in self._seqs], self._lengths, nodes, accepted,
            draft=spent["draft"], rest=sum(spent.values()) - spent["draft"],
            drawn=max(draft.drawn) if draft is not None and draft.drawn else 0,
            repeats=1 if any(self._lengths) else gained, **self._more,
        )  # fmt: skip


@dataclass
class DraftLengths:
    """Lengths for the requests of an engine. Kept from one engine to the next.

    most   longest draft.
    prior  assumed acceptance rate before any draft token was verified.
    whole  whether the drafter ends each draft where a token is not worth its row (`row_costs`): it knows more of them
           than what became of earlier ones. Then a request that drafts gets all that it may draft.
    """

    most: int = 8
    prior: float = 0.7
    whole: bool = False
    row_costs: tuple[float, ...] = field(init=False, default=(ROW_COST,))
    draw_cost: float = field(init=False, default=DRAW_COST)
    state: State = field(init=False, default=State.TRIAL)

    def __post_init__(self) -> None:
        self._survival = Survival(self.most, self.prior)
        self._forward = Times()  # by rows; for a drafter that ends its drafts itself, it sets the pace of all times
        self._plain = Times(self._forward.pace)  # by requests
        self._compared = False  # whether a plain step was timed
        self._with_prompts = Mean(64)  # the share of steps that read prompts
        self._reading = Mean(16)  # seconds in which the drafter reads a row of a prompt
        self._drafting: dict[int, Times] = {}  # by requests that draft: by levels
        # Ids, lengths, and for how many steps they were used.
        self._chosen: tuple[tuple[int, ...], list[int], int] = ((), [], 0)
        self._drafted, self._renew = 0, TRIAL_STEPS  # steps that drafted since the last plain one, until the next one
        self._trial = TRIAL_STEPS  # steps that it drafts yet
        self._pause, self._rest = FIRST_REST, 0  # tokens: of a pause, left of it
        self._saved = SAVED_FIRST  # plain steps of one request: the account
        self._tokens, self._took = Mean(64), Mean(64)  # of steps that drafted: tokens of a request, in plain steps
        self._late = 0  # for how many steps in a row a drafter caught up
        self._steps, self._turns, self._emitted = 0, 0, 0  # steps that drafted; of these: requests, tokens, added up
        self._told = False

    @property
    def resting(self) -> bool:
        """Whether drafting is paused; the drafter is then not shown the text."""
        return self.state is State.RESTING

    # --- choosing ------------------------------------------------------------------------------------------------

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0) -> list[Budget]:
        """Choose a budget for the draft of each request, at most as deep as its limit. prompt_rows: see `Step`."""
        lengths = self._lengths(ids, limits, prompt_rows)
        return [Budget(length, self.row_costs, self.draw_cost) for length in lengths]

    def _lengths(self, ids: Seq[int], limits: Seq[int], prompt_rows: int) -> list[int]:
        limits = [] if self.resting else [min(limit, self.most) for limit in limits]
        if not any(limits) or self._drafted >= self._renew:
            return [0] * len(ids)
        if not self._drafting or not self._compared:
            return [min(FIRST, limit) for limit in limits]
        key, lengths, used = self._chosen
        if key != tuple(ids) or used >= (KEEP_COSTS if self.whole else KEEP):
            used = 0
            self._set_costs(len(ids))
            lengths, gain = (limits, self._measured_gain()) if self.whole else self._best(ids, limits, prompt_rows)
            if not self._trial:
                least = 1.0 if self.state is State.DRAFTING else 1 + MARGIN
                if self._saved < 0 if self.whole else gain < least:
                    self._begin_rest(gain)
                    return [0] * len(ids)
                self.state, self._pause = State.DRAFTING, FIRST_REST
        self._chosen = tuple(ids), lengths, used + 1
        return list(map(min, lengths, limits))

    def _best(self, ids: Seq[int], limits: Seq[int], prompt_rows: int) -> tuple[list[int], float]:
        """The lengths with the most expected tokens per second, at least one draft token, and their gain over plain
        decoding."""
        count = len(ids)
        drafting = [b for b, limit in enumerate(limits) if limit > 0]
        members, reach = [ids[b] for b in drafting], np.array([limits[b] for b in drafting])
        survival = self._survival.of(members) * (np.arange(self.most) < reach[:, None])  # [D, most]
        width = self._survival.width(members)
        owed, plain = self._without_drafts(count, prompt_rows)
        depths = np.arange(1, max(limits) + 1)
        # For each depth of the draft, all its draft tokens, the most probable first: [depths, n].
        within = np.where(np.arange(self.most) < depths[:, None, None], survival, 0.0).reshape(len(depths), -1)
        order = -np.sort(-within, axis=1)
        rows = count + width * np.arange(1, order.shape[1] + 1)
        forward = np.maximum(self._forward.estimate(rows + prompt_rows) - owed, SHORTEST)
        seconds = forward + self._levels(len(drafting)).estimate(depths)[:, None]
        rates = np.where(order > 0, (count + np.cumsum(order, axis=1)) / seconds, 0.0)
        at = np.unravel_index(rates.argmax(), rates.shape)
        lengths = [0] * count
        for b, length in zip(drafting, (survival[:, : depths[at[0]]] >= order[at]).sum(1).tolist(), strict=True):
            lengths[b] = length
        return lengths, float(rates[at]) * plain / count

    def _measured_gain(self) -> float:
        """Tokens of recent steps that drafted over the plain steps that they took."""
        return self._tokens.value / max(SHORTEST, self._took.value)

    def _set_costs(self, count: int) -> None:
        """`row_costs` and `draw_cost`, see `Budget`: tokens that decoding of so many requests gains at its present
        speed in the time in which each gets draft token 1, 2, .. verified, and a further one drawn."""
        if self._forward.numbers < 2:
            return
        timed = min(MORE_ROWS, max(1, (self._forward.most - count) // count))
        times = self._forward.estimate(count * np.arange(1, timed + 2))
        usual = (times[-1] - times[0]) / timed
        each = np.append((np.diff(times) + usual) / 2, usual)  # differences of medians are noisy
        speed = max(1.0, self._measured_gain()) / max(SHORTEST, self._plainly(count))
        self.row_costs = tuple(np.clip(each * speed, CHEAPEST, DEAREST).tolist())
        levels = self._levels(count)
        if levels.numbers > 2 and levels.most > 1:  # 0, and two that were drawn
            self.draw_cost = min(DEAREST, speed * (levels.at(levels.most) - levels.at(1)) / (levels.most - 1))

    def _levels(self, drafting: int) -> Times:
        return self._drafting[min(self._drafting, key=lambda known: abs(known - drafting))]

    def _plainly(self, count: int) -> float:
        return self._plain.nearest(count) if self._plain.numbers else self._forward.at(count)

    def _without_drafts(self, count: int, prompt_rows: int) -> tuple[float, float]:
        """Of a step over the pending tokens of so many requests and these rows: (seconds for its prompts, seconds for
        the tokens). If every step reads prompts, their share is the time of a step with the prompts alone. If few do,
        it is what they add to a step without them."""
        if not prompt_rows:
            return 0.0, self._plainly(count)
        prompts, tokens, together = map(self._forward.at, (prompt_rows, count, count + prompt_rows))
        added = together - tokens
        owed = added + self._with_prompts.value * (prompts - added)
        return owed, together - owed

    # --- learning ------------------------------------------------------------------------------------------------

    def joined(self) -> None:
        """A request begins, which may be one that drafts pay for: a rest ends if its trial is paid for."""
        if self.resting and self._saved >= 0:
            self._begin_trial()

    def learn(self, step: Step) -> None:
        """Take note of a step: of its time, and of what became of its draft tokens."""
        if self.resting:
            learning = self._rest <= LEARN_LAST
            self._rest -= step.repeats
            self._saved += TRIAL_SHARE * step.repeats
            self._forward.age(step.repeats)
            if self._rest <= 0 and self._saved >= (LOOK if self.whole else 0):
                self._begin_trial()
            if not learning:
                return
        count, drafting = len(step.ids), len(step.lengths) - step.lengths.count(0)
        self._with_prompts.add(float(step.prompt_rows > 0))
        if step.prompt_rows:
            step = self._without_prompts(step)
        if not drafting:
            self._compared, self._drafted, self._renew = True, 0, min(4 * self._renew, RENEW)
            if not step.prompt_rows:
                seconds = (step.draft + step.rest) / step.repeats
                self._forward.add(count, seconds, sets_pace=self.whole)
                self._plain.add(count, seconds)
            return
        self._drafted += 1
        rows = count + sum(step.nodes)
        if not step.prompt_rows:
            self._forward.add(rows, step.rest, sets_pace=self.whole)
        if not self.whole:
            drafted = [b for b, length in enumerate(step.lengths) if length]
            each = (np.array(values)[drafted] for values in (step.lengths, step.nodes, step.accepted))
            self._survival.learn([step.ids[b] for b in drafted], *each)
        tokens, plain = 1 + sum(step.accepted) / count, max(SHORTEST, self._plainly(count))
        just_timed = self.whole and not step.prompt_rows
        usual = self._forward.nearest(rows) if just_timed else self._forward.at(rows)
        self._late = self._late + 1 if step.catching_up else 0
        if 0 < self._late <= PATIENCE:
            self._enter(tokens - (step.draft + usual) / plain, bounded=False)  # a long prompt is no bad moment
            return
        if self._trial:
            self._trial -= 1
            if not self._trial:
                self._chosen = (), [], 0
        if drafting not in self._drafting:
            self._drafting[drafting] = Times(self._forward.pace)
            self._drafting[drafting].add(0, 0.0)
        levels = step.drawn if self.whole else max(step.lengths)
        self._drafting[drafting].add(levels, step.draft)
        usual += self._drafting[drafting].nearest(levels)
        self._steps += 1
        if not self.whole or self._steps > COLD:
            self._tokens.add(tokens)
            self._took.add(usual / plain)
            self._enter(tokens - usual / plain)
        self._turns, self._emitted = self._turns + count, self._emitted + count + sum(step.accepted)

    def _without_prompts(self, step: Step) -> Step:
        """Learn from a step in which prompts were read; the step with the times that it would have taken without."""
        tokens, rows = len(step.ids) + sum(step.nodes), step.prompt_rows
        whole, read = tokens + rows, rows if step.read_rows is None else step.read_rows
        grain = max(1, int(SAME * 2 ** int(math.log2(whole))))
        self._forward.add(round(whole / grain) * grain, step.rest)
        if read and not any(step.lengths) and not self.resting:  # a drafter that rests reads none
            self._reading.add(step.draft / read)
        draft = max(0.0, step.draft - read * self._reading.value)
        return replace(step, draft=draft, rest=step.rest - (self._forward.at(whole) - self._forward.at(tokens)))

    def _enter(self, gained: float, bounded: bool = True) -> None:
        """Into the account. What a drafter that ends its drafts itself owes has a bound: else one bad moment would end
        them for good."""
        least = min(self._saved, -MOST_SAVED) if self.whole and bounded else -math.inf
        self._saved = min(MOST_SAVED, max(least, self._saved + gained))

    def _begin_trial(self) -> None:
        self.state, self._trial = State.TRIAL, TRIAL_STEPS

    def _begin_rest(self, gain: float) -> None:
        """gain: of the best lengths over plain decoding, as predicted."""
        self._pause = min(2 * self._pause, LONGEST_REST) if self.state is State.TRIAL else FIRST_REST
        self.state, self._rest = State.RESTING, 0 if self.whole else self._pause
        if not self._told and gain and self._steps >= TRIAL_STEPS:  # 0: none was measured yet
            self._told = True
            log.warning(
                "drafts do not pay here: at best %.2f times the speed of plain decoding, at %.2f tokens a step and "
                "request so far. Decoding goes on without them; they are tried again from time to time. The text is "
                "not affected.",
                gain,
                self._emitted / self._turns,
            )

    def release(self, seq_id: int) -> None:
        """Forget a request; unknown ids are ignored."""
        self._survival.forget(seq_id)
