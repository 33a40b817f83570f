"""Measures costs and acceptance rates of a step with a drafter, in one interleaved run, so that the closed forms can
predict other draft lengths, for `bench` and `tune`.

The acceptance rate at a position is taken over the steps that drafted to this position. The share of steps that draft
to a position is taken over the steps that *had room* for a draft token there. The last steps of a text have no room for
a full draft; `predict` shortens their drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.none import NoDrafter
from slipstream.measure.arms import Arm, Run
from slipstream.measure.step_figures import Measured
from slipstream.theory.cost_curve import CostCurve

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass
class Tally:
    """Counts of steps. able[j]: steps with room for a draft token at depth j; drafted[j]: steps with such a token."""

    able: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(stats: SpecStats, texts: int) -> Tally:
        """Count as if every step but the first of each text had room for a full draft."""
        room = max(1, stats.steps - texts)
        return Tally(Counter(dict.fromkeys(stats.drafted_at, room)), Counter(stats.drafted_at))

    def share(self, depth: int) -> float:
        return min(1.0, self.drafted[depth] / self.able[depth]) if self.able[depth] else 0.0


class WrappedDrafter:
    """A drafter that passes all calls on to `drafter`. Subclasses record the calls."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.name, self.traits = drafter, drafter.name, DrafterTraits(taps=drafter.traits.taps)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return self.drafter.propose(seqs, budgets)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self.drafter.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
        self.drafter.release(seq_id)


class Counting(WrappedDrafter):
    """Counts in `tally`, for each depth, how many steps draft a token there."""

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

    def prepare(self) -> Counting:
        return Counting(super().prepare() or NoDrafter(), self.tally)


def measure_steps(run: Run, costs: CostCurve, short: Run | None = None) -> Measured:
    """Compute the measurements from an arm's run, the run of its plain decoding, and the target's cost curve. If the
    arm is no `CountingArm`, every step but the first of a text counts as a step with room for a full draft.

    short: run of the same drafter with shorter drafts, to separate the cost per level of depth from the cost per step.
    None: the cost of drafting is assumed to be proportional to the depth.
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
        noise=measure_contradiction([r for r in (run.plain, run, short) if r is not None], each, draft, fixed),
    )


def measure_contradiction(runs: Seq[Run], each: float, draft: float, fixed: float) -> float:
    """Return by which share timings of the same work differ: the slowest pass of a run from its fastest pass. Returns
    at least 1 if long drafts took less time than short drafts: then the cost of a draft token is not known."""
    passes = [(run.seconds_per_token() * run.weights()[:, None]).sum(0) for run in runs]
    apart = max(float(seconds.max() / seconds.min()) - 1 for seconds in passes)
    return max(apart, 1.0) if draft > 0 and fixed > 0 and each == 0 else apart


def _draft_seconds_per_step(run: Run, first: float) -> float:
    """Return the seconds of drafting per step of the batch, without `first`, the drafter's time in prefill."""
    stats, texts = run.stats(), len(run.prompts) * run.rounds
    batch = run.arm.batch
    return batch * max(0.0, stats.seconds["draft"] - texts / batch * first) / max(1, stats.steps - texts)


def _host(stats: SpecStats, batch: int) -> float:
    return batch * (stats.seconds["host"] + stats.seconds["verify"]) / max(1, stats.steps)


def time_target(target: Target, past: int, most: int) -> CostCurve:
    """Measure the target's cost curve up to `most` rows (fewer if its context is short) after `past` tokens."""
    from slipstream.targets.target_costs import measure_costs

    room = max(1, target.context - 2)
    rows = [n for n in (*(n for n in ROWS if n < most), most) if n <= room // 2] or [1]
    return measure_costs(target, rows, past=max(1, min(past, room - max(rows))), plain=True)
