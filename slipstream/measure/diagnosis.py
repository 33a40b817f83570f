"""Finds out why speculative decoding is slow.

The speed-up follows from the measured costs of target passes, of drafting and of the host, and from acceptance rates.
`diagnose` predicts it without each possible cause, and names the cause whose removal helps most.

    cause                     prediction without it
    draft too expensive       drafting takes no time
    acceptance too low        the acceptance rate is 80 %, and every step drafts
    compute-bound target      verifying a draft takes as long as a plain step
    batch too large           the same prediction, if a single sequence would gain more
    few active experts        the same prediction, for a mixture of experts: more rows read more experts
    host overhead             a speculative step takes no more host time than a plain step
    drafts too long           the best shorter draft length

There is no diagnosis if noise could have made the difference: the measured speed-up has no interval, or its interval
includes 1, or other processes used a part of the machine.
"""

from dataclasses import dataclass, replace

from slipstream.measure.estimates import CHANCE, REASONS
from slipstream.measure.provenance import QUIET
from slipstream.measure.step_figures import Measured
from slipstream.theory.closed_forms import geometric_rates, smallest
from slipstream.theory.cost_curve import CostCurve

FINE = 1.05
"""Smallest speed-up at which the diagnosis is `NOTHING`: nothing is wrong."""
HEALTHY = 0.8
"""A good acceptance rate."""

DRAFT, ACCEPTANCE, COMPUTE, BATCH, EXPERTS, HOST, LENGTH = (
    "draft too expensive", "acceptance too low", "compute-bound target", "batch too large", "few active experts",
    "host overhead", "drafts too long",
)  # fmt: skip
NOTHING, UNKNOWN = "nothing is wrong", "not diagnosed"

FIXES = {
    DRAFT: "use a smaller draft model, quantise it (--draft-quantize int8), or use a lookup drafter: --drafter suffix",
    ACCEPTANCE: "use a draft model of the same family, train one on the target's own texts (slipstream train), lower "
    "the temperature, or change the drafter: slipstream tune tries them all",
    COMPUTE: "draft fewer tokens (a smaller --draft-tokens, no trees) or none: every verified token costs this "
    "target time",
    BATCH: "decode fewer sequences at once, draft fewer tokens, or switch speculation off above some batch size",
    EXPERTS: "draft fewer tokens: each verified token makes the target read more experts",
    HOST: "give the process its own core, leave the executor at auto, or decode larger batches: the time is spent "
    "outside the models",
    LENGTH: "lower --draft-tokens",
}


@dataclass(frozen=True)
class Diagnosis:
    """Says what limits a setting.

    cause, fix  the cause to remove first and how to remove it; or the cause is `NOTHING` or `UNKNOWN`.
    speedup     the measured speed-up if there is one, else `predicted`, which is computed from the measured parts.
    break_even  acceptance rate at which a speculative step is as fast as plain decoding; None: slower even at 1.
    acceptance  the constant acceptance rate that yields the measured tokens per step in the closed forms.
    enough      whether removing this one cause would make speculation save time.
    evidence    the numbers behind the diagnosis, in sentences.
    counterfactuals  cause -> speed-up predicted without this cause, largest first.
    reason      why there is no diagnosis, in a clause; empty if there is one.
    """

    cause: str
    fix: str
    speedup: float
    predicted: float
    break_even: float | None
    acceptance: float | None
    enough: bool
    evidence: list[str]
    counterfactuals: dict[str, float]
    reason: str


def diagnose(m: Measured, neighbours: float | None = None) -> Diagnosis:
    """Find what limits the speed-up in these measurements; a pure function. neighbours: share of the machine's time
    that other processes used, None if unknown."""
    predicted = m.prediction().speedup
    length, best = m.best_length()
    gains = {cause: remove_cause(m, cause).prediction().speedup for cause in list_causes(m)}
    removed = dict(sorted(gains.items(), key=lambda each: -each[1]))
    value, undrafted = (m.speedup.value, m.speedup.note in CHANCE) if m.speedup else (predicted, False)
    unsure, remedy = find_doubt(m, neighbours)
    if unsure:
        cause, fix, enough = UNKNOWN, remedy, False
    elif best >= FINE and length < m.draft_tokens and best >= FINE * value:
        cause, fix, enough = LENGTH, f"{FIXES[LENGTH]} to {length}", True
    elif value >= FINE and not undrafted:
        cause, fix, enough = NOTHING, "", True
    else:
        cause, gain = next(iter(removed.items()))
        fix, enough = FIXES[cause], gain >= FINE
    even, alpha = m.break_even(), fit_acceptance(m)
    return Diagnosis(cause, fix, value, predicted, even, alpha, enough, collect_evidence(m, cause), removed, unsure)


