"""What a page says of a verify result."""

from __future__ import annotations

from typing import Any

from slipstream.lab import plots
from slipstream.lab.plots import Plot
from slipstream.lab.report_page import Section, Table
from slipstream.lab.results import Result

HEADINGS = {
    "greedy": "Greedy texts, with and without the drafter",
    "coupled": "Sampled texts of one seed, with and without the drafter",
}
NOTES = {
    "greedy": "A near-tie is a margin of at most twice the noise that was measured for this model without any drafter.",
    "coupled": "Under rule coupled noise belongs to positions: the text depends on the target and the seed alone.",
}


def section(result: Result) -> Section:
    data, settings = result.data, result.settings
    made = Section("Does speculation change what the target says?", lead(data, settings))
    made.tables += [texts(name, data[name]) for name in HEADINGS if data[name]]
    if data["law"]:
        made.tables.append(law(data["law"]))
        made.plots += [outcomes(i, row) for i, row in enumerate(data["law"])]
    if data["control"]:
        c = data["control"]
        made.notes.append(
            f"Control without a drafter: {c['positions']} positions scored one row a pass and {c['rows']} rows a pass "
            f"differ by {c['noise']:.2g} at most; rounding explains {c['limit']:.2g}. Verdict: {c['verdict']}."
        )
    return made


def lead(data: dict[str, Any], settings: dict[str, Any]) -> str:
    what = f"{settings['drafter']}, K={settings['draft_tokens']}, rule {settings['rule']}"
    if data["verdict"] == "BUG":
        return f"BUG: {what} changes what the target says."
    if data["verdict"] == "lossy":
        return f"{what} changes what the target says, as this lossy rule may."
    said = [row["verdict"] for name in HEADINGS for row in data[name]]
    same = said.count("identical")
    return (
        f"No bug found in {what}: {same} of {len(said)} texts identical, {len(said) - same} parted at a tie, "
        f"no difference seen in {[row['verdict'] for row in data['law']].count('no difference seen')} of "
        f"{len(data['law'])} tests of the law."
    )


def texts(name: str, rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        parted = row["divergence"]
        place = ["", "", ""]
        if parted is not None:
            place = [str(parted["position"]), _number(parted["margin"]), _number(parted["noise"])]
        accepted = f"{row['accepted']} of {row['drafted']}"
        cells.append([short(row["prompt"]), row["verdict"], str(row["tokens"]), accepted, *place])
    heads = ("prompt", "verdict", "tokens", "accepted", "parts at token", "margin", "noise")
    return Table(HEADINGS[name], heads, cells, left=(0, 1), note=NOTES[name])


def short(name: str) -> str:
    """The file's own name of a prompt that is called by its path."""
    return name.rsplit("/", 1)[-1]


def law(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [
            short(row["prompt"]), row["verdict"], str(row["n"]), str(row["cells"]), _number(row["g"]),
            f"{row['p']:.2g}", "" if row["second_p"] is None else f"{row['second_p']:.2g}",
            _number(row["smallest_bias"]),
        ]
        for row in rows
    ]  # fmt: skip
    heads = ("prompt", "verdict", "samples", "outcomes", "G", "p-value", "second look", "smallest bias seen")
    return Table(
        "Samples against the target's own law", heads, cells, left=(0, 1),
        note="G-test on the first tokens, rare outcomes pooled. Smallest bias: the total variation, among these "
        f"outcomes, that would have been called a bug with {rows[0]['power']:.0%} certainty.",
    )  # fmt: skip


def outcomes(number: int, row: dict[str, Any]) -> Plot:
    cells = row["largest"]
    names = [repr(cell["text"]) for cell in cells]

    def draw(axes: Any, narrow: bool) -> None:
        places = range(len(cells))
        axes.barh([i - 0.2 for i in places], [c["expected"] for c in cells], 0.38, color=plots.GREY, label="expected")
        axes.barh(
            [i + 0.2 for i in places], [c["counted"] for c in cells], 0.38, color=plots.SERIES[0], label="counted"
        )
        shown = [name if len(name) < 24 or not narrow else name[:20] + "..." for name in names]
        axes.set_yticks(list(places), [_plain(name) for name in shown])
        axes.invert_yaxis()
        axes.set_xlabel(f"of {row['n']} samples")
        plots.legend(axes, narrow)

    return Plot(
        f"verify-law-{number + 1}", f"Outcomes furthest off: {short(row['prompt'])}",
        "The five kinds of beginning that differ most from their expectation; * is any other continuation. Chance "
        "alone makes some differ: the p-value says whether it may have.",
        "; ".join(f"{n}: {c['counted']} of {c['expected']:.1f} expected" for n, c in zip(names, cells, strict=True)),
        draw,
    )  # fmt: skip


def _plain(text: str) -> str:
    """matplotlib reads dollar signs as mathematics."""
    return text.replace("$", r"\$")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
