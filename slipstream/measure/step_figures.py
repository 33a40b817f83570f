"""`Measured` holds costs and gains of a step with a drafter, and predicts other draft lengths by the closed forms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.core.params import Strict
from slipstream.measure.tables import Estimate
from slipstream.theory import closed_forms
from slipstream.theory.closed_forms import Prediction, predict
from slipstream.theory.cost_curve import CostCurve


@dataclass(frozen=True)
class Measured(Strict):
    """Measured costs and gains of a step with a drafter. Times are in seconds, for the whole batch.

    costs          cost curve of the target, scaled so that it agrees with plain decoding in the same run.
    draft_tokens   K, the largest draft depth per step.
    position_rates, drafted   arguments of `theory.predict`, one value for each depth that was ever drafted.
    width          draft tokens per depth: 1 for chains.
    draft_fixed, draft_each   time of drafting and observing: per step, and per level of depth.
    step_host, plain_host    time of verification and bookkeeping in a speculative step, and in a plain step.
    prefill, draft_prefill    time of the target's prefill, and the drafter's additional time in prefill.
    tokens         output tokens per text.
    batch          sequences decoded at once.
    speedup        measured speed-up over plain decoding; None: not measured.
    experts        (experts per token, all experts) of a mixture of experts.
    noise          how far the costs contradict each other (see `measure_contradiction`); 0 if they agree.
    tau            measured mean acceptance length; None: not measured.
    """

    costs: CostCurve
    draft_tokens: int
    position_rates: tuple[float, ...]
    drafted: tuple[float, ...]
    width: float = 1.0
    draft_fixed: float = 0.0
    draft_each: float = 0.0
    step_host: float = 0.0
    plain_host: float = 0.0
    prefill: float = 0.0
    draft_prefill: float = 0.0
    tokens: int = 64
    batch: int = 1
    speedup: Estimate | None = None
    experts: tuple[int, int] | None = None
    noise: float = 0.0
    tau: float | None = None

    @property
    def plain_step(self) -> float:
        return self.costs(self.batch) + self.plain_host

    @property
    def draft_seconds(self) -> float:
        """Time of drafting in one step."""
        return self.draft_fixed + self.draft_each * self.draft_tokens

    @property
    def c(self) -> float:
        """Time of one draft token over one plain step."""
        return self.draft_seconds / self.draft_tokens / self.plain_step

    @property
    def host(self) -> float:
        """Additional host time of a speculative step over a plain step, in plain steps."""
        return max(0.0, self.step_host - self.plain_host) / self.plain_step

    @property
    def rows(self) -> float:
        """Rows of a step that drafts to full depth."""
        return self.batch * (1 + self.width * self.draft_tokens)

    @property
    def checking(self) -> float:
        """Target time of verifying a full draft over the target time of a plain step."""
        return self.costs(self.rows) / self.costs(self.batch)

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(rate * share for rate, share in zip(self.position_rates, self.drafted, strict=True))

    def prediction(self, draft_tokens: int | None = None) -> Prediction:
        """Predict a text at this draft length, at most the measured length. None: at the measured length."""
        depth = self.draft_tokens if draft_tokens is None else draft_tokens
        deep = min(depth, len(self.position_rates))
        return predict(
            self.position_rates[:deep],
            self.by_depth(),
            self.draft_fixed + self.draft_each * depth if depth else 0.0,
            drafted=self.drafted[:deep] if deep else None,
            step_host=self.step_host,
            plain_host=self.plain_host,
            prefill=self.prefill,
            draft_prefill=self.draft_prefill if depth else 0.0,
            tokens=self.tokens,
        )

    def by_depth(self) -> CostCurve:
        """Seconds of the target in a step with d - 1 levels of draft tokens, d = 1, 2, ...; includes batch and
        width."""
        depths = range(max(1, self.draft_tokens) + 1)
        return CostCurve(
            tuple(d + 1 for d in depths), tuple(self.costs(self.batch * (1 + self.width * d)) for d in depths)
        )

    def length(self, draft_tokens: int) -> float:
        """Predict the mean acceptance length of a text, prefill included; at most the measured value, because the
        measured drafts are the longest."""
        length = self.tokens / (1 + self.prediction(draft_tokens).steps)
        return length if self.tau is None else min(length, self.tau)

    def expect(self, draft_tokens: int) -> float:
        """Predict the speed-up at a draft length, scaled so that it agrees with the measurement at the measured length:
        the closed form uses costs of passes of equal width, but in decoding widths vary and CPU caches are colder. This
        loss is assumed to be the same share at every length.

        The result is at most the mean acceptance length, because a step that drafts takes no less time than a plain
        step, whatever noise in the costs says."""
        speedup = self.prediction(draft_tokens).speedup
        if self.speedup is not None:
            speedup *= self.speedup.value / self.prediction(self.draft_tokens).speedup
        return min(speedup, self.length(draft_tokens))

    def best_length(self) -> tuple[int, float]:
        """Return (best draft length up to the measured length, predicted speed-up); length 0 if no length saves time.
        The smaller of the closed form and of `expect` counts: if the closed form contradicts the measurement, it cannot
        show that a length is better."""
        gains = [
            (k, min(self.prediction(k).speedup, self.expect(k)) if k < self.draft_tokens else self.expect(k))
            for k in range(1, self.draft_tokens + 1)
        ]
        return max([(0, 1.0), *gains], key=lambda pair: pair[1])

    def break_even(self) -> float | None:
        """Return the acceptance rate at which drafting neither saves nor costs time; None if a rate of 1 is too low."""
        relative = CostCurve(self.by_depth().rows, tuple(s / self.costs(self.batch) for s in self.by_depth().seconds))
        return closed_forms.break_even(self.draft_tokens, self.c, relative, 1, self.host)

    def alone(self) -> Measured:
        """Estimate the measurements for batch size 1. Host and draft times are divided by the batch size; a draft
        model's time shrinks less, so the estimate is slightly too good."""
        share = {
            name: getattr(self, name) / self.batch
            for name in ("draft_fixed", "draft_each", "step_host", "plain_host", "prefill", "draft_prefill")
        }
        return replace(self, batch=1, speedup=None, **share)
