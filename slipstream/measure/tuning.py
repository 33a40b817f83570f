"""`slipstream tune`: chooses a drafter and a draft length, or plain decoding, for given prompts on this machine.

    1. record   plain decoding and every drafter decode the prompts in turns. This measures acceptance rates by
                position, drafting cost and host time. Drafters whose cost grows with the draft length also run with
                short drafts.
    2. predict  the closed forms predict the speed-up of every drafter at every length up to the recorded one.
    3. confirm  the best few settings are measured against plain decoding, interleaved; a diagnosis says what limits
                each setting.

The choice is the fastest confirmed setting whose 95 % interval is above 1, or "none". Measurements
are not reused in another run, because the speed of a machine drifts.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.core.params import check_integer
from slipstream.core.strict import JsonObject
from slipstream.drafters.draft_plan import find_role
from slipstream.llm import LLM
from slipstream.measure.arms import Arm, ArmDrafter, Run, count_passes, is_recreated, line_up, load_weights_once, race
from slipstream.measure.benchmark import Contender, collect_warnings, compute_figures
from slipstream.measure.configs import DrafterChoice, slipstream, vllm
from slipstream.measure.diagnosis import diagnose
from slipstream.measure.lab_settings import TuneConfig
from slipstream.measure.measured_steps import CountingArm, measure_steps, time_target
from slipstream.measure.prompts import PromptSet
from slipstream.measure.provenance import OtherProcesses, note_drafts, note_provenance
from slipstream.measure.report_tune import Candidate, Chosen, Configurations, Raced, Recorded, TuneData
from slipstream.measure.results import Result, record
from slipstream.measure.step_figures import Measured
from slipstream.measure.tables import Estimate
from slipstream.theory.cost_curve import CostCurve

SHORT = 2
"""Draft length of the recording with short drafts."""
NOISY = 0.2
"""The predictions of a recording are marked as noisy if its passes differ by more than this share."""
T = TypeVar("T")
RECORDED = 2
"""Timed passes of a recording. With one pass, a single disturbance would affect every prediction."""


def list_candidates(labels: Seq[str], facts: Seq[Measured]) -> list[Candidate]:
    """List every drafter at every length up to the recorded length, the best first. A shorter tree is assumed to have
    as many draft tokens per level as the recorded tree."""
    choices = [
        Candidate(label, i, k, m.expect(k))
        for i, (label, m) in enumerate(zip(labels, facts, strict=True))
        for k in range(1, m.draft_tokens + 1)
    ]
    return sorted(choices, key=lambda c: (-c.predicted, c.draft_tokens))


def choose_candidates(choices: Seq[Candidate], most: int) -> list[Candidate]:
    """Choose the best length of each drafter, then further lengths of the best drafter, `most` settings in all. Lengths
    of a drafter differ by at least 2, because speeds of adjacent lengths differ by less than the noise. Predicted
    slow-downs are left out, unless all predictions are slow-downs."""
    best = list({c.contender: c for c in reversed(choices)}.values())
    best.sort(key=lambda c: -c.predicted)
    out = [c for c in best if c.predicted > 1][:most] or best[:1]
    for c in choices:
        taken = [o.draft_tokens for o in out if o.contender == c.contender]
        if len(out) < most and c.contender == out[0].contender and min(abs(c.draft_tokens - k) for k in taken) > 1:
            out.append(c)
    return out


def choose(raced: Seq[T], speedup: Callable[[T], Estimate | None]) -> T | None:
    """Choose the fastest setting whose 95 % interval is above 1; None if there is no such setting."""
    paying = [(gain.value, each) for each in raced if (gain := speedup(each)) and (gain.low or 0) > 1]
    return max(paying, key=lambda pair: pair[0], default=(0, None))[1]


def count_steps(llm: LLM, contenders: Seq[Contender], prompts: PromptSet, config: TuneConfig) -> int:
    """Return how often `tune` calls `advance`, at most."""
    one = line_up([Arm("", llm, batch=config.batch)], prompts.ids, prompts.categories)
    recorded = 1 + sum(1 + _has_slope(c) for c in contenders)
    return count_passes(one * recorded, RECORDED) + count_passes(one * (1 + config.confirm), config.rounds)


def _has_slope(contender: Contender) -> bool:
    """Return True if the cost of a draft grows with its length: with any drafter but lookups."""
    names = contender.drafter if isinstance(contender.drafter, list) else [contender.drafter]
    return contender.draft_tokens > SHORT and not all(map(is_recreated, names))


def tune(
    llm: LLM,
    contenders: Seq[Contender],
    prompts: PromptSet,
    config: TuneConfig,
    out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None,
    origin: DrafterChoice | None = None,
) -> Result:
    """Choose a drafter and a draft length by measurements. contenders: drafters with their longest draft length.
    origin: names of target, draft model and engine for the configurations. An interruption keeps the measurements."""
    for c in contenders:
        check_integer(f"draft_tokens of {c.label}", c.draft_tokens, 1)
    named = [{"label": c.label, "longest": c.draft_tokens} for c in contenders]
    environment = note_provenance(llm, config.seed, prompts=prompts.digest, drafts=note_drafts(contenders))
    result = Result("tune", {"contenders": named, **asdict(config)}, environment)
    work = _Tuning(llm, contenders, prompts, config, origin or DrafterChoice("none"))
    neighbours = OtherProcesses()

    def collect() -> TuneData:
        share = result.provenance["neighbours"] = neighbours.share()
        result.warnings = [*prompts.warnings, *collect_warnings(work.raced, share), *work.doubts()]
        return work.data(share)

    with record(result, out, collect) as save:
        work.record(advance)
        save()
        work.confirm(advance, save)
    return result


class _Tuning:
    def __init__(
        self, llm: LLM, contenders: Seq[Contender], prompts: PromptSet, config: TuneConfig, origin: DrafterChoice
    ):
        self.llm, self.contenders, self.prompts, self.config, self.origin = llm, contenders, prompts, config, origin
        self.plain = Arm("plain", llm, params=replace(config.params, max_tokens=config.tokens), batch=config.batch)
        self.facts: list[Measured] = []
        self.costs = CostCurve.flat(0.0)
        self.shortlisted: list[Candidate] = []
        self.raced: list[Run] = []
        self._ready: list[tuple[ArmDrafter, JsonObject]] = []

    def record(self, advance: Callable[[], None]) -> None:
        arms = [self.plain]
        for i, c in enumerate(self.contenders):
            self._ready.append(load_weights_once(self.llm, c.drafter, c.options))
            arms.append(self._arm(i, c.draft_tokens))
            if _has_slope(c):
                arms.append(self._arm(i, SHORT))
        most = self.config.batch * (1 + max(c.draft_tokens for c in self.contenders))
        past = sum(map(len, self.prompts.ids)) // len(self.prompts.ids) + self.config.tokens // 2
        self.costs = time_target(self.llm.target, past, max(most, 64))
        recorded = line_up(arms, self.prompts.ids, self.prompts.categories)
        race(recorded, RECORDED, advance, seed=self.config.seed)
        runs = iter(recorded[1:])
        for c in self.contenders:
            long, short = next(runs), next(runs) if _has_slope(c) else None
            self.facts.append(measure_steps(long, self.costs, short))
        self.shortlisted = choose_candidates(
            list_candidates([c.label for c in self.contenders], self.facts), self.config.confirm
        )

    def confirm(self, advance: Callable[[], None], save: Callable[[], None]) -> None:
        arms = [self.plain, *(self._arm(c.contender, c.draft_tokens) for c in self.shortlisted)]
        self.raced += line_up(arms, self.prompts.ids, self.prompts.categories)
        race(self.raced, self.config.rounds, advance, self.config.seconds, save, self.config.seed + 1)

    def data(self, neighbours: float | None) -> TuneData:
        """Return the data of the result so far. neighbours: as for `diagnose`."""
        recorded = [
            Recorded(c.label, m, [m.expect(k + 1) for k in range(m.draft_tokens)], m.tau, m.noise > NOISY)
            for c, m in zip(self.contenders, self.facts, strict=False)
        ]
        raced = []
        for c, run in zip(self.shortlisted, self.raced[1:], strict=False):
            if run.measured:
                m, overall = measure_steps(run, self.costs), compute_figures(run)
                raced.append(
                    Raced(c.label, c.contender, c.draft_tokens, c.predicted, run.speedup(), run.exact, overall,
                          run.rounds, m, diagnose(m, neighbours))
                )  # fmt: skip
        values = TuneData(self.prompts.as_dict(), recorded, raced)
        if not raced:
            return values
        picked, choice = replace(self.origin, drafter="none", draft_tokens=0), None
        best = choose([each for each in raced if each.exact], lambda each: each.speedup)
        if best is not None:
            i, length, name = best.contender, best.draft_tokens, _name(self._ready[best.contender][0])
            even = replace(self.facts[i], draft_tokens=length).break_even()
            choice = Chosen(best.label, i, length, best.predicted, best.speedup, name, even)
            options = {k: v for k, v in self.contenders[i].options.items() if k not in ("head", "model")}
            picked = replace(self.origin, drafter=name, draft_tokens=length, options=options)
        return replace(values, choice=choice, configs=write_configurations(picked))

    def doubts(self) -> list[str]:
        reasons = [
            f"{c.label}: the timings are noisy (those of the same work differ by {m.noise:.0%}), so the predictions "
            "are rough: measure again on a quiet machine"
            for c, m in zip(self.contenders, self.facts, strict=False)
            if m.noise > NOISY
        ]
        return reasons + [
            f"{run.arm.name}: predicted {c.predicted:.2f}x, measured {run.speedup().value:.2f}x: the prediction is "
            "off, so other predictions may be off too"
            for c, run in zip(self.shortlisted, self.raced[1:], strict=False)
            if run.rounds and abs(c.predicted / run.speedup().value - 1) > 0.2
        ]

    def _arm(self, contender: int, k: int) -> Arm:
        drafter, options = self._ready[contender]
        label, plain = self.contenders[contender].label, self.plain
        return CountingArm(label, self.llm, drafter, k, options, plain.params, plain.batch, against=plain)


def write_configurations(picked: DrafterChoice) -> Configurations:
    """Write the choice as configurations for Slipstream and for vLLM. vLLM gets a folder in place of "embedded"."""
    folder = None if picked.draft is None else str(Checkpoint.open(picked.draft, find_role(picked.drafter)))
    return Configurations(slipstream(picked), vllm(replace(picked, draft=folder)))


def _name(drafter: ArmDrafter) -> str:
    assert drafter is not None
    if isinstance(drafter, list):
        return ",".join(map(_name, drafter))
    return drafter if isinstance(drafter, str) else drafter.name
