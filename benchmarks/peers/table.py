"""Makes a JSON document from a finished session, and tables and a plot from the document."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.figures import spread
from benchmarks.markdown import beside
from benchmarks.peers.lineup import BASE, CLASSES, MODES, SYSTEMS, Match, matches
from benchmarks.prompts import SETS, Prompts
from benchmarks.report import agreements, contender, noise, origin
from benchmarks.session import Session
from slipstream.measure import loops
from slipstream.measure.estimates import estimate_mean, estimate_ratio, explain_doubt
from slipstream.measure.plots import plot_intervals
from slipstream.measure.results import from_json
from slipstream.measure.tables import Estimate, Plot, ends

SCHEMA = 2
NEAR_TIE = 1e-3
"""If the target's two best logits differ by less, float32 rounding may change their order. Logits here are about
ten."""
NONE = "Slipstream has none"
VERDICTS = ("slower", "no difference shown", "faster", NONE, "not measured")
"""Possible results of a comparison, in the order of the tables: losses first."""


def assemble(session: Session, prompts: Prompts, provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the results as plain JSON values. prompts: has only the set "both".

    In the result, matches compares Slipstream with every setting of other systems within each class and mode, and best
    compares it with the fastest setting of each system.
    """
    compared = [_match(match, session) for match in matches(session.contenders)]
    texts = {row["key"]: row for row in agreements(session, prompts)}
    return {
        "schema": SCHEMA,
        "provenance": provenance,
        "prompts": {
            name: [{"length": len(p.ids), "new": p.tokens} for p in prompts["both"] if p.kind == name] for name in SETS
        },
        "loops": len(loops.find_looping(dict(enumerate(session.outputs.get(BASE, []))))),
        "contenders": [_row(key, session, prompts, texts.get(key)) for key in session.cells],
        "best": best(compared, session),
        "matches": compared,
        "skipped": {key: _last(reason) for key, reason in session.skipped.items()},
    }


def _row(key: str, session: Session, prompts: Prompts, text: dict[str, Any] | None) -> dict[str, Any]:
    who, cells = session.contenders[key], np.asarray(session.cells[key])  # [prompts, rounds]
    speed = np.array([[prompt.tokens] for prompt in prompts["both"]]) / cells
    row = contender(key, session, prompts) | {"system": SYSTEMS[who.worker]}
    kinds = np.array([prompt.kind for prompt in prompts["both"]])
    row |= {"bits": who.bits, "mode": who.mode} | {kind: spread(speed[kinds == kind]) for kind in SETS}
    if BASE in session.cells:
        row["over_plain"] = vars(estimate_ratio(session.cells[BASE], cells))
    note = "; ".join(filter(None, (who.note, session.notes.get(key) if not who.exact else None)))
    return row | {"text": text, "exact": who.exact, "note": note}


def _match(match: Match, session: Session) -> dict[str, Any]:
    """Estimate how many times as fast Slipstream's contender is as the other contender, paired by prompt and round."""
    row: dict[str, Any] = dict(vars(match))
    if match.ours is None:
        return row | {"verdict": NONE}
    if match.ours not in session.cells or match.theirs not in session.cells:
        return row | {"verdict": "not measured"}
    estimate = estimate_ratio(session.cells[match.theirs], session.cells[match.ours])
    verdict = "no difference shown" if explain_doubt(estimate) else "faster" if estimate.value > 1 else "slower"
    return row | vars(estimate) | {"verdict": verdict}


