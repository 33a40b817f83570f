"""The data of a tune result, and their report: the choice, what limits each setting, and the measurements."""

import json
from dataclasses import dataclass, field

from slipstream.core.strict import JsonObject
from slipstream.measure.configs import Settings
from slipstream.measure.diagnosis import NOTHING, Diagnosis
from slipstream.measure.measurements import Figures
from slipstream.measure.results import Result
from slipstream.measure.step_figures import Measured
from slipstream.measure.tables import (
    Alarm,
    CellValue,
    Column,
    Estimate,
    Section,
    Table,
    interval,
    percent,
    remark,
    tabulate,
    times,
    words,
)  # fmt: skip
from slipstream.theory.cost_curve import CostCurve

SHOWN_POSITIONS = 4


@dataclass(frozen=True)
class Recorded:
    """A drafter, measured at its longest draft. predicted: the speed-up at each length from 1 on. noisy: True if the
    measured costs contradict each other, so that predictions are rough."""

    label: str
    measured: Measured
    predicted: list[float]
    mean_acceptance_length: float | None = None
    noisy: bool = False


@dataclass(frozen=True)
class Candidate:
    """A drafter (`contender` is its index) at a draft length, and the predicted speed-up."""

    label: str
    contender: int
    draft_tokens: int
    predicted: float


@dataclass(frozen=True)
class Raced(Candidate):
    """A setting that was measured against plain decoding. exact: True if all texts equal plain decoding's."""

    speedup: Estimate
    exact: bool
    overall: Figures
    rounds: int
    measured: Measured
    diagnosis: Diagnosis

    @property
    def setting(self) -> str:
        return f"{self.label}, K={self.draft_tokens}"


@dataclass(frozen=True)
class Chosen(Candidate):
    """The setting to use. break_even: acceptance rate below which plain decoding is faster."""

    speedup: Estimate
    drafter: str
    break_even: float | None


@dataclass(frozen=True)
class Configurations:
    """The chosen setting in the format of `slipstream generate --config`, and as arguments of `vllm serve`."""

    slipstream: JsonObject
    vllm: Settings


@dataclass(frozen=True)
class TuneData:
    prompts: JsonObject = field(default_factory=dict)
    drafters: list[Recorded] = field(default_factory=list)
    raced: list[Raced] = field(default_factory=list)
    choice: Chosen | None = None
    configs: Configurations | None = None


def make_section(result: Result) -> Section:
    data = result.read_data(TuneData)
    report = Section(
        "Which drafter and draft length?", "The run ended before any setting was confirmed, so nothing is chosen."
    )
    if data.raced:
        best = max(data.raced, key=lambda row: row.speedup.value)
        report.lead = write_lead(data.choice, best)
        report.tables.append(tabulate_raced(data.raced, data.choice))
        shown = next((row for row in data.raced if is_chosen(row, data.choice)), best)
        report.tables += [tabulate_causes(data.raced), tabulate_costs(shown.measured.costs)]
        report.notes += [*map(explain, data.raced), *map(remark, shown.diagnosis.evidence)]
    if data.drafters:
        report.tables.append(tabulate_recorded(data.drafters))
    if data.configs:
        vllm = data.configs.vllm
        report.configs += [("slipstream", json.dumps(data.configs.slipstream), ""), ("vllm", vllm.text, vllm.note)]
    if data.choice and data.choice.break_even is not None:
        report.notes.append(
            f"Disable speculation if the acceptance rate falls below {percent(data.choice.break_even)}."
        )
    return report


def write_lead(choice: Chosen | None, best: Raced) -> str:
    if choice is None:
        return (
            "Choice: none. No drafter was significantly faster than plain decoding, so use plain decoding. The best: "
            f"{explain(best)}"
        )
    return (
        f"Choice: {choice.label}, K={choice.draft_tokens}: {interval(choice.speedup)} over plain decoding "
        f"measured, {times(choice.predicted)} predicted."
    )


