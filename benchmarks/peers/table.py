"""The results of a finished session: a JSON document, and a table and a plot created from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.lineup import BASE, MATCHES, SYSTEMS, Match
from benchmarks.prompts import Prompts
from benchmarks.report import agreements, contender, noise, origin
from benchmarks.session import Session
from slipstream.lab.estimates import ratio, spread
from slipstream.lab.plots import Plot, intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = 1
NEAR_TIE = 1e-3
"""Gap between the target's two best logits that float32 rounding may close; logits here are of the order of ten."""


def assemble(session: Session, prompts: Prompts, provenance: dict[str, Any]) -> dict[str, Any]:
    """The results as plain JSON values; `prompts` has the one set "both"."""
    texts = {row["key"]: row for row in agreements(session, prompts)}
    return {
        "schema": SCHEMA,
        "provenance": provenance,
        "prompts": {
            name: [{"length": len(p.ids), "new": p.tokens} for p in prompts["both"][start::2]]
            for start, name in enumerate(("code", "edit"))
        },
        "contenders": [_row(key, session, prompts, texts.get(key)) for key in session.cells],
        "matches": [_match(match, session) for match in MATCHES],
        "skipped": {key: _last(reason) for key, reason in session.skipped.items()},
    }


def _row(key: str, session: Session, prompts: Prompts, text: dict[str, Any] | None) -> dict[str, Any]:
    who, cells = session.contenders[key], np.asarray(session.cells[key])  # [prompts, rounds]
    speed = np.array([[prompt.tokens] for prompt in prompts["both"]]) / cells
    row = contender(key, session, prompts) | {"system": SYSTEMS[who.worker]}
    row |= {"code": spread(speed[0::2]), "edit": spread(speed[1::2])}
    if BASE in session.cells:
        row["over_plain"] = vars(ratio(session.cells[BASE], cells))
    note = "; ".join(filter(None, (who.note, session.notes.get(key) if not who.exact else None)))
    return row | {"text": text, "exact": who.exact, "note": note}


def _match(match: Match, session: Session) -> dict[str, Any]:
    """How many times as fast as the other contender ours is, paired by prompt and round."""
    row: dict[str, Any] = dict(vars(match))
    if match.ours not in session.cells or match.theirs not in session.cells:
        return row | {"verdict": "not measured"}
    found = ratio(session.cells[match.theirs], session.cells[match.ours])
    verdict = "faster" if found.low > 1 else "slower" if found.high < 1 else "no difference shown"
    return row | vars(found) | {"verdict": verdict}


def _last(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def verdict(row: dict[str, Any]) -> str:
    """A row's text against Slipstream's plain decoding: identical, different at near-ties, other weights, or
    different."""
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
    """The tables for people. labels: contender -> name, of all requested contenders, measured or not."""
    blocks = [noise(results), speeds(results, labels), matches(results, labels), notes(results), origin(results)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def speeds(results: dict[str, Any], labels: dict[str, str]) -> list[str]:
    """All contenders in the order of the line-up; for those not measured, the reason."""
    rows = ["| contender | draft length | code, tokens/s | edits, tokens/s | over our plain (95 %) | text |"]
    rows.append("|---|---|---|---|---|---|")
    measured = {row["key"]: row for row in results["contenders"]}
    for key, label in labels.items():
        if key not in measured:
            rows.append(f"| {label} | | | | | not measured: {results['skipped'][key]} |")
            continue
        row = measured[key]
        over = row.get("over_plain")
        cells = [
            label,
            str(row["draft_tokens"] or "-"),
            f"{row['code']['median']:.0f}",
            f"{row['edit']['median']:.0f}",
            "-" if over is None else f"{over['value']:.2f}x ({over['low']:.2f} to {over['high']:.2f})",
            verdict(row),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def matches(results: dict[str, Any], labels: dict[str, str]) -> list[str]:
    """Comparisons of equal methods; slower ones of Slipstream in bold."""
    rows = ["| like against like | ours | theirs | ours is (95 %) | |", "|---|---|---|---|---|"]
    for row in (row for row in results["matches"] if {row["ours"], row["theirs"]} <= labels.keys()):
        line = [row["what"], labels[row["ours"]], labels[row["theirs"]]]
        if "value" in row:
            loses = row["verdict"] == "slower"
            line += [f"{row['value']:.2f}x as fast ({row['low']:.2f} to {row['high']:.2f})"]
            line += ["**slower**" if loses else row["verdict"]]
        else:
            line += ["", row["verdict"]]
        rows.append(f"| {' | '.join(line)} |")
    return rows


def notes(results: dict[str, Any]) -> list[str]:
    return [f"- {row['label']}: {row['note']}" for row in results["contenders"] if row["note"]]


def plot(results: dict[str, Any]) -> Plot:
    """Speed over Slipstream's plain decoding, one line per contender, coloured by engine."""
    rows = [row for row in results["contenders"] if "over_plain" in row]
    systems = list(dict.fromkeys(SYSTEMS.values()))
    lines = [(row["label"], row["over_plain"], systems.index(row["system"])) for row in rows]

    def draw(axes: Axes, narrow: bool) -> None:
        intervals(axes, lines, "speed over Slipstream's plain decoding", narrow)

    fastest = max(rows, key=lambda row: row["over_plain"]["value"])
    return Plot(
        name="peers",
        title="Side by side",
        caption="Tokens a second on code and edit prompts, over Slipstream's plain decoding, with 95 % intervals.",
        alt=f"{len(rows)} ways of decoding; the fastest is {fastest['label']}, {fastest['over_plain']['value']:.2f}x.",
        draw=draw,
        height=0.8 + 0.27 * len(rows),
    )
