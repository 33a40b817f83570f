"""What a step of a target with a drafter costs and gives on a machine, from one interleaved run, and the predictions of
the closed forms from it: those of `bench` beside its measurements, and those of `tune`.

The acceptance rate at a position is taken over the steps that drafted to that position. How often a drafter drafts to a
position is taken over the steps that *had room* for it: the last steps of a text do not, and `predict` shortens those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.bench.estimates import Estimate
from slipstream.bench.measure import Arm, Run
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.params import Strict
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.core.target import Target, TargetOut
from slipstream.theory import closed_forms
from slipstream.theory.closed_forms import Prediction, predict
from slipstream.theory.cost_curve import CostCurve

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Measured(Strict):
    """Times are in seconds, for the whole batch.

    costs          cost curve of the target, scaled so that it agrees with plain decoding in the same run.
    draft_tokens   K, the largest draft depth per step.
    position_rates, drafted   as `theory.predict` takes them, one for each depth that was ever drafted.
    width          draft tokens per depth: 1 for chains.
    draft_fixed, draft_each   drafting and observing: per step, and for each level of depth.
    step_host, plain_host    verification and bookkeeping of a speculative step, and of a plain step.
    prefill, draft_prefill    prefill of the target, and the time that the drafter adds to it.
    tokens         output tokens per text.
    batch          sequences decoded at once.
    speedup        measured speed-up over plain decoding; None: not measured.
    experts        (per token, in all) of a mixture of experts.
    noise          how far the costs contradict each other: see `contradiction`. 0 if they agree.
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
        """Host time of a speculative step beyond that of a plain step, in plain steps."""
        return max(0.0, self.step_host - self.plain_host) / self.plain_step

    @property
    def rows(self) -> float:
        """Rows of a step that drafts to full depth."""
        return self.batch * (1 + self.width * self.draft_tokens)

    @property
    def checking(self) -> float:
        """Target time of verifying a full draft over that of a plain step."""
        return self.costs(self.rows) / self.costs(self.batch)

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(rate * share for rate, share in zip(self.position_rates, self.drafted, strict=True))

    def prediction(self, draft_tokens: int | None = None) -> Prediction:
        """The prediction for a text at this draft length, at most the measured one; None: the measured one."""
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
        """Predicted mean acceptance length of a text, prefill included; at most the measured one, because the measured
        drafts are the longest."""
        length = self.tokens / (1 + self.prediction(draft_tokens).steps)
        return length if self.tau is None else min(length, self.tau)

    def expected(self, draft_tokens: int) -> float:
        """Predicted speed-up at a draft length, scaled so that it agrees with the measurement at the measured length.
        The closed form uses costs of passes of equal width. In decoding the widths vary and CPU caches are colder,
        which is assumed to cost the same share at every length.

        At most the mean acceptance length: a step that drafts takes no less time than a plain one. Only noise in the
        costs says otherwise."""
        speedup = self.prediction(draft_tokens).speedup
        if self.speedup is not None:
            speedup *= self.speedup.value / self.prediction(self.draft_tokens).speedup
        return min(speedup, self.length(draft_tokens))

    def best_length(self) -> tuple[int, float]:
        """(best draft length up to the measured one, its predicted speed-up); length 0 if none saves time. The smaller
        of the closed form and of `expected` counts: a closed form that is off by its measurement proves no length
        better."""
        gains = [
            (k, min(self.prediction(k).speedup, self.expected(k)) if k < self.draft_tokens else self.expected(k))
            for k in range(1, self.draft_tokens + 1)
        ]
        return max([(0, 1.0), *gains], key=lambda pair: pair[1])

    def break_even(self) -> float | None:
        """The acceptance rate at which drafting neither saves nor costs time; None if not even 1 is enough."""
        relative = CostCurve(self.by_depth().rows, tuple(s / self.costs(self.batch) for s in self.by_depth().seconds))
        return closed_forms.break_even(self.draft_tokens, self.c, relative, 1, self.host)

    def alone(self) -> Measured:
        """The estimate for batch size 1. Host and draft times are divided by the batch size; a draft model's time
        shrinks less, so the estimate is slightly too good."""
        share = {
            name: getattr(self, name) / self.batch
            for name in ("draft_fixed", "draft_each", "step_host", "plain_host", "prefill", "draft_prefill")
        }
        return replace(self, batch=1, speedup=None, **share)


@dataclass
class Tally:
    """Counts over all steps. able[j]: steps with room for a draft token at depth j; drafted[j]: steps that had one."""

    able: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(stats: SpecStats, texts: int) -> Tally:
        """As if every step but the first of each text had room for a full draft."""
        room = max(1, stats.steps - texts)
        return Tally(Counter(dict.fromkeys(stats.drafted_at, room)), Counter(stats.drafted_at))

    def share(self, depth: int) -> float:
        return min(1.0, self.drafted[depth] / self.able[depth]) if self.able[depth] else 0.0


