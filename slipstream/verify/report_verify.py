"""The data of a verify result, and its report."""

from dataclasses import dataclass, field
from typing import Any

from slipstream.core.strict import JsonObject
from slipstream.measure.measurements import Divergence
from slipstream.measure.results import Result
from slipstream.measure.tables import Alarm, Column, Section, Table, small, tabulate, words
from slipstream.verify.outcomes import BY_REQUEST, PAIR, PlaceTest

IDENTICAL, TIE, BUG, UNTESTED = "identical", "tie within measured noise", "BUG", "not tested"

BLIND_TO = (
    "What this run cannot see: a bias smaller than the ones stated, or at places with too few positions; "
    "structured output, other prompts, and positions after {reach}; a target that is wrong in itself, "
    "because its own logits are the reference."
)
HEADINGS = {
    "greedy": "Greedy texts with and without the drafter",
    "coupled": "Sampled texts of one seed with and without the drafter (rule coupled)",
}
NOTES = {
    "greedy": "A near-tie is a margin of at most twice the noise that was measured for this model without any drafter.",
    "coupled": "Under rule coupled, random numbers belong to positions: texts depend only on the target and the seed.",
}


@dataclass(frozen=True)
class Control:
    """Logits from passes of one row compared with passes of `rows` rows, without a drafter.

    positions  number of positions that were scored both ways.
    noise      largest |difference| of a logit.
    scale      mean standard deviation of the logits of a row.
    limit      largest noise that rounding explains.
    flips      number of positions whose argmax differs, so that a text could diverge without a drafter.
    behind     largest difference between the target's best logit and the logit of a token of the plain greedy text,
               after penalties. If decoding without a drafter is right, rounding explains this difference.
    """

    rows: int
    positions: int
    noise: float
    scale: float
    limit: float
    flips: int
    behind: float

    @property
    def verdict(self) -> str:
        if max(self.noise, self.behind) > self.limit:
            return BUG
        return "rounding" if self.noise or self.behind else IDENTICAL


@dataclass(frozen=True)
class ComparedText:
    """A text with the drafter, compared with the text without. divergence: None if both are equal. drafted, accepted:
    numbers of tokens. draft_tokens, batch, mixed, chosen: how the text was decoded (`texts.Pass`)."""

    prompt: str
    verdict: str
    tokens: int
    divergence: Divergence | None
    seed: int | None
    drafted: int
    accepted: int
    draft_tokens: int
    batch: int
    mixed: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class Coverage:
    """The numbers of verified and accepted draft tokens in a check, and whether enough tokens were verified."""

    drafted: int
    accepted: int
    verdict: str


@dataclass(frozen=True)
class TestedPlace(PlaceTest):
    """The tests of a place, and their repetition. second_p: p-value of new samples, if the first p-value was small.
    smallest_bias: smallest bias of a token's probability that would be called a bug."""

    second_p: float | None
    verdict: str
    smallest_bias: float | None


@dataclass
class VerifyData:
    """The rows of each check. faults: errors in single texts."""

    prompts: JsonObject = field(default_factory=dict)
    control: Control | None = None
    coverage: dict[str, Coverage] = field(default_factory=dict)
    sampled_tokens: int = 0
    greedy: list[ComparedText] = field(default_factory=list)
    coupled: list[ComparedText] = field(default_factory=list)
    distribution: list[TestedPlace] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    verdict: str = "ok"

    @property
    def compared(self) -> dict[str, list[ComparedText]]:
        """Return check -> compared texts, for the checks that ran."""
        checks = {"greedy": self.greedy, "coupled": self.coupled}
        return {name: rows for name, rows in checks.items() if rows}

    def judge(self) -> str:
        """Return "BUG" if a check found a bug, "not tested" if too little was drafted in a check, else "ok"."""
        control = [self.control] if self.control else []
        rows: list[Any] = [*self.greedy, *self.coupled, *self.distribution, *control, *self.coverage.values()]
        said = {row.verdict for row in rows} | {BUG for _ in self.faults}
        return next((each for each in (BUG, UNTESTED) if each in said), "ok")


def make_section(result: Result) -> Section:
    data, settings = result.read_data(VerifyData), result.settings
    shown = Section("Does speculation change the target's output?", write_lead(data, settings))
    for name, rows in data.compared.items():
        differing = [row for row in rows if row.divergence is not None]
        shown.tables += [tabulate_passes(name, rows), *([tabulate_differences(name, differing)] if differing else [])]
    shown.notes += [f"Wrong in single texts: {'; '.join(data.faults[:5])}."] if data.faults else []
    if data.distribution:
        shown.tables.append(tabulate_places(data.distribution))
    if data.control:
        c = data.control
        shown.notes.append(
            f"Control, no drafter: {c.positions} positions computed with one row per pass and with {c.rows} rows "
            f"per pass: logits differ by at most {c.noise:.2g} (rounding explains {c.limit:.2g}), the most "
            f"likely token at {c.flips} positions. Tokens of plain greedy texts are at most {c.behind:.2g} below "
            f"the best logit: {c.verdict}."
        )
    shown.notes.append(BLIND_TO.format(reach=max(settings["reach"], settings["params"]["max_tokens"])))
    return shown