def best(compared: list[dict[str, Any]], session: Session) -> list[dict[str, Any]]:
    """Select for each system, class and mode the comparison with the system's fastest contender, or the first
    comparison if the system was not measured."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for row in compared:
        system = SYSTEMS[session.contenders[row["theirs"]].worker]
        groups.setdefault((row["bits"], row["mode"], system), []).append(row)

    def seconds(row: dict[str, Any]) -> float:
        cells = session.cells.get(row["theirs"])
        return estimate_mean(cells).value if cells else np.inf

    return [min(rows, key=seconds) | {"system": system} for (_, _, system), rows in groups.items()]


def _last(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def verdict(row: dict[str, Any]) -> str:
    """Describe how a contender's outputs compare with Slipstream's plain decoding: identical, different at near-ties,
    different because of other weights, or different."""
    if row["key"] == BASE:
        return "the reference"
    text = row["text"]
    if text is None:
        return "not compared"
    parted = text["divergences"]
    kind = "identical"
    if parted:
        margins = [d["margin"] for d in parted if "margin" in d]
        kind = f"{len(parted)} of {len(row['seconds'])} differ"
        if not row["exact"]:
            kind += ": other weights or arithmetic"
        elif len(margins) < len(parted):
            kind += ", gaps unknown"
        elif max(margins) < NEAR_TIE:
            kind += f", at near-ties (gap up to {max(margins):.1g})"
        else:
            kind = f"**{kind}, at a gap of {max(margins):.2g}**"
    return f"{kind}; not stable over rounds" if text["unstable"] else kind


def markdown(results: dict[str, Any], labels: dict[str, str]) -> str:
    """Render the results as Markdown. labels: names of all requested contenders, measured or not."""
    blocks = [
        noise(results),
        comparison("Slipstream and the fastest setting of each system", results["best"], results, labels),
        speeds(results, labels),
        comparison("Slipstream and every setting of the others", results["matches"], results, labels),
        notes(results),
        chosen(results),
        origin(results),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def comparison(
    title: str, compared: list[dict[str, Any]], results: dict[str, Any], labels: dict[str, str]
) -> list[str]:
    """Tabulate comparisons within a class and mode. Losses come first and are bold."""
    lines = [f"**{title}**: tokens/s on code / edits", ""]
    lines += ["| class | mode | ours | theirs | ours is (95 %) | |", "|---|---|---|---|---|---|"]
    measured = {row["key"]: row for row in results["contenders"]}
    wanted = [row for row in compared if row["theirs"] in labels and (row["ours"] is None or row["ours"] in labels)]
    order = {mode: number for number, mode in enumerate(MODES)}
    for row in sorted(wanted, key=lambda row: (VERDICTS.index(row["verdict"]), -row["bits"], order[row["mode"]])):
        line = [CLASSES[row["bits"]], row["mode"]]
        line += [named(labels[key], measured.get(key)) if key else "-" for key in (row["ours"], row["theirs"])]
        if "value" in row:
            line += [f"{_over(row['value'])}x as fast ({ends(from_json(Estimate, row), _over, ' to ')})"]
        else:
            line += [""]
        line += ["**slower**" if row["verdict"] == "slower" else row["verdict"]]
        lines.append(f"| {' | '.join(line)} |")
    return lines if wanted else []


def _over(value: float) -> str:
    return beside(value, 1)


def named(label: str, row: dict[str, Any] | None) -> str:
    """Return a contender's label, with speed and draft length if it was measured."""
    if row is None:
        return label
    length = f", K={row['draft_tokens']}" if row["draft_tokens"] else ""
    return f"{label}{length}: {row['code']['median']:.0f} / {row['edit']['median']:.0f}"


def speeds(results: dict[str, Any], labels: dict[str, str]) -> list[str]:
    """Tabulate all contenders in the order of the line-up, with the reason if a contender was not measured."""
    lines = ["| contender | class | draft length | code, tokens/s | edits, tokens/s | over our plain (95 %) | text |"]
    lines.append("|---|---|---|---|---|---|---|")
    measured = {row["key"]: row for row in results["contenders"]}
    for key, label in labels.items():
        if key not in measured:
            lines.append(f"| {label} | | | | | | not measured: {results['skipped'][key]} |")
            continue
        row = measured[key]
        over = row.get("over_plain")
        cells = [
            label,
            CLASSES[row["bits"]],
            str(row["draft_tokens"] or "-"),
            f"{row['code']['median']:.0f}",
            f"{row['edit']['median']:.0f}",
            "-" if over is None else f"{_over(over['value'])}x ({ends(from_json(Estimate, over), _over, ' to ')})",
            verdict(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def chosen(results: dict[str, Any]) -> list[str]:
    """Describe how the prompts were chosen, and how many outputs still loop."""
    choice, count = results["provenance"].get("choice"), sum(map(len, results["prompts"].values()))
    how = "Prompts: the first of each file, not chosen by whether their outputs loop."
    if choice:
        dropped = "; ".join(f"{name}: {n['kept']} of {n['examined']} qualify" for name, n in choice["examined"].items())
        how = f"Prompts: {choice['criterion']} ({dropped}). choice.json has the digest {choice['sha256']}."
    limit = f"more than {100 * loops.LOOPING:.0f} % of their tokens"
    return [f"{how} In this run {results['loops']} of {count} outputs of plain decoding end in a loop ({limit})."]


def notes(results: dict[str, Any]) -> list[str]:
    return [f"- {row['label']}: {row['note']}" for row in results["contenders"] if row["note"]]


def plot(results: dict[str, Any]) -> Plot:
    """Plot the speed over Slipstream's plain decoding, with one line for each contender, coloured by engine."""
    rows = [row for row in results["contenders"] if "over_plain" in row]
    systems = list(dict.fromkeys(SYSTEMS.values()))
    lines = [(row["label"], from_json(Estimate, row["over_plain"]), systems.index(row["system"])) for row in rows]

    return plot_intervals(
        "peers", "Side by side",
        "Tokens a second on code and edit prompts, over Slipstream's plain decoding, with 95 % intervals.",
        lines, "speed over Slipstream's plain decoding", row=0.27, width=7.4,  # for the labels
    )  # fmt: skip