class WrappedDrafter:
    """Drafts as `drafter` does; a subclass notes what it does."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.name, self.traits = drafter, drafter.name, DrafterTraits(taps=drafter.traits.taps)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return self.drafter.propose(seqs, budgets)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self.drafter.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
        self.drafter.release(seq_id)


class Counting(WrappedDrafter):
    """Counts in `tally` how deep a drafter drafts."""

    def __init__(self, drafter: Drafter, tally: Tally):
        super().__init__(drafter)
        self.tally = tally

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        draft = super().propose(seqs, budgets)
        for b, budget in enumerate(budgets):
            nodes = range(draft.splits[b], draft.splits[b + 1])
            deep = max((draft.depths[n] for n in nodes if draft.acceptable is None or draft.acceptable[n]), default=0)
            self.tally.able.update(range(1, budget.depth + 1))
            self.tally.drafted.update(range(1, deep + 1))
        return draft


@dataclass(frozen=True, eq=False)
class CountingArm(Arm):
    """An arm whose drafter is wrapped in `Counting`."""

    tally: Tally = field(default_factory=Tally)

    def prepare(self) -> Any:
        return Counting(super().prepare(), self.tally)


def measured(run: Run, costs: CostCurve, short: Run | None = None) -> Measured:
    """The measurements from a run of an arm and its plain arm, and from the target's cost curve. Of an arm that is no
    `CountingArm`, every step but the first of a text counts as one with room for a full draft.

    short: the same drafter with shorter drafts, to separate the cost per level of depth from the cost per step. None:
    the cost is assumed to be proportional to the depth.
    """
    assert run.plain is not None
    batch, k = run.arm.batch, run.arm.draft_tokens
    stats, plain = run.stats(), run.plain.stats()
    texts = len(run.prompts) * run.rounds
    tally = run.arm.tally if isinstance(run.arm, CountingArm) else Tally.of(stats, texts)
    prefill = run.plain.first_token_seconds()
    first = max(0.0, run.first_token_seconds() - prefill)
    depths = [d for d in range(1, k + 1) if stats.drafted_at[d] and tally.share(d) > 0]
    shares = np.minimum.accumulate([tally.share(d) for d in depths]).tolist() if depths else []
    draft = _draft_seconds_per_step(run, first)
    if short is not None and short.arm.draft_tokens < k:
        each = max(0.0, (draft - _draft_seconds_per_step(short, first)) / (k - short.arm.draft_tokens))
        fixed = max(0.0, draft - each * k)
    else:
        each, fixed = draft / k, 0.0
    step = batch * max(1e-9, plain.seconds["target"] - texts / batch * prefill) / max(1, plain.steps - texts)
    level = step / costs(batch)
    return Measured(
        costs=CostCurve(costs.rows, tuple(level * s for s in costs.seconds)),
        draft_tokens=k,
        position_rates=tuple(stats.accepted_at[d] / stats.drafted_at[d] for d in depths),
        drafted=tuple(shares),
        width=max(1.0, stats.proposed / max(1, sum(stats.drafted_at.values()))),
        draft_fixed=fixed,
        draft_each=each,
        step_host=_host(stats, batch),
        plain_host=_host(plain, batch),
        prefill=prefill,
        draft_prefill=first,
        tokens=max(1, round(plain.tokens / texts)),
        batch=batch,
        speedup=run.speedup(),
        experts=run.arm.llm.target.capabilities.experts,
        tau=stats.mean_acceptance_length,
        noise=contradiction([r for r in (run.plain, run, short) if r is not None], each, draft, fixed),
    )


def contradiction(runs: Seq[Run], each: float, draft: float, fixed: float) -> float:
    """By how much, as a share, timings of the same work differ: the slowest pass of a run from its fastest. 1 if long
    drafts were timed as cheaper than short ones, so that the cost of a draft token is not known."""
    passes = [(run.seconds_per_token() * run.weights()[:, None]).sum(0) for run in runs]
    apart = max(float(seconds.max() / seconds.min()) - 1 for seconds in passes)
    return max(apart, 1.0) if draft > 0 and fixed > 0 and each == 0 else apart


def _draft_seconds_per_step(run: Run, first: float) -> float:
    """Seconds of drafting per step of the whole batch, without `first`, the drafter's share of prefill."""
    stats, texts = run.stats(), len(run.prompts) * run.rounds
    batch = run.arm.batch
    return batch * max(0.0, stats.seconds["draft"] - texts / batch * first) / max(1, stats.steps - texts)


def _host(stats: SpecStats, batch: int) -> float:
    return batch * (stats.seconds["host"] + stats.seconds["verify"]) / max(1, stats.steps)


def target_costs(target: Target, past: int, most: int) -> CostCurve:
    """The cost curve of the target up to `most` rows (fewer if its context is short) after `past` tokens."""
    from slipstream.targets.target_costs import measure_costs

    room = max(1, target.context - 2)
    rows = [n for n in (*(n for n in ROWS if n < most), most) if n <= room // 2] or [1]
    return measure_costs(target, rows, past=max(1, min(past, room - max(rows))), plain=True)
