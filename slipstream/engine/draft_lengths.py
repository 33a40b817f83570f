"""`DraftLengths`: how many draft tokens each request of a batch gets, chosen from what past steps took and gave.

A step with the draft lengths k_1..k_B yields  B + sum of S_b(j), j <= k_b  expected tokens, where S_b(j) is the
probability that request b accepts its first j draft tokens. It takes the time of drafting max(k_b) levels and of a
forward over B + sum of k_b rows. The lengths with the most expected tokens per second are taken: draft tokens of all
requests compete for rows, the most probable first (the goodput of SmartSpec, Liu et al. 2406.14066, section 4, with the
lengths of single requests). Length 0 for all is plain decoding.

Rows of prompts that are read in the same step have to be read at some time, so the time that they owe is no cost of
the tokens (see `_without_drafts`). On a busy server nearly every step has such rows.

Requests of other drafters in the same step have their rows, their tokens and the seconds of their drafting there: what
they were in the last steps, they are taken to be in the next one (see `Others`). So the lengths of each drafter are
chosen for the tokens of all per second, given those of the others.

Nothing is measured beforehand. The survival S of each request is learned from its own steps, starting from that of the
requests before it (see `Survival`). Times are medians of recent steps; what was never timed is estimated from its
neighbours. The first steps draft, then one is plain, and now and then another. If drafts do not pay, the drafter rests,
and is tried again after pauses that double and that are long enough for trials to cost little.

Lengths depend on past steps only, never on tokens that were drawn, so every output distribution is unchanged. They
depend on times, though: under `rejection`, a seed then gives the same text only with fixed lengths.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.engine.step_times import Mean, Times
from slipstream.engine.survival import Survival

log = logging.getLogger("slipstream")

FIRST = 4
"""Draft tokens of the first steps that draft."""
TRIAL_STEPS = 3
"""Steps that draft before the drafter may rest (again)."""
TRIAL_SHARE = 0.01
"""What trials may cost, as a share of plain decoding: a pause is at least as long as its trial cost over this."""
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
SHORTEST = 1e-9
"""Seconds that a forward takes at least, whatever estimates and the clock say."""
LEARN_LAST = 64
"""Plain tokens per request at the end of a rest whose times are learned: the next trial is compared with them. Learning
from all of a rest took 1 % of the time of a target of 14M parameters with int8 weights."""
KEEP = 4
"""Steps for which lengths are kept while nobody joins or leaves: choosing takes a tenth of a millisecond."""


@dataclass(frozen=True)
class Others:
    """Requests of other drafters in a step. rows: theirs in the forward, draft tokens included; tokens: that they
    gained; seconds: of their drafting."""

    requests: float = 0
    rows: float = 0
    tokens: float = 0
    seconds: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether they draft nothing, or hardly ever."""
        return self.rows < 1.05 * self.requests or not self.requests


class Company:
    """What a request of another drafter was in the last steps, on average."""

    def __init__(self) -> None:
        self._rows, self._tokens, self._seconds = Mean(16), Mean(16), Mean(16)

    def add(self, others: Others) -> None:
        if others.requests:
            self._rows.add(others.rows / others.requests)
            self._tokens.add(others.tokens / others.requests)
            self._seconds.add(others.seconds / others.requests)

    def of(self, requests: int) -> Others:
        """Of so many, as far as is known: they have a row and a token each."""
        rows, tokens = max(1.0, self._rows.value), max(1.0, self._tokens.value)
        return Others(requests, requests * rows, requests * tokens, requests * self._seconds.value)


@dataclass(frozen=True)
class _Cost:
    """What a step of a trial took and gave. others: those that drafted in it."""

    seconds: float
    requests: int
    accepted: int
    others: Others


@dataclass
class _Counts:
    """Of all steps that drafted, for what the user is told. turns: the requests of each step, added up."""

    steps: int = 0
    turns: int = 0
    tokens: int = 0


@dataclass
class Step:
    """What a step was and took. One entry of `lengths`, `nodes` and `accepted` for each request: the length that it was
    given, its draft tokens, and how many of them were accepted. draft, rest: seconds of drafting, and of all else.
    repeats: plain steps in this call. catching_up: whether a drafter read what it had not followed, such as a prompt:
    that takes its time once, however long the drafts are. prompt_rows: rows of prompts in the forward, of requests that
    are not among `ids`; read_rows: those that the drafter reads, all unless it is given. others: requests of other
    drafters; the seconds of their drafting are in neither `draft` nor `rest`."""

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
    others: Others = Others()


