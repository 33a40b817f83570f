"""`Trials` decides when drafts are tried, go on, and pause; `Gains` averages what they gain. Both policies of
`draft_lengths` share them.

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

The account holds plain steps. It begins with `SAVED_FIRST`, and drafts add their gains, up to `MOST_SAVED`, and take
their losses. Each plain step of a pause adds `TRIAL_SHARE`. A trial is paid for when the balance is not negative.
"""

import logging
import math
from enum import Enum

from slipstream.engine.step_history import SHORTEST, Mean

log = logging.getLogger("slipstream")

TRIAL_STEPS = 3
"""Steps that draft before the drafter may rest (again)."""
TRIAL_SHARE = 0.0035
"""What trials may cost, as a share of plain decoding: the cost of a trial over this is the least length of a pause."""
SAVED_FIRST, MOST_SAVED = 16.0, 16.0
"""The first balance of the account, and its upper bound, in plain steps."""
LONGEST_REST = 4096
"""Tokens per request of the longest pause."""


class State(Enum):
    """See the drawing above."""

    TRIAL = "trial"
    DRAFTING = "drafting"
    RESTING = "resting"


class Trials:
    """Switches between the states above.

    first_pause  tokens per request of the first pause; pauses double as long as trials fail.
    look         balance from which drafts are tried again, once the pause is over.
    most_debt    bound of the debt. Without a bound, one very long step would end drafting for good.
    """

    def __init__(self, first_pause: int, look: float = 0.0, most_debt: float = math.inf):
        self.first_pause, self.look, self.most_debt = first_pause, look, most_debt
        self.state, self.left = State.TRIAL, TRIAL_STEPS  # steps that the trial drafts yet
        self.pause, self.rest = first_pause, 0  # tokens: of a pause, left of it
        self.saved = SAVED_FIRST

    @property
    def is_resting(self) -> bool:
        return self.state is State.RESTING

    def begin(self) -> None:
        """Begin a trial."""
        self.state, self.left = State.TRIAL, TRIAL_STEPS

    def begin_for_request(self) -> None:
        """A new request may profit from drafts: end the pause if its trial is paid for. The next one is short."""
        self.pause = self.first_pause
        if self.is_resting and self.saved >= 0:
            self.begin()

    def count_draft(self) -> bool:
        """Count a step that drafted. Return whether the trial ended with it."""
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
        """Add plain steps to the account. is_bounded: whether `most_debt` holds for them."""
        least = min(self.saved, -self.most_debt) if is_bounded else -math.inf
        self.saved = min(MOST_SAVED, max(least, self.saved + gained))

    def decide(self, pays: bool) -> None:
        """Go on drafting, or pause."""
        if pays:
            self.state, self.pause = State.DRAFTING, self.first_pause
        else:
            self.pause = min(2 * self.pause, LONGEST_REST) if self.state is State.TRIAL else self.first_pause
            self.state, self.rest = State.RESTING, self.pause


class Gains:
    """Averages the tokens of a request and drafting step, and the time of such a step, in plain steps. cold: number of
    first steps that are left out, because the drafter's weights are not in the processor's caches yet."""

    def __init__(self, cold: int) -> None:
        self.cold, self.steps = cold, 0
        self._tokens, self._took = Mean(64), Mean(64)
        self._turns, self._emitted = 0, 0  # requests of these steps, and their tokens, added up
        self.is_told = False

    @property
    def rate(self) -> float:
        """Tokens of recent steps that drafted over the plain steps that they took; 0 before the first."""
        return self._tokens.value / max(SHORTEST, self._took.value)

    def add(self, requests: int, accepted: int, took: float) -> float | None:
        """Add a step that drafted. Return its gain, in plain steps; None while the drafter is cold."""
        self.steps += 1
        self._turns, self._emitted = self._turns + requests, self._emitted + requests + accepted
        if self.steps <= self.cold:
            return None
        self._tokens.add(1 + accepted / requests)
        self._took.add(took)
        return 1 + accepted / requests - took

    def tell(self, gain: float) -> None:
        """Warn once that drafts do not pay. gain: of the best lengths over plain decoding; 0: none was measured yet."""
        if self.is_told or not gain or self.steps < TRIAL_STEPS:
            return
        self.is_told = True
        log.warning(
            "drafts do not pay here: at best %.2f times the speed of plain decoding, at %.2f tokens a step and request "
            "so far. Decoding goes on without them; they are tried again from time to time. The text is not affected.",
            gain,
            self._emitted / self._turns,
        )
