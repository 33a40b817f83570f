"""`DraftLengths` chooses a draft length for each request of a batch, from the times and gains of past steps.

A step with the draft lengths k_1..k_B yields B + sum of S_b(j), j <= k_b, expected tokens, where S_b(j) is the
probability that request b accepts its first j draft tokens. The step takes the time of drafting max(k_b) levels and of
a forward pass over B + sum of k_b rows. `LengthsFromRates` takes the lengths with the most expected tokens per second:
draft tokens of all requests compete for rows, the most probable first (the goodput of SmartSpec, Liu et al. 2406.14066,
section 4, with a length for each request). Length 0 for all is plain decoding. Drafting pauses if the predicted gain
over plain decoding is below 1 (after a trial: below 1 + `MARGIN`).

`LengthsFromPrices` is for drafters that end their drafts themselves, because they know more about a draft than past
acceptance shows. This policy tells them the cost of rows, and allows the longest draft. It pauses while the balance of
`Trials` is negative. A predicted gain is no use here: lookups, for example, draft only where a text repeats itself.

Both policies alternate timed plain steps with drafts, and pause when `Trials` says so. They have trials for each load:

    ┌───────┐ one step  ┌───────┐ ────────── timed ───────────────────────────▶ ┌──────┐
    │ FIRST │ ────────▶ │ PLAIN │                                               │ BEST │
    └───────┘           └───────┘ ◀─── drafting steps of `PlainTurns`, pause ── └──────┘

Nothing is measured beforehand. The probabilities S are learned from each request's own steps, starting from the rates
of earlier requests (`Survival`). Costs are learned from ratios of neighbouring steps, so another process on the machine
does not distort them (`StepTimes`). If a number of rows was never timed, its cost is estimated from neighbouring
numbers; for a mixture of experts, also from the number of experts that a pass is expected to read. Prompts must be read
anyway, so the time of their rows is not a cost of drafts (see `StepCosts.shares`). On a busy server nearly every step
has such rows.

Lengths depend on past steps only, never on the random numbers of the present step (see `Engine.add`), so every output
distribution is unchanged. But lengths depend on times, so under `rejection` a seed repeats a text only with fixed
lengths.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from slipstream.core.drafter import Budget
from slipstream.engine.draft_trials import MOST_SAVED, TRIAL_STEPS, Gains, Load, PlainTurns, State, Trials
from slipstream.engine.step_costs import StepCosts
from slipstream.engine.step_history import SHORTEST, Survival
from slipstream.engine.timed_step import Step

FIRST = 1
"""Largest draft length of the first steps that draft, when nothing is known yet."""
SHORT_CONTEXT, CHANGE, NEW_KIND = 512, 64, 256
"""Rows cost more in longer texts. So costs are learned separately for texts below this many tokens, below twice as
many, and so on. When the policy switches to other costs, these count as `CHANGE` steps older; costs that were copied
from the policy of another kind of request, as `NEW_KIND` steps older."""
MARGIN = 0.02
"""Smallest predicted gain with which drafting continues after a trial: 0.02 is 2 % faster than plain decoding, and
about the cost of trials."""
UNSURE = 16
"""Number of drafting steps before a plain step is timed again, while the cost of a plain step is doubtful."""
PATIENCE = 8
"""Steps in which a drafter catches up with the text are left out of the time of drafting. After this many such steps in
a row they count: the texts are then so short that catching up is the usual case."""
LEARN_LAST = 16
"""The last plain tokens of a pause, per request, whose times are learned. The next trial is compared with these
times."""

RelativeCost: TypeAlias = Callable[[float], float]


class LengthPolicy(ABC):
    """Chooses lengths, in the turns that the drawing above shows. keep: steps for which a choice is used while no
    request joins or leaves, because choosing takes 0.1 ms. relative_cost: see `StepCosts`."""

    keep: int

    def __init__(self, relative_cost: RelativeCost | None):
        self.costs, (self.trials, self.gains, self.turns) = StepCosts(relative_cost), self._begin()
        self._loads: dict[int, Load] = {}  # class of numbers of requests (see `use_load`)
        # The target updates this function, so all copies of the costs use the same one.
        self._shared = {id(relative_cost): relative_cost}
        self._all_costs: dict[int, StepCosts] = {}  # class of text lengths (see `SHORT_CONTEXT`) -> its costs
        # Ids of the requests, their lengths, and for how many steps these lengths were used.
        self._choice: tuple[tuple[int, ...], list[int], int] = ((), [], 0)
        self._is_compared = False  # whether a plain step was timed
        self._late = 0  # steps in a row in which a drafter caught up
        self._owed = 0.0  # cost of the drafter's other work since the last timed step

    def start_with(self, other: "LengthPolicy") -> None:
        """Start with the costs that another policy uses, if it knows the costs of drafts."""
        if other.costs.has_drafts:
            self.costs = deepcopy(other.costs, dict(self._shared))
            self.costs.forward.wait(NEW_KIND)
        self.gains.is_told = other.gains.is_told

    def use_costs(self, context: int) -> None:
        """Switch to the costs for texts of `context` tokens. At first these are a copy of the costs for the nearest
        length for which the costs of drafts are known."""
        size = (context // SHORT_CONTEXT).bit_length()
        self._all_costs = self._all_costs or {size: self.costs}
        known = self._all_costs.get(size)
        if known is self.costs:
            return
        if known is None or not known.has_drafts:
            timed = [each for each, costs in self._all_costs.items() if costs.has_drafts]
            near = self._all_costs[min(timed, key=lambda each: abs(each - size))] if timed else self.costs
            if known is None or timed:
                known = self._all_costs[size] = deepcopy(near, dict(self._shared))
        self.costs = known
        self.costs.forward.wait(CHANGE)
        self._choice = (), [], 0

    def use_load(self, requests: int) -> None:
        """Switch to the record of steps with about as many requests: 1, 2 to 3, 4 to 7, and so on. Drafts may pay for
        few requests and not for many, whose passes take longer with each row."""
        load = requests.bit_length()
        self._loads = self._loads or {load: Load(self.trials, self.gains, self.turns)}
        if load not in self._loads:
            self._loads[load] = self._begin()
        known = self._loads[load]
        if known.trials is not self.trials:
            known.gains.is_told |= self.gains.is_told
            (self.trials, self.gains, self.turns), self._choice = known, ((), [], 0)

    def note_join(self) -> None:
        """End pauses, where a trial is paid for."""
        for load in self._loads.values():
            load.trials.begin_for_request()

    @abstractmethod
    def _begin(self) -> Load:
        """Return the record of a load that is new."""

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
        """Choose a budget for the draft of each request, at most as deep as its limit. For `prompt_rows` and `forced`
        see `Step`."""
        lengths = self._lengths(ids, limits, prompt_rows, forced)
        return [replace(self.costs.price, depth=length) for length in lengths]

    def _lengths(self, ids: Seq[int], limits: Seq[int], prompt_rows: int, forced: int) -> list[int]:
        if self.trials.is_resting or not any(limits) or self.turns.is_due:
            return [0] * len(ids)
        if self.gains.steps < TRIAL_STEPS or not self._is_compared:
            return [min(FIRST, limit) for limit in limits]
        key, lengths, used = self._choice
        if key != tuple(ids) or used >= self.keep:
            self.costs.set_price(len(ids), self.gains.rate)
            used, (lengths, gain) = 0, self._best(ids, limits, prompt_rows, forced)
            if not self.trials.left:
                self.trials.decide(self._pays(gain))
            if self.trials.is_resting:
                self.gains.tell(gain)
                return [0] * len(ids)
        self._choice = tuple(ids), lengths, used + 1
        return list(map(min, lengths, limits))

    @property
    def speed(self) -> float:
        """The predicted speed, as a multiple of the speed of plain decoding."""
        return 1.0 if self.trials.is_resting else self.gains.rate or 1.0

    @abstractmethod
    def _best(self, ids: Seq[int], limits: Seq[int], prompt_rows: int, forced: int) -> tuple[list[int], float]:
        """Return the lengths to draft with, and their gain over plain decoding."""

    @abstractmethod
    def _pays(self, gain: float) -> bool:
        """Return whether to continue drafting after a trial."""

    def learn(self, step: Step) -> None:
        """Learn from a step: from its times, and from its numbers of accepted draft tokens."""
        if self.trials.is_resting and self.trials.wait > LEARN_LAST:
            self.costs.forward.wait(step.repeats)
        else:
            self.costs.add(step, not self.trials.is_resting)
        draft, aside = self.costs.of_drafting(step)
        self._owed += aside
        if self._owed and self.costs.forward.numbers:
            self.trials.add(-self._owed / self.costs.forward.of(len(step.ids)), is_bounded=False)
            self._owed = 0.0
        if any(step.lengths):
            self._learn_draft(step, draft)
            return
        if self.trials.is_resting:
            self.trials.count_plain(step.repeats)
            if not self.trials.is_resting:
                self._end_rest()
        self._is_compared = True
        self.turns.count_plain(step.repeats, self.gains, is_trial=self.trials.left > 0)

    def _end_rest(self) -> None:
        """Prepare for the end of a pause, in which the text may have changed."""
        return

    def _learn_draft(self, step: Step, draft: float) -> None:
        """Learn from a step that drafted. draft: its cost of drafting."""
        self.turns.drafted += 1
        if self.turns.drafted == UNSURE and not self.costs.forward.is_timed(len(step.ids)):
            self.turns.end()
        count, accepted = len(step.ids) + step.forced, sum(step.accepted)
        added, plain = self.costs.of_rows(step), self.costs.forward.of(count)
        self._late = self._late + 1 if step.catching_up else 0
        if 0 < self._late <= PATIENCE:  # the drafter reads a long prompt; the machine is not slow
            self.trials.add(accepted / count - (draft + added) / plain, is_bounded=False)
            return
        if self.trials.count_draft():
            self._choice = (), [], 0
        drafting = len(step.lengths) - step.lengths.count(0)
        draft = self.costs.add_drafting(drafting, self._levels(step), draft)
        gained = self.gains.add(count, accepted, 1 + (draft + added) / plain)
        if gained is not None:
            self.trials.add(gained)

    @abstractmethod
    def _levels(self, step: Step) -> int:
        """Return the number of levels that were drafted."""

    def release(self, seq_id: int) -> None:
        """Forget a request; unknown ids are ignored."""
        return


class LengthsFromRates(LengthPolicy):
    """Chooses lengths by the acceptance rates of each request. most: largest length. prior: assumed acceptance rate
    before any draft token was verified."""

    keep = 4

    def __init__(self, most: int = 8, prior: float = 0.6, relative_cost: RelativeCost | None = None):
        super().__init__(relative_cost)
        self.survival = Survival(most, prior)

    def _begin(self) -> Load:
        return Load(Trials(first_pause=32), Gains(cold=0), PlainTurns())

    def _best(self, ids: Seq[int], limits: Seq[int], prompt_rows: int, forced: int) -> tuple[list[int], float]:
        """Return the lengths with the most expected tokens per second, with at least one draft token."""
        count = len(ids)
        drafting = [b for b, limit in enumerate(limits) if limit > 0]
        members, reach = [ids[b] for b in drafting], np.array([limits[b] for b in drafting])
        survival = self.survival.of(members)
        places = np.arange(survival.shape[1])
        survival = survival * (places < reach[:, None])  # [D, most]
        width = self.survival.width(members)
        prompts, plain = self.costs.shares(count, prompt_rows, forced)
        depths = np.arange(1, max(limits) + 1)
        # For each depth of the draft, all its draft tokens, the most probable first: [depths, n].
        within = np.where(places < depths[:, None, None], survival, 0.0).reshape(len(depths), -1)
        order = -np.sort(-within, axis=1)
        rows = count + width * np.arange(1, order.shape[1] + 1)
        forward = np.maximum(self.costs.forward.estimate(rows + prompt_rows) - prompts, SHORTEST)
        seconds = forward + self.costs.levels(len(drafting)).estimate(depths)[:, None]
        rates = np.where(order > 0, (count + forced + np.cumsum(order, axis=1)) / seconds, 0.0)
        at = np.unravel_index(rates.argmax(), rates.shape)
        lengths = [0] * count
        for b, length in zip(drafting, (survival[:, : depths[at[0]]] >= order[at]).sum(1).tolist(), strict=True):
            lengths[b] = length
        return lengths, float(rates[at]) * plain / (count + forced)

    def _pays(self, gain: float) -> bool:
        return gain >= (1.0 if self.trials.state is State.DRAFTING else 1 + MARGIN)

    def _end_rest(self) -> None:
        self.survival.fade()

    def _learn_draft(self, step: Step, draft: float) -> None:
        drafted = [b for b, length in enumerate(step.lengths) if length]
        each = (np.array(values)[drafted] for values in (step.lengths, step.nodes, step.accepted))
        self.survival.learn([step.ids[b] for b in drafted], *each)
        super()._learn_draft(step, draft)

    def _levels(self, step: Step) -> int:
        return max(step.lengths)

    def release(self, seq_id: int) -> None:
        self.survival.forget(seq_id)


class LengthsFromPrices(LengthPolicy):
    """Tells a drafter that ends its drafts itself the price of rows, and allows it the longest draft."""

    keep = 16

    def __init__(self, relative_cost: RelativeCost | None = None) -> None:
        super().__init__(relative_cost)

    def _begin(self) -> Load:
        return Load(Trials(0, look=0.5, most_debt=MOST_SAVED), Gains(cold=4), PlainTurns())

    def _best(self, ids: Seq[int], limits: Seq[int], prompt_rows: int, forced: int) -> tuple[list[int], float]:
        return list(limits), self.gains.rate

    def _pays(self, gain: float) -> bool:
        return self.trials.saved >= 0

    def _levels(self, step: Step) -> int:
        return step.drawn


class DraftLengths:
    """Keeps the policies for draft lengths, with what they have learned, from one engine to the next. There is a policy
    for each kind of request (see `use`), because drafts may pay for one kind and not for another.

    most    longest draft.
    prior   assumed acceptance rate before any draft token was verified.
    policy  the policy in use.
    """

    def __init__(self, most: int = 8, prior: float = 0.6):
        self.most, self.prior = most, prior
        self._prices_rows = False
        self._relative_cost: RelativeCost | None = None
        self.policy = self._new_policy()
        self._policies: dict[int, LengthPolicy] = {}

    def serve(self, prices_rows: bool, relative_cost: RelativeCost | None = None) -> None:
        """Use policies that fit a drafter (see `DrafterTraits.prices_rows`) and a target (see `Capabilities`); the
        present policies stay if they fit."""
        if prices_rows != self._prices_rows or relative_cost is not self._relative_cost:
            self._prices_rows, self._relative_cost = prices_rows, relative_cost
            self.policy, self._policies = self._new_policy(), {}

    def _new_policy(self) -> LengthPolicy:
        if self._prices_rows:
            return LengthsFromPrices(self._relative_cost)
        return LengthsFromRates(self.most, self.prior, self._relative_cost)

    def use(self, kind: int, context: int, requests: int) -> None:
        """Use the policy for requests of this kind, its costs for texts of `context` tokens, and its record of as many
        requests. Kinds differ in the time of plain decoding, and in how many draft tokens are accepted: 0 takes the
        largest logit, 1 samples with a temperature, 2 does more than that. A step of several kinds is of the last
        one."""
        self._policies = self._policies or {kind: self.policy}
        if kind not in self._policies:
            self._policies[kind] = self._new_policy()
            self._policies[kind].start_with(self.policy)
        self.policy = self._policies[kind]
        self.policy.use_costs(context)
        self.policy.use_load(requests)

    @property
    def resting(self) -> bool:
        """True while drafting is paused; the drafter then does not see the text."""
        return self.policy.trials.is_resting

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
        """Choose budgets as `LengthPolicy.choose`."""
        return self.policy.choose(ids, limits, prompt_rows, forced)

    def learn(self, step: Step) -> None:
        self.policy.learn(step)

    def note_join(self) -> None:
        for policy in self._policies.values():
            policy.note_join()

    def release(self, seq_id: int) -> None:
        for policy in self._policies.values():
            policy.release(seq_id)