def find_doubt(m: Measured, neighbours: float | None) -> tuple[str, str]:
    """Return (why these measurements allow no diagnosis, what to do); two empty texts if they allow a diagnosis."""
    if neighbours is not None and neighbours > QUIET:
        return (
            f"other processes took {neighbours:.0%} of the machine's time, which slows down drafting, the target and "
            "the host unequally",
            "end other programs and measure again",
        )
    gain = m.speedup
    if gain is None or gain.note in CHANCE:
        return "", ""
    more = "measure more: raise --prompts, --rounds and --seconds"
    if gain.low is None or gain.high is None:
        return REASONS[gain.note], more
    if gain.low <= 1 <= gain.high:
        uncertain = f"the 95% interval of the speed-up, {gain.low:.2f} to {gain.high:.2f}, includes 1"
        return f"{uncertain}, so it may be a gain or a loss", more
    return "", ""


def list_causes(m: Measured) -> list[str]:
    """Return the causes to consider. The cost of more rows is attributed to one of three causes: a compute-bound
    target, a large batch or few active experts."""
    rows = COMPUTE
    if m.experts is not None and m.experts[0] < m.experts[1]:
        rows = EXPERTS
    elif m.batch > 1 and m.alone().prediction().speedup >= max(FINE, 1.05 * m.prediction().speedup):
        rows = BATCH
    return [DRAFT, ACCEPTANCE, rows, HOST]


def remove_cause(m: Measured, cause: str) -> Measured:
    """Return the measurements as they would be without this cause."""
    if cause == DRAFT:
        return replace(m, draft_fixed=0.0, draft_each=0.0, draft_prefill=0.0)
    if cause == ACCEPTANCE:
        good = geometric_rates(HEALTHY, m.draft_tokens)
        position_rates = [*m.position_rates, *[0.0] * (m.draft_tokens - len(m.position_rates))]
        rates = tuple(max(a, b) for a, b in zip(good, position_rates, strict=True))
        return replace(m, position_rates=rates, drafted=(1.0,) * m.draft_tokens)
    if cause == HOST:
        return replace(m, step_host=min(m.step_host, m.plain_host))
    return replace(m, costs=CostCurve((1,), (m.costs(m.batch),)))


def fit_acceptance(m: Measured) -> float | None:
    """Find the constant acceptance rate that yields the measured tokens per step; None if nothing was drafted."""
    if not m.position_rates:
        return None

    def enough(alpha: float) -> bool:
        chain = zip(geometric_rates(alpha, len(m.drafted)), m.drafted, strict=True)
        return sum(rate * share for rate, share in chain) >= m.tokens_per_step - 1

    return smallest(enough)


def collect_evidence(m: Measured, cause: str) -> list[str]:
    """Write the numbers behind a diagnosis as sentences; the numbers about `cause` come first."""
    alpha = fit_acceptance(m)
    ms = 1000
    drafted = m.drafted[0] if m.drafted else 0.0
    lines_by_cause = {
        DRAFT: f"drafting {m.draft_tokens} tokens takes {m.draft_seconds * ms:.2f} ms, a plain step "
        f"{m.plain_step * ms:.2f} ms: c = {m.c:.2f} per draft token",
        ACCEPTANCE: (
            "nothing was drafted"
            if alpha is None
            else f"acceptance rate {alpha:.0%}"
            + (f" in the {drafted:.0%} of the steps that drafted" if drafted < 0.95 else "")
        ),
        COMPUTE: f"verifying {m.rows:.0f} rows costs {m.checking:.2f}x one plain step",
        HOST: f"the host takes {m.step_host * ms:.2f} ms per speculative step, {m.plain_host * ms:.2f} ms per plain "
        f"step ({m.step_host / (m.step_host + m.costs(m.rows) + m.draft_seconds):.0%} of a speculative step)",
    }
    if m.batch > 1:
        alone = m.alone()
        lines_by_cause[COMPUTE] += f"; at batch 1, {alone.rows:.0f} rows cost {alone.checking:.2f}x one plain step"
    if m.experts:
        lines_by_cause[COMPUTE] += f"; {m.experts[0]} of {m.experts[1]} experts are picked per token"
    key = COMPUTE if cause in (BATCH, EXPERTS) else cause
    lines = [lines_by_cause[key]] if key in lines_by_cause else []
    if cause == LENGTH:
        length, best = m.best_length()
        now = f"measured at {m.speedup.value:.2f}x" if m.speedup else f"predicted at {m.prediction().speedup:.2f}x"
        lines = [f"{length} draft tokens are predicted at {best:.2f}x, {m.draft_tokens} are {now}"]
    return [*lines, *(line for name, line in lines_by_cause.items() if name != key)]
