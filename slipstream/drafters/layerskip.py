"""LayerSkip: the target drafts with its own first layers, the final norm and the head (Elhoushi et al. 2404.16710).

There is no second model and no second cache: what drafting computed is the beginning of what verification needs, and
`Decoder` resumes there (section 4.3; see `targets.early_exit`). It pays on targets that were trained for it, with
layer dropout and an early-exit loss; on others the exits rarely agree with the whole model, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import Strict, check_integer
from slipstream.core.sequence import Sequence
from slipstream.core.target import EARLY_EXIT, Target, TargetOut, needed
from slipstream.drafters.chains import Chains
from slipstream.drafters.control import Control
from slipstream.errors import ParameterError

log = logging.getLogger("slipstream")

JUDGED = 256
"""Guesses after which an exit that was given, not measured, is held against what breaks even."""


@dataclass(frozen=True)
class LayerSkipConfig(Strict):
    """exit     layers that draft, 1 to one less than the target has; "auto" measures every exit on a short greedy text
             when the drafter is made, and takes the one that promises most.
    longest  most guesses of a draft; None: with "auto" the length that promises most, else as many as asked for.
    control  where a draft ends: "fixed", "confidence" or "gain", with threshold, draft_cost and row_cost as in
             `Control`; draft_cost None: as measured with "auto", else the share of the layers.
    text     token ids for "auto" to measure on; None: a text of the target's own.
    """

    exit: int | str = "auto"
    longest: int | None = None
    control: str = "fixed"
    threshold: float = 0.3
    draft_cost: float | None = None
    row_cost: float = 0.05
    text: Seq[int] | None = None

    def __post_init__(self) -> None:
        if self.exit != "auto":
            check_integer("exit", self.exit, 1)
        if self.longest is not None:
            check_integer("longest", self.longest, 1)
        if self.text is not None and len(self.text) < 2:
            raise ParameterError(f"text has {len(self.text)} tokens, at least 2 are needed to measure exits on")
        self.length(1.0)  # refuses what it does not know

    def length(self, cost: float) -> Control:
        """The control, where one guess costs that share of a plain step."""
        return Control(
            self.control, self.threshold, cost if self.draft_cost is None else self.draft_cost, self.row_cost
        )


class LayerSkipDrafter:
    """target: the one that verifies; it must declare `early_exit`. `found` holds what "auto" measured, else nothing.

    Raises PairError for a target that cannot leave early."""

    name = "layerskip"
    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, config: LayerSkipConfig | None = None):
        self.config = config or LayerSkipConfig()
        self.target = needed(target.capabilities.early_exit, target, EARLY_EXIT, "drafter 'layerskip'")
        self._multi_step, layers = target.capabilities.multi_step, self.target.layers
        self.device, self.width = target.device, target.vocab_size
        self.multi_step = self._multi_step is not None
        self.longest = self.config.longest
        self.found: list[Any] = []
        self._watching = self.config.exit != "auto"
        if isinstance(self.config.exit, int):
            self.exit, self.cost = self.config.exit, self.config.exit / layers
            if not 1 <= self.exit < layers:
                raise ParameterError(
                    f"exit is {self.exit}, the target has {layers} layers", fix=f"choose 1 to {layers - 1}, or 'auto'"
                )
        else:
            self._measure(layers)
        self._chains = Chains(self, target.vocab_size, self.config.length(self.cost))
        self._shown: dict[int, list[int]] = {}  # last draft of each sequence
        self._judged = self._right = 0

    def _measure(self, layers: int) -> None:
        from slipstream.targets.exits import measure_exits

        self.found = measure_exits(self.target, self.config.text)
        best = max(self.found, key=lambda e: e.speedup)
        self.exit, self.cost = best.layers, best.cost
        self.longest = self.longest or best.gamma
        log.info(
            "layerskip leaves after %d of %d layers: agreement %.0f %%, cost %.0f %% of a step, drafts of %d, expected "
            "speed-up %.2f (all: %s)",
            best.layers,
            layers,
            100 * best.agreement,
            100 * best.cost,
            best.gamma,
            best.speedup,
            ", ".join(f"{e.layers}: {e.agreement:.2f}/{e.cost:.2f}" for e in self.found),
        )
        if best.agreement <= best.cost:
            self._warn(best.agreement, layers)

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        depth = [self._depth(seq, most) for seq, most in zip(seqs, budget, strict=True)]
        draft = self._chains.draft(seqs, depth)
        if self._watching:
            for b, seq in enumerate(seqs):
                self._shown[seq.id] = draft.ids[draft.splits[b] : draft.splits[b + 1]]
        return draft

    def _depth(self, seq: Sequence, most: int) -> int:
        """Pending tokens beyond a chunk are a prompt's: the target runs them in pieces, and nothing ahead."""
        if most <= 0 or len(seq.tokens) - seq.kv_len > self.target.max_pending:
            return 0
        return most if self.longest is None else min(most, self.longest)

    def room(self, seq: Sequence) -> int:
        return self.target.context - len(seq.tokens)

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """See `chains.Source`."""
        return self.target.run_first_layers(seqs, chains, self.exit)

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        """See `chains.Source`."""
        assert self._multi_step is not None
        return self._multi_step.decode_steps(seqs, steps, sampling, self.exit)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """The cache is the target's own. Only an exit that was not measured is watched, until it is known."""
        if not self._watching:
            return
        for b, seq in enumerate(seqs):
            shown, said = self._shown.pop(seq.id, []), seq.tokens[-len(verdict.path[b]) - 1 :]
            right = next((i for i, pair in enumerate(zip(shown, said, strict=False)) if pair[0] != pair[1]), None)
            known = min(len(shown), len(said))
            self._right += known if right is None else right
            self._judged += known if right is None else right + 1
        if self._judged >= JUDGED:
            self._watching = False
            self._shown.clear()
            if self._right <= self.cost * self._judged:
                self._warn(self._right / self._judged, self.target.layers)

    def _warn(self, agreement: float, layers: int) -> None:
        log.warning(
            "layerskip will be slower than plain decoding here: after %d of %d layers %.0f %% of the guesses stand, "
            "and each costs %.0f %% of a step, so more than %.0f %% would have to stand. The text is not affected. "
            "Fix: a target trained with early exits, or another drafter.",
            self.exit,
            layers,
            100 * agreement,
            100 * self.cost,
            100 * self.cost,
        )

    def release(self, seq_id: int) -> None:
        self._shown.pop(seq_id, None)


def make(target: Target, **options: Any) -> LayerSkipDrafter:
    """See `registry`; options as in `LayerSkipConfig`."""
    return LayerSkipDrafter(target, LayerSkipConfig(**options))
