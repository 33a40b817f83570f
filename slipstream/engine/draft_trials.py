"""`Trials` decides when drafting is tried, continues and pauses; `Gains` averages the gains of drafts; `PlainTurns`
decides when a plain step is timed between drafts. Both policies of `draft_lengths` use them.

              TRIAL_STEPS steps drafted, and they pay
    ┌───────┐ ───────────────────────────────────────▶ ┌──────────┐
    │ TRIAL │                                          │ DRAFTING │ ──┐
    └───────┘ ◀──┐                                     └──────────┘ ◀─┘
        │        │ the pause is over, and the balance        │    they pay
        │        │ is at least `look`; or a request          │
        │        │ joins, and it is not negative             │ they do not pay
        │        │                                           │
        │        └────────────── ┌─────────┐ ◀───────────────┘
        └──────────────────────▶ │ RESTING │
             they do not pay     └─────────┘

The balance is in plain steps. It begins with `SAVED_FIRST`. Each drafting step adds its gain, up to `MOST_SAVED`, or
subtracts its loss. Each plain step of a pause adds `TRIAL_SHARE`. A trial is paid for if the balance is not negative.
"""

import logging
import math
from enum import Enum
from typing import NamedTuple

from slipstream.engine.step_history import SHORTEST, Mean

log = logging.getLogger("slipstream")

TRIAL_STEPS = 3
"""Number of drafting steps before drafting may pause (again)."""
TRIAL_SHARE = 0.0035
"""Time that trials may cost, divided by the time of plain decoding. A pause is at least as long as the trial's cost
divided by this number."""
SAVED_FIRST, MOST_SAVED = 16.0, 16.0
"""The first balance, and its upper bound, in plain steps."""
LONGEST_REST = 4096
"""Length of the longest pause, in tokens per request."""
LEAST, MOST, LOST = 8, 96, 0.01
"""Smallest and largest number of drafting steps before a plain step is timed again, except in trials; and the share of
the time that timed plain steps may lose. If drafts gain little, plain steps lose little, and are timed often, because a
small error of their cost then decides whether drafts pay."""


class State(Enum):
    """The states of the drawing above."""

    TRIAL = "trial"
    DRAFTING = "drafting"
    RESTING = "resting"


class Trials:
    """Switches between the states above.

    first_pause  tokens per request of the first pause; the pause doubles after each failed trial.
    look         balance from which drafting is tried again when a pause is over.
    most_debt    bound of the debt. Without a bound, one very long step would stop drafting for good.
    """

    def __init__(self, first_pause: int, look: float = 0.0, most_debt: float = math.inf):
        self.first_pause, self.look, self.most_debt = first_pause, look, most_debt
        self.state, self.left = State.TRIAL, TRIAL_STEPS  # left: drafting steps that the trial still has
        self.pause, self.rest = first_pause, 0  # tokens: of the next pause, and left in this one
        self.saved = SAVED_FIRST

    @property
    def is_resting(self) -> bool:
        return self.state is State.RESTING

    @property
    def wait(self) -> float:
        """The number of plain steps before drafting is tried again, if no request joins."""
        return max(self.rest, (self.look - self.saved) / TRIAL_SHARE)

    def begin(self) -> None:
        """Begin a trial."""
        self.state, self.left = State.TRIAL, TRIAL_STEPS

    def begin_for_request(self) -> None:
        """End the pause if a trial is paid for, because a new request may profit from drafts. The next pause is
        short."""
        self.pause = self.first_pause
        if self.is_resting and self.saved >= 0:
            self.begin()

    def count_draft(self) -> bool:
        """Count a drafting step. Return whether it ended the trial."""
        if not self.left:
            return False
        self.left -= 1
        return not self.left

    def count_plain(self, steps: int) -> None:
        """Count plain steps of a pause."""
        self.rest -= steps
        self.saved += TRIAL_SHARE * steps
        if self.rest <= 0 and self.saved >= self.look:
            self.begin()

    def add(self, gained: float, is_bounded: bool = True) -> None:
        """Add plain steps to the balance. is_bounded: whether the debt stays within `most_debt`."""
        least = min(self.saved, -self.most_debt) if is_bounded else -math.inf
        self.saved = min(MOST_SAVED, max(least, self.saved + gained))

    def decide(self, pays: bool) -> None:
        """Continue drafting if it pays, or pause."""
        if pays:
            self.state, self.pause = State.DRAFTING, self.first_pause
        else:
            self.pause = min(2 * self.pause, LONGEST_REST) if self.state is State.TRIAL else self.first_pause
            self.state, self.rest = State.RESTING, self.pause


class Gains:
    """Averages the tokens per request of drafting steps, and their time, divided by the time of a plain step. cold:
    number of first steps to leave out, because the drafter's weights are not in the processor's caches yet."""

    def __init__(self, cold: int) -> None:
        self.cold, self.steps = cold, 0
        self._tokens, self._took = Mean(64), Mean(64)
        self._turns, self._emitted = 0, 0  # sums over drafting steps: requests, tokens
        self.is_told = False

    @property
    def rate(self) -> float:
        """Tokens of recent drafting steps, divided by the number of plain steps that take as long; 0 before the first
        drafting step."""
        return self._tokens.value / max(SHORTEST, self._took.value)

    @property
    def lost_by_plain_step(self) -> float:
        """Time that a plain step loses to drafts, divided by the time of a drafting step; below 0 if it gains time."""
        return (1 - 1 / max(SHORTEST, self.rate)) / max(SHORTEST, self._took.value)

    def add(self, requests: int, accepted: int, took: float) -> float | None:
        """Add a drafting step. took: its time, in plain steps. Return its gain, in plain steps; None for the first
        `cold` steps."""
        self.steps += 1
        self._turns, self._emitted = self._turns + requests, self._emitted + requests + accepted
        if self.steps <= self.cold:
            return None
        self._tokens.add(1 + accepted / requests)
        self._took.add(took)
        return 1 + accepted / requests - took

    def tell(self, gain: float) -> None:
        """Warn once that drafts do not pay. gain: gain of the best lengths over plain decoding; 0: not measured yet."""
        if self.is_told or not gain or self.steps < TRIAL_STEPS:
            return
        self.is_told = True
        log.warning(
            "drafts do not pay here: at best %.2f times the speed of plain decoding (prompts not counted), at %.2f "
            "tokens a step and request so far. Decoding goes on without drafts and tries them again from time to time. "
            "The text is not affected.",
            gain,
            self._emitted / self._turns,
        )


class PlainTurns:
    """Decides when a plain step is timed again: after 1 drafting step in a trial, then after more and more.

    drafted  number of drafting steps since the last plain step.
    """

    def __init__(self) -> None:
        self.drafted, self._most = 0, 1

    @property
    def is_due(self) -> bool:
        return self.drafted >= self._most

    def end(self) -> None:
        """Let the next step be plain."""
        self.drafted = self._most

    def count_plain(self, steps: int, gains: Gains, is_trial: bool) -> None:
        """Count a call of this many plain steps. The next plain steps will be in a call of as many."""
        enough = math.ceil(steps * gains.lost_by_plain_step / LOST) if gains.steps >= MOST else MOST
        self.drafted, self._most = 0, 1 if is_trial else min(4 * self._most, max(LEAST, enough), MOST)


class Load(NamedTuple):
    """Records steps with about as many requests."""

    trials: Trials
    gains: Gains
    turns: PlainTurns
