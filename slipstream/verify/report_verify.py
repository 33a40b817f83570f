"""Report of a verify result."""

from typing import Any

from slipstream.bench.results import Result
from slipstream.bench.tables import Alarm, Column, Section, Table, small, words
from slipstream.verify.outcomes import BY_REQUEST, PAIR

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


def section(result: Result) -> Section:
    data, settings = result.data, result.settings
    shown = Section("Does speculation change the target's output?", lead(data, settings))
    for name in HEADINGS:
        if data[name]:
            shown.tables.append(passes(name, data[name]))
            differing = [row for row in data[name] if row["divergence"] is not None]
            shown.tables += [differences(name, differing)] if differing else []
    shown.notes += [f"Wrong in single texts: {'; '.join(data['faults'][:5])}."] if data["faults"] else []
    if data["distribution"]:
        shown.tables.append(places(data["distribution"]))
    if data["control"]:
        c = data["control"]
        shown.notes.append(
            f"Control, no drafter: {c['positions']} positions computed with one row per pass and with {c['rows']} rows "
            f"per pass: logits differ by at most {c['noise']:.2g} (rounding explains {c['limit']:.2g}), the most "
            f"likely token at {c['flips']} positions. Tokens of plain greedy texts are at most {c['behind']:.2g} below "
            f"the best logit: {c['verdict']}."
        )
    shown.notes.append(BLIND_TO.format(reach=max(settings["reach"], settings["params"]["max_tokens"])))
    return shown


def lead(data: dict[str, Any], settings: dict[str, Any]) -> str:
    what = f"{settings['drafter']}, K={settings['draft_tokens']}, rule {settings['rule']}"
    if data["verdict"] == "BUG":
        return Alarm(f"BUG: {what} changes the target's output.")
    untested = [name for name, row in data["coverage"].items() if row["verdict"] == "not tested"]
    if untested:
        return Alarm(f"Not tested: {what} drafted too little in {', '.join(untested)}.")
    said = [row["verdict"] for name in HEADINGS for row in data[name]]
    ties = sum(verdict.startswith("tie") for verdict in said)
    parts = [f"{len(said) - ties} of {len(said)} texts identical"] if said else []
    parts += [f"{ties} differ from a near-tie on, within measured noise"] if ties else []
    if data["distribution"]:
        parts.append(
            f"{data['sampled_tokens']:,} sampled tokens follow the target's distribution (false-alarm probability "
            f"{settings['level']:g})"
        )
    return f"No bug found in {what}: {', '.join(parts)}." if parts else f"Nothing was compared for {what}."


def verdict(text: str) -> str:
    return Alarm(text) if text == "BUG" else text


def passes(name: str, rows: list[dict[str, Any]]) -> Table:
    """A row for each way to decode the texts."""
    cells = []
    each = [(row["mixed"], row["draft_tokens"], row["batch"], row.get("chosen", False)) for row in rows]
    for how in dict.fromkeys(each):
        group = [row for row, other in zip(rows, each, strict=True) if other == how]
        said = [row["verdict"] for row in group]
        worst = "BUG" if "BUG" in said else "ok"
        ties = sum(each.startswith("tie") for each in said)
        accepted, drafted = (sum(row[key] for row in group) for key in ("accepted", "drafted"))
        lengths = "chosen" if how[3] else f"0 to {how[1]}" if how[0] else how[1]
        cells.append(
            [lengths, how[2], len(group), said.count("identical"), ties, f"{accepted} of {drafted}", verdict(worst)]
        )
    columns = [Column("K"), Column("batch"), Column("texts"), Column("identical"), Column("near-ties"),
               Column("accepted"), words("verdict")]  # fmt: skip
    note = (
        f"{NOTES[name]} The last rows: requests with other sampling parameters beside them, which join one by one, "
        "continue earlier texts and are preempted."
    )
    return Table(HEADINGS[name], columns, cells, note)


def differences(name: str, rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        parted = row["divergence"]
        place = [parted["position"], small(parted["margin"]), small(parted["noise"])]
        cells.append([short(row["prompt"]), row["draft_tokens"], *place, verdict(row["verdict"])])
    columns = [words("prompt"), Column("K"), Column("differs at token"), Column("margin"), Column("noise"),
               words("verdict")]  # fmt: skip
    return Table(f"Differences: {HEADINGS[name].lower()}", columns, cells)


SHORT_PLACES = {
    "draft token 1": "1", "draft token 2": "2", "draft token 3 or deeper": "3...", "behind a draft token": "behind",
    "bonus token": "bonus", "without a draft": "none", "all positions": "all", "late positions": "late",
    "chosen lengths": "chosen",
}  # fmt: skip


def places(rows: list[dict[str, Any]]) -> Table:
    """A row for each test, a column for each place."""
    step = [row for row in rows if row["place"] != BY_REQUEST]
    names = ["tokens", "ranks", *dict.fromkeys(name for row in step for name in row["outcomes"])]
    cells: list[list[Any]] = []
    for name in names:
        values = [row["positions"] if name == "tokens" else _p(row, name) for row in step]
        cells.append([name, *values])
    cells.append(["impossible", *(row["forbidden"] for row in step)])
    cells.append(["smallest bias", *(_or_dash(row["smallest_bias"], ".3f") for row in step)])
    cells.append(["p again", *(_or_dash(row["second_p"], ".2g") for row in step)])
    cells.append(["verdict", *(verdict("BUG" if row["verdict"] == "BUG" else "ok") for row in step)])
    columns = [words("p-value of"), *(Column(SHORT_PLACES.get(row["place"], row["place"])) for row in step)]
    beside = [f"p = {_p(row, PAIR)}" for row in rows if row["place"] == BY_REQUEST]
    return Table(
        "Every token of sampled texts against the target's distribution at its position", columns, cells,
        "Columns are places in the step: draft tokens 1, 2, 3 and deeper, all that are behind an accepted one, the "
        "bonus token, tokens of steps without a draft. Ranks, ids: in the order of probabilities and of ids, tokens "
        "are spread as their probabilities say. Other rows: how often a kind of token occurs, against the target's "
        "probability of it: tokens that the draft favours, rare ones, ends of texts, the last token that a filter "
        "keeps, tokens that a penalty reaches. With the last, joint: whether tokens depend on the one before beyond "
        f"that; between requests: {' '.join(beside) or 'too few'}. Where a p-value is small, new samples decide. -: "
        "too few positions, or not valid under this rule.",
    )  # fmt: skip


def _p(row: dict[str, Any], name: str) -> str:
    return _or_dash(row["ranks"] if name == "ranks" else row["outcomes"].get(name), ".2g")


def _or_dash(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def short(name: str) -> str:
    """The file name of a prompt that is named by its path."""
    return name.rsplit("/", 1)[-1]
