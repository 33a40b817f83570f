"""`slipstream tune`: chooses a drafter and a draft length, or plain decoding, for given prompts on this machine.

    1. record   plain decoding and every drafter decode the prompts in turns, which measures acceptance rates by
                position, drafting cost and host time. Drafters whose cost grows with the draft length also run with
                short drafts.
    2. predict  the closed forms predict the speed-up of every drafter at every length up to the recorded one.
    3. confirm  the best few are measured against plain decoding, interleaved, and what limits each is diagnosed.

The choice is the fastest confirmed setting whose 95 % interval is above 1; if there is none, the choice is "none". No
measurement is reused in another run, because the speed of a machine drifts.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.bench.benchmark import Contender, figures, warnings
from slipstream.bench.configs import DrafterChoice, slipstream, vllm
from slipstream.bench.measure import Arm, Run, line_up, load_weights_once, passes, race, recreated_per_pass
from slipstream.bench.measured_steps import CountingArm, Measured, measured, target_costs
from slipstream.bench.prompts import PromptSet
from slipstream.bench.provenance import OtherProcesses, drafts, provenance
from slipstream.bench.results import Result, recording
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.core.params import SamplingParams, Strict, check_integer, integer, number, option
from slipstream.drafters.draft_plan import embedded_role
from slipstream.llm import LLM
from slipstream.plan.diagnosis import diagnose
from slipstream.theory.cost_curve import CostCurve

SHORT = 2
"""Draft length of the second recording."""
NOISY = 0.2
"""If the passes of a recording differ by more than this share, its costs are noisy, and its predictions are marked."""
RECORDED = 2
"""Timed passes of a recording. With one, a single disturbance would affect every prediction."""


@dataclass(frozen=True)
class TuneConfig(Strict):
    """tokens   largest number of new tokens per prompt.
    confirm  how many of the best predicted settings are measured against plain decoding.
    rounds, seconds   timed passes and time limit of that measurement, as in `BenchConfig`.
    """

    tokens: int = option(64, check=integer(2))
    confirm: int = option(3, check=integer(1))
    rounds: int = option(5, check=integer(1))
    seconds: float = option(45.0, check=number(0.0, float("inf")))
    batch: int = option(1, check=integer(1))
    seed: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Candidate(Strict):
    """A drafter (its index in the contenders) at a draft length, and its predicted speed-up."""

    contender: int
    label: str
    draft_tokens: int
    predicted: float


def candidates(labels: Seq[str], facts: Seq[Measured]) -> list[Candidate]:
    """Every drafter at every length up to the recorded one, best first. A shorter tree is assumed to have as many draft
    tokens per level as the recorded one."""
    choices = [
        Candidate(i, label, k, m.expected(k))
        for i, (label, m) in enumerate(zip(labels, facts, strict=True))
        for k in range(1, m.draft_tokens + 1)
    ]
    return sorted(choices, key=lambda c: (-c.predicted, c.draft_tokens))


def shortlist(choices: Seq[Candidate], most: int) -> list[Candidate]:
    """The best length of each drafter, then further lengths of the best drafter, `most` in all. Lengths are at least
    two apart, because adjacent ones differ by less than the noise. Predicted slow-downs are left out unless all are."""
    best = list({c.contender: c for c in reversed(choices)}.values())
    best.sort(key=lambda c: -c.predicted)
    out = [c for c in best if c.predicted > 1][:most] or best[:1]
    for c in choices:
        taken = [o.draft_tokens for o in out if o.contender == c.contender]
        if len(out) < most and c.contender == out[0].contender and min(abs(c.draft_tokens - k) for k in taken) > 1:
            out.append(c)
    return out


def choose(raced: Seq[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest setting with identical texts whose 95 % interval is above 1, or None. raced: settings with "speedup"
    (an `Estimate`) and "exact", whether texts are identical to those of plain decoding."""
    paying = [each for each in raced if (each["speedup"]["low"] or 0) > 1 and each["exact"]]
    return max(paying, key=lambda each: each["speedup"]["value"], default=None)


def steps(llm: LLM, contenders: Seq[Contender], prompts: PromptSet, config: TuneConfig) -> int:
    """How often `tune` calls `advance`, at most."""
    one = line_up([Arm("", llm, batch=config.batch)], prompts.ids, prompts.categories)
    recorded = 1 + sum(1 + _has_slope(c) for c in contenders)
    return passes(one * recorded, RECORDED) + passes(one * (1 + config.confirm), config.rounds)


def _has_slope(contender: Contender) -> bool:
    """Whether the cost of a draft grows with its length; that of a lookup drafter does not."""
    names = contender.drafter if isinstance(contender.drafter, list) else [contender.drafter]
    return contender.draft_tokens > SHORT and not all(map(recreated_per_pass, names))