def is_chosen(row: Raced, choice: Chosen | None) -> bool:
    return choice is not None and (choice.contender, choice.draft_tokens) == (row.contender, row.draft_tokens)


def tabulate_raced(rows: list[Raced], choice: Chosen | None) -> Table:
    columns = [
        words("setting", lambda row: row.setting),
        Column("predicted", "x", cell=lambda row: row.predicted),
        Column("measured (95%)", "x", cell=lambda row: row.speedup),
        Column("off by", cell=lambda row: f"{row.predicted / row.speedup.value - 1:+.0%}"),
        words("texts", lambda row: "as plain" if row.exact else Alarm("DIFFERENT")),
        words("", lambda row: "chosen" if is_chosen(row, choice) else ""),
    ]
    return tabulate("Measured against plain decoding", rows, columns)


def tabulate_recorded(rows: list[Recorded]) -> Table:
    def by_position(row: Recorded) -> str:
        rates = [percent(rate) for rate in row.measured.position_rates]
        return " ".join(rates[:SHOWN_POSITIONS]) + " ..." * (len(rates) > SHOWN_POSITIONS)

    def best(row: Recorded) -> str:
        gain = max(row.predicted)
        return f"{times(gain)}{'?' * row.noisy}, K={row.predicted.index(gain) + 1}"

    columns = [
        words("drafter", lambda row: row.label),
        Column("drafts", "%", cell=lambda row: row.measured.drafted[0] if row.measured.drafted else 0.0),
        words("accepted by position", by_position),
        Column("tau", digits=2, cell=lambda row: row.mean_acceptance_length),
        Column("cost", digits=2, cell=lambda row: row.measured.draft_seconds / row.measured.plain_step),
        Column("predicted", cell=best),
    ]
    note = (
        "drafts: share of the steps that draft. tau: tokens per step, prefill included. cost: of drafting per step, in "
        "plain steps. predicted: at the best draft length."
    )
    if any(row.noisy for row in rows):
        note += " ?: rough, because timings of the same work differ."
    return tabulate("Measured at the longest draft", rows, columns, note)


def explain(row: Raced) -> str:
    """Say in a sentence what limits a setting, and the fix."""
    d = row.diagnosis
    who = f"{row.setting}, {interval(row.speedup)}"
    if d.reason:
        return f"{who}: not diagnosed: {d.reason}. Fix: {d.fix}."
    if d.cause == NOTHING:
        return f"{who}: nothing is wrong."
    alone = "" if d.enough else " No single change is enough for a speed-up; this one helps most."
    return f"{who}: {d.cause}. Fix: {d.fix}.{alone}"


def tabulate_causes(rows: list[Raced]) -> Table:
    """Tabulate the speed-ups predicted without one cause; each cause has a column."""

    def make_column(cause: str) -> Column:
        return Column(cause, "x", cell=lambda row: row.diagnosis.counterfactuals.get(cause))

    causes = dict.fromkeys(cause for row in rows for cause in row.diagnosis.counterfactuals)
    columns = [
        words("setting", lambda row: row.setting),
        Column("as it is", "x", cell=lambda row: row.diagnosis.predicted),
        *map(make_column, causes),
    ]
    note = "Speed-ups predicted from measured costs: as it is, and if one cause were removed."
    return tabulate("What limits the speed-up", rows, columns, note)


def tabulate_costs(curve: CostCurve) -> Table:
    """Tabulate the cost curve of the target at powers of two."""
    shown = [(n, seconds) for n, seconds in zip(curve.rows, curve.seconds, strict=True) if n & (n - 1) == 0]
    columns = [words("rows per pass"), *(Column(str(n), digits=2) for n, _ in shown)]
    cells: list[list[CellValue]] = [
        ["ms", *(f"{1e3 * seconds:.1f}" for _, seconds in shown)],
        ["relative to one row", *(seconds / curve.seconds[0] for _, seconds in shown)],
    ]
    return Table("Time of a target pass by its rows", columns, cells)
