"""LayerSkip: the target drafts with its own first layers, final norm and lm_head (Elhoushi et al. 2404.16710).

There is no second model and no second KV cache: verification needs the same first layers, so `Decoder` resumes after
them (section 4.3; see `targets.early_exit`). This saves time on targets that were trained with layer dropout and an
early-exit loss. On other targets, an early exit rarely agrees with the whole model, and a warning is logged.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.params import Strict, check_integer
from slipstream.core.sequence import Sequence
from slipstream.core.target import EARLY_EXIT, Target, require
from slipstream.drafters.chains import Chains
from slipstream.errors import ParameterError

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class LayerSkipConfig(Strict):
    """exit     number of layers that draft, less than the target has; "auto": measure every exit on a short greedy text
    when the drafter is created, take the exit with the highest expected speed-up, and limit drafts to the length at
    which it is reached."""

    exit: int | str = "auto"

    def __post_init__(self) -> None:
        if self.exit != "auto":
            check_integer("exit", self.exit, 1)


class LayerSkipDrafter(Drafter):
    """Drafts with the target's first layers. exits: the exits that "auto" measured.

    Raises PairError for a target without early exit."""

    name = "layerskip"
    traits = DrafterTraits(chains_only=True)

    def __init__(self, target: Target, config: LayerSkipConfig | None = None):
        self.config = config or LayerSkipConfig()
        self.target, can = target, target.capabilities
        self._early = require(can.early_exit, target, EARLY_EXIT, "drafter 'layerskip'")
        self._multi_step, layers = can.multi_step, self._early.layers
        self.device, self.width = target.device, target.vocab_size
        self.multi_step = self._multi_step is not None
        self.exits: list[Any] = []
        if isinstance(self.config.exit, int):
            self.exit = self.config.exit
            if not 1 <= self.exit < layers:
                raise ParameterError(
                    f"exit is {self.exit}, but the target has {layers} layers",
                    fix=f"give 1 to {layers - 1}, or 'auto'",
                )
        else:
            self._measure(layers)
        self._chains = Chains(self, target.vocab_size)

    def _measure(self, layers: int) -> None:
        from slipstream.targets.target_costs import measure_exits

        self.exits = measure_exits(self.target)
        best = max(self.exits, key=lambda e: e.speedup)
        self.exit, self.traits = best.layers, replace(self.traits, longest=best.gamma)
        seen = ", ".join(f"{e.layers}: {e.agreement:.2f}/{e.cost:.2f}" for e in self.exits)
        log.info(
            f"layerskip exits after {best.layers} of {layers} layers: agreement {best.agreement:.0%}, cost "
            f"{best.cost:.0%} of a decode step, {best.gamma} draft tokens, expected speed-up {best.speedup:.2f} "
            f"(all: {seen})"
        )
        if best.agreement <= best.cost:
            log.warning(
                f"layerskip will be slower than plain decoding here: after {best.layers} of {layers} layers "
                f"{best.agreement:.0%} of the draft tokens are accepted, and each costs {best.cost:.0%} of a decode "
                f"step, so more than {best.cost:.0%} would have to be accepted. The text is not affected. Fix: use a "
                "target trained with early exits, or another drafter."
            )

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return self._chains.draft(
            seqs, [Budget(self._depth(seq, each.depth)) for seq, each in zip(seqs, budgets, strict=True)]
        )

    def _depth(self, seq: Sequence, most: int) -> int:
        """Return the draft length, at most `most`; 0 during chunked prefill, which runs no first layers in advance."""
        if most <= 0 or len(seq.tokens) - seq.kv_len > self.target.capabilities.max_pending:
            return 0
        return min(most, self.traits.longest or most)

    def room(self, seq: Sequence) -> int:
        return self.target.context - len(seq.tokens)

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        return self._early.run_first_layers(seqs, chains, self.exit)

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        assert self._multi_step is not None
        return self._multi_step.decode_steps(seqs, steps, sampling, self.exit)


def make(target: Target, **options: Any) -> LayerSkipDrafter:
    """Make the drafter `layerskip`, as `registry` requires. options: as in `LayerSkipConfig`."""
    return LayerSkipDrafter(target, LayerSkipConfig(**options))