def tune(
    llm: LLM,
    contenders: Seq[Contender],
    prompts: PromptSet,
    config: TuneConfig,
    out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None,
    origin: DrafterChoice | None = None,
) -> Result:
    """contenders: drafters with the longest draft length to consider. origin: names of target, draft model and engine
    for the written configurations. An interruption keeps the measurements so far."""
    for c in contenders:
        check_integer(f"draft_tokens of {c.label}", c.draft_tokens, 1)
    named = [{"label": c.label, "longest": c.draft_tokens} for c in contenders]
    environment = provenance(llm, config.seed, prompts=prompts.digest, drafts=drafts(contenders))
    result = Result("tune", {"contenders": named, **asdict(config)}, environment)
    work = _Tuning(llm, contenders, prompts, config, origin or DrafterChoice("none"))
    neighbours = OtherProcesses()

    def collect() -> dict[str, Any]:
        result.provenance["neighbours"] = neighbours.share()
        result.warnings = [*prompts.warnings, *warnings(work.raced, result.provenance["neighbours"]), *work.doubts()]
        return {"prompts": prompts.as_dict()} | work.data(result.provenance["neighbours"])

    with recording(result, out, collect) as save:
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
        self._ready: list[tuple[Any, dict[str, Any]]] = []

    def record(self, advance: Callable[[], None]) -> None:
        arms = [self.plain]
        for i, c in enumerate(self.contenders):
            self._ready.append(load_weights_once(self.llm, c.drafter, c.options))
            arms.append(self._arm(i, c.draft_tokens))
            if _has_slope(c):
                arms.append(self._arm(i, SHORT))
        most = self.config.batch * (1 + max(c.draft_tokens for c in self.contenders))
        past = sum(map(len, self.prompts.ids)) // len(self.prompts.ids) + self.config.tokens // 2
        self.costs = target_costs(self.llm.target, past, max(most, 64))
        recorded = line_up(arms, self.prompts.ids, self.prompts.categories)
        race(recorded, RECORDED, advance, seed=self.config.seed)
        runs = iter(recorded[1:])
        for c in self.contenders:
            long, short = next(runs), next(runs) if _has_slope(c) else None
            self.facts.append(measured(long, self.costs, short))
        self.shortlisted = shortlist(candidates([c.label for c in self.contenders], self.facts), self.config.confirm)

    def confirm(self, advance: Callable[[], None], save: Callable[[], None]) -> None:
        arms = [self.plain, *(self._arm(c.contender, c.draft_tokens) for c in self.shortlisted)]
        self.raced += line_up(arms, self.prompts.ids, self.prompts.categories)
        race(self.raced, self.config.rounds, advance, self.config.seconds, save, self.config.seed + 1)

    def data(self, neighbours: float | None) -> dict[str, Any]:
        """The data of the result so far. neighbours: as for `diagnose`."""
        table = [
            {"label": c.label, "measured": asdict(m), "predicted": [m.expected(k + 1) for k in range(m.draft_tokens)]}
            | {"mean_acceptance_length": m.tau, "noisy": m.noise > NOISY}
            for c, m in zip(self.contenders, self.facts, strict=False)
        ]
        raced: list[dict[str, Any]] = []
        for c, run in zip(self.shortlisted, self.raced[1:], strict=False):
            if run.measured:
                m = measured(run, self.costs)
                raced.append(
                    {"label": c.label, "contender": c.contender, "draft_tokens": c.draft_tokens}
                    | {"predicted": c.predicted, "speedup": asdict(run.speedup()), "exact": run.exact}
                    | {"overall": figures(run), "rounds": run.rounds, "measured": asdict(m)}
                    | {"diagnosis": diagnose(m, neighbours)}
                )
        best = choose(raced)
        values: dict[str, Any] = {"drafters": table, "raced": raced, "choice": None, "configs": None}
        if raced:
            picked = replace(self.origin, drafter="none", draft_tokens=0)
            if best is not None:
                i, length = best["contender"], best["draft_tokens"]
                name, even = _name(self._ready[i][0]), replace(self.facts[i], draft_tokens=length).break_even()
                values["choice"] = {k: best[k] for k in ("label", "contender", "draft_tokens", "predicted", "speedup")}
                values["choice"] |= {"drafter": name, "break_even": even}
                options = {k: v for k, v in self.contenders[i].options.items() if k not in ("head", "model")}
                picked = replace(self.origin, drafter=name, draft_tokens=length, options=options)
            values["configs"] = configurations(picked)
        return values

    def doubts(self) -> list[str]:
        reasons = [
            f"{c.label}: its costs are noisy (timings of the same work differ by {m.noise:.0%}), so its predictions "
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


def configurations(picked: DrafterChoice) -> dict[str, Any]:
    """Write the choice for Slipstream and for vLLM, which gets the folder in place of "embedded"."""
    folder = None if picked.draft is None else str(Checkpoint.open(picked.draft, embedded_role(picked.drafter)))
    return {"slipstream": slipstream(picked), "vllm": dict(vars(vllm(replace(picked, draft=folder))))}


def _name(drafter: Any) -> str:
    if isinstance(drafter, list):
        return ",".join(map(_name, drafter))
    return drafter if isinstance(drafter, str) else str(drafter.name)