@dataclass
class DraftLengths:
    """Lengths for the requests of one drafter. Kept from one engine to the next.

    most   longest draft.
    prior  assumed acceptance rate before any draft token was verified.
    """

    most: int = 8
    prior: float = 0.7
    resting: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._survival = Survival(self.most, self.prior)
        self._plain, self._forward = Times(), Times()  # by requests, by rows
        self._compared = False  # whether a plain step was timed
        self._company = Company()
        self._with_prompts = Mean(64)  # the share of steps that read prompts
        self._reading = Mean(16)  # seconds in which the drafter reads a row of a prompt
        self._drafting: dict[int, Times] = {}  # by requests that draft: by levels
        # Ids, lengths, and for how many steps they were used.
        self._chosen: tuple[tuple[int, ...], list[int], int] = ((), [], 0)
        self._drafted, self._renew = 0, TRIAL_STEPS  # steps that drafted since the last plain one, until the next one
        self._trial = TRIAL_STEPS  # steps that draft before the drafter may rest
        self._pays = False  # whether the last choice was to draft; then a small loss is taken for noise
        self._rest, self._pause = 0, FIRST_REST
        self._tried: list[_Cost] = []  # each step of the trial
        self._caught_up: list[_Cost] = []  # each step of it in which a drafter caught up
        self._late = 0  # for how many steps in a row one did
        self._counts, self._told = _Counts(), False

    # --- choosing ------------------------------------------------------------------------------------------------

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, others: int = 0) -> list[int]:
        """Draft lengths for these requests, each at most its limit. prompt_rows: see `Step`. others: how many requests
        of other drafters are in the step."""
        limits = [min(limit, self.most) for limit in limits]
        none = [0] * len(ids)
        if self.resting or not any(limits):
            return none
        if self._drafted >= self._renew:
            return none
        if not self._drafting or not self._compared:
            return [min(FIRST, limit) for limit in limits]
        key, lengths, used = self._chosen
        if key != tuple(ids) or used >= KEEP:
            found, gain = self._best(ids, limits, prompt_rows, self._company.of(others))
            if not self._trial:
                if gain < 1 + (0 if self._pays else MARGIN):
                    self._begin_rest(gain)
                    return none
                if not self._pays:
                    self._pays, self._pause, self._caught_up = True, FIRST_REST, []
            lengths, used = found, 0
        self._chosen = tuple(ids), lengths, used + 1
        return list(map(min, lengths, limits))

    def _best(self, ids: Seq[int], limits: Seq[int], prompt_rows: int, others: Others) -> tuple[list[int], float]:
        """The lengths with the most expected tokens per second, at least one draft token, and their gain over plain
        decoding."""
        drafting = [b for b, limit in enumerate(limits) if limit > 0]
        own, reach = [ids[b] for b in drafting], np.array([limits[b] for b in drafting])
        survival = self._survival.of(own) * (np.arange(self.most) < reach[:, None])  # [D, most]
        width = self._survival.width(own)
        levels = self._levels(len(drafting))
        count, others = _plain_ones(len(ids), others)
        owed, plain = self._without_drafts(count, others, prompt_rows)
        tokens, rows = count + others.tokens, count + others.rows  # without drafts
        depths = np.arange(1, max(limits) + 1)
        # For each depth of the draft, all its draft tokens, the most probable first: [depths, n].
        within = np.where(np.arange(self.most) < depths[:, None, None], survival, 0.0).reshape(len(depths), -1)
        order = -np.sort(-within, axis=1)
        run = rows + width * np.arange(1, order.shape[1] + 1)
        forward = np.maximum(self._forward.estimate(run + prompt_rows) - owed, SHORTEST)
        seconds = forward + levels.estimate(depths)[:, None] + others.seconds
        rates = np.where(order > 0, (tokens + np.cumsum(order, axis=1)) / seconds, 0.0)
        at = np.unravel_index(rates.argmax(), rates.shape)
        lengths = (survival[:, : depths[at[0]]] >= order[at]).sum(1).tolist()
        found = [0] * len(ids)
        for b, length in zip(drafting, lengths, strict=True):
            found[b] = length
        return found, float(rates[at]) * plain / tokens

    def _levels(self, drafting: int) -> Times:
        """Times of drafting with about so many requests."""
        return self._drafting[min(self._drafting, key=lambda known: abs(known - drafting))]

    def _plainly(self, count: float) -> float:
        """Seconds of a plain step."""
        return self._plain.nearest(count) if len(self._plain) else float(self._forward.estimate(np.array([count]))[0])

    def _beside(self, count: float, others: Others) -> float:
        """Seconds of a step in which only the others draft."""
        if not others.requests:
            return self._plainly(count)
        return float(self._forward.estimate(np.array([count + others.rows]))[0]) + others.seconds

    def _without_drafts(self, count: float, others: Others, prompt_rows: int) -> tuple[float, float]:
        """Of a step over the pending tokens of so many requests, the others and these rows: (seconds that its prompts
        owe, seconds that are left). If every step reads prompts, they would take it without the tokens, and owe what it
        takes without them. If few do, there would be a step without the prompts, and they owe what they add to it."""
        if not prompt_rows:
            return 0.0, self._beside(count, others)
        rows = count + others.rows
        prompts, tokens, both = self._forward.estimate(np.array([prompt_rows, rows, rows + prompt_rows])).tolist()
        added = both - tokens
        owed = added + self._with_prompts.value * (prompts - added)
        return owed, both - owed + others.seconds

    # --- learning ------------------------------------------------------------------------------------------------

    @property
    def learning(self) -> bool:
        """Whether `learn` is to be told of the next step. If not, tell `rest` how many tokens it gave."""
        return not self.resting or self._rest <= LEARN_LAST

    def rest(self, tokens: int) -> None:
        """Count tokens per request that were decoded plainly while the drafter rests."""
        self._rest -= tokens
        self._forward.age(tokens)
        if self._rest <= 0:
            self.resting, self._trial = False, TRIAL_STEPS

    def learn(self, step: Step) -> None:
        """Take note of a step: of its time, and of what became of its draft tokens."""
        drafting = sum(length > 0 for length in step.lengths)
        if self.resting:
            self.rest(step.repeats)
        self._company.add(step.others)
        self._with_prompts.add(float(step.prompt_rows > 0))
        if step.prompt_rows:
            step = self._without_prompts(step)
        count, others = _plain_ones(len(step.ids), step.others)
        own = (step.draft + step.rest) / step.repeats
        if not drafting:
            self._compared, self._drafted, self._renew = True, 0, min(4 * self._renew, RENEW)
            if not step.prompt_rows:
                self._forward.add(count + int(others.rows), own)
                if not others.requests:
                    self._plain.add(count, own)
            return
        self._drafted += 1
        if not step.prompt_rows:
            self._forward.add(count + int(others.rows) + sum(step.nodes), step.rest)
        drafted = [b for b, length in enumerate(step.lengths) if length]
        each = (np.array(values)[drafted] for values in (step.lengths, step.nodes, step.accepted))
        self._survival.learn([step.ids[b] for b in drafted], *each)
        cost = _Cost(own + others.seconds, count, sum(step.accepted), others)
        self._late = self._late + 1 if step.catching_up else 0
        if 0 < self._late <= PATIENCE:
            self._caught_up.append(cost)
            return
        if self._trial:
            self._trial -= 1
            self._tried.append(cost)
            if not self._trial:
                self._chosen = (), [], 0
        if drafting not in self._drafting:
            self._drafting[drafting] = Times()
            self._drafting[drafting].add(0, 0.0)
        self._drafting[drafting].add(max(step.lengths), step.draft)
        found = self._counts
        found.steps += 1
        found.turns += count
        found.tokens += count + sum(step.accepted)

    def _without_prompts(self, step: Step) -> Step:
        """Learn from a step in which prompts were read; the step with the times that it would have taken without."""
        others, rows = len(step.ids) + sum(step.nodes) + int(step.others.rows), step.prompt_rows
        whole, read = others + rows, rows if step.read_rows is None else step.read_rows
        grain = max(1, int(SAME * 2 ** int(math.log2(whole))))
        self._forward.add(round(whole / grain) * grain, step.rest)
        if read and not any(step.lengths):
            self._reading.add(step.draft / read)
        draft = max(0.0, step.draft - read * self._reading.value)
        without, with_them = self._forward.estimate(np.array([others, whole])).tolist()
        return replace(step, draft=draft, rest=step.rest - (with_them - without))

    def _begin_rest(self, gain: float) -> None:
        """gain: of the best lengths over plain decoding, as predicted."""
        self.resting, self._pays = True, False
        tried, caught_up = ([self._lost(cost) for cost in costs] for costs in (self._tried, self._caught_up))
        lost = sum(max(0.0, each) for each in caught_up) + TRIAL_STEPS * statistics.median_low(tried or [0.0])
        self._pause = min(2 * self._pause, LONGEST_REST) if lost > 0 else FIRST_REST
        self._rest = max(self._pause, int(lost / TRIAL_SHARE))
        self._tried, self._caught_up = [], []
        found = self._counts
        if not self._told and found.steps >= TRIAL_STEPS:
            self._told = True
            log.warning(
                "drafts do not pay here: at best %.2f times the speed of plain decoding, at %.2f tokens a step and "
                "request so far. Decoding goes on without them; they are tried again from time to time. The text is "
                "not affected.",
                gain,
                found.tokens / found.turns,
            )

    def _lost(self, cost: _Cost) -> float:
        """Plain steps that a step took beyond what it gained."""
        tokens = cost.requests + cost.others.tokens
        plain = max(SHORTEST, self._beside(cost.requests, cost.others))
        return cost.seconds / plain - 1 - cost.accepted / tokens

    def release(self, seq_id: int) -> None:
        """Forget a request; unknown ids are ignored."""
        self._survival.forget(seq_id)


def _plain_ones(count: int, others: Others) -> tuple[int, Others]:
    """Others that draft nothing are like requests of one's own that draft nothing."""
    return (count + int(others.requests), Others()) if others.plain else (count, others)