def write_lead(data: VerifyData, settings: JsonObject) -> str:
    what = f"{settings['drafter']}, K={settings['draft_tokens']}, rule {settings['rule']}"
    if data.verdict == BUG:
        return Alarm(f"BUG: {what} changes the target's output.")
    untested = [name for name, row in data.coverage.items() if row.verdict == UNTESTED]
    if untested:
        return Alarm(f"Not tested: {what} drafted too little in {', '.join(untested)}.")
    said = [row.verdict for rows in data.compared.values() for row in rows]
    ties = said.count(TIE)
    parts = [f"{len(said) - ties} of {len(said)} texts identical"] if said else []
    parts += [f"{ties} differ from a near-tie on, within measured noise"] if ties else []
    if data.distribution:
        parts.append(
            f"{data.sampled_tokens:,} sampled tokens follow the target's distribution (false-alarm probability "
            f"{settings['level']:g})"
        )
    return f"No bug found in {what}: {', '.join(parts)}." if parts else f"Nothing was compared for {what}."


def mark(text: str) -> str:
    return Alarm(text) if text == BUG else text


def tabulate_passes(name: str, rows: list[ComparedText]) -> Table:
    """Tabulate the compared texts, with a row for each way of decoding."""
    groups: dict[Any, list[ComparedText]] = {}
    for row in rows:
        groups.setdefault((row.mixed, row.draft_tokens, row.batch, row.chosen), []).append(row)

    def length(group: list[ComparedText]) -> Any:
        most = group[0].draft_tokens
        return "chosen" if group[0].chosen else f"0 to {most}" if group[0].mixed else most

    def count(said: str) -> Any:
        return lambda group: sum(row.verdict == said for row in group)

    columns = [
        Column("K", cell=length),
        Column("batch", cell=lambda group: group[0].batch),
        Column("texts", cell=len),
        Column("identical", cell=count(IDENTICAL)),
        Column("near-ties", cell=count(TIE)),
        Column("accepted", cell=lambda g: f"{sum(row.accepted for row in g)} of {sum(row.drafted for row in g)}"),
        words("verdict", lambda group: mark(BUG if count(BUG)(group) else "ok")),
    ]
    note = (
        f"{NOTES[name]} In the last rows, requests with other sampling parameters run at the same time. They join one "
        "by one, continue earlier texts and are preempted."
    )
    return tabulate(HEADINGS[name], groups.values(), columns, note)


def tabulate_differences(name: str, rows: list[ComparedText]) -> Table:
    columns = [
        words("prompt", lambda row: shorten(row.prompt)),
        Column("K", cell=lambda row: row.draft_tokens),
        Column("differs at token", cell=lambda row: row.divergence.position),
        Column("margin", cell=lambda row: small(row.divergence.margin)),
        Column("noise", cell=lambda row: small(row.divergence.noise)),
        words("verdict", lambda row: mark(row.verdict)),
    ]
    return tabulate(f"Differences: {HEADINGS[name].lower()}", rows, columns)


SHORT_PLACES = {
    "draft token 1": "1", "draft token 2": "2", "draft token 3 or deeper": "3...", "behind a draft token": "behind",
    "bonus token": "bonus", "without a draft": "none", "all positions": "all", "late positions": "late",
    "chosen lengths": "chosen",
}  # fmt: skip


def tabulate_places(rows: list[TestedPlace]) -> Table:
    """Tabulate the p-values, with a row for each test and a column for each place."""
    step = [row for row in rows if row.place != BY_REQUEST]
    names = ["tokens", "ranks", *dict.fromkeys(name for row in step for name in row.outcomes)]
    cells: list[list[Any]] = []
    for name in names:
        values = [row.positions if name == "tokens" else _p(row, name) for row in step]
        cells.append([name, *values])
    cells.append(["impossible", *(row.forbidden for row in step)])
    cells.append(["smallest bias", *(_or_dash(row.smallest_bias, ".3f") for row in step)])
    cells.append(["p again", *(_or_dash(row.second_p, ".2g") for row in step)])
    cells.append(["verdict", *(mark(BUG if row.verdict == BUG else "ok") for row in step)])
    columns = [words("p-value of"), *(Column(SHORT_PLACES.get(row.place, row.place)) for row in step)]
    beside = [f"p = {_p(row, PAIR)}" for row in rows if row.place == BY_REQUEST]
    return Table(
        "Every token of sampled texts against the target's distribution at its position", columns, cells,
        "Columns are places in the step: draft tokens 1, 2, 3 and deeper, all draft tokens after an accepted one, the "
        "bonus token, tokens of steps without a draft. Ranks, ids: whether tokens occur as often as the target's "
        "probabilities say, with tokens in the order of probability and of id. Other rows: the same for a kind of "
        "token, such as tokens that the draft favours, rare tokens, ends of texts, the last token that a filter keeps, "
        "tokens with a penalty. With the last, joint: whether tokens also depend on the token before in another way; "
        f"between requests: {' '.join(beside) or 'too few'}. If a p-value is small, new samples decide. -: too few "
        "positions, or not valid under this rule.",
    )  # fmt: skip


def _p(row: PlaceTest, name: str) -> str:
    return _or_dash(row.ranks if name == "ranks" else row.outcomes.get(name), ".2g")


def _or_dash(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def shorten(name: str) -> str:
    """Return the file name of a prompt that is named by its path."""
    return name.rsplit("/", 1)[-1]
