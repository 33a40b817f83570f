"""Makes a JSON document from a finished session, and Markdown tables from the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.figures import FIGURES, Figure, agreement, judge, spread
from benchmarks.markdown import document, noise, versions
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.prompts import Prompts
from benchmarks.session import Session
from slipstream.measure.results import from_json
from slipstream.measure.tables import Estimate, ends

SCHEMA = 1


def assemble(
    session: Session,
    figures: list[str],
    prompts: Prompts,
    provenance: dict[str, Any],
    table: Mapping[str, Figure] = FIGURES,
) -> dict[str, Any]:
    """Return the results as plain JSON values. figures: keys of the table of figures."""
    series = {**session.series, **session.cells}
    return {
        "schema": SCHEMA,
        "provenance": provenance,
        "prompts": {name: [{"length": len(p.ids), "new": p.tokens} for p in rows] for name, rows in prompts.items()},
        "figures": [judge(key, series, session.skipped, table) for key in figures],
        "contenders": [contender(key, session, prompts) for key in session.cells],
        "agreement": agreements(session, prompts),
        "series": session.series,
        "skipped": session.skipped,
    }


def contender(key: str, session: Session, prompts: Prompts) -> dict[str, Any]:
    """Return the speed of one contender (tokens/s, prefill included), and its acceptance if the engine counts it."""
    who, seconds, counts = session.contenders[key], session.cells[key], session.counts.get(key, [])
    new = np.array([[prompt.tokens] for prompt in prompts[who.prompts]])  # [prompts, 1]
    total = {n: sum(c[n] for c in counts) for n in ("tokens", "steps", "proposed", "accepted")} if counts else {}
    phases = {p: sum(c["seconds"][p] for c in counts) for p in counts[0]["seconds"]} if counts else {}
    return {
        "key": key,
        "label": who.label,
        "prompts": who.prompts,
        "draft_tokens": session.chosen[key],
        "tuning_seconds_per_token": session.tuning.get(key, {}),
        "seconds": seconds,
        "tokens_per_second": spread(new / np.asarray(seconds)),
        "acceptance_rate": total["accepted"] / total["proposed"] if total.get("proposed") else None,
        "mean_acceptance_length": total["tokens"] / total["steps"] if total else None,
        "phase_shares": {p: s / sum(phases.values()) for p, s in phases.items()} if phases else None,
    }


def agreements(session: Session, prompts: Prompts) -> list[dict[str, Any]]:
    """Compare every contender's outputs with our own plain decoding on the same prompts."""
    rows = []
    for key in session.cells:
        who = session.contenders[key]
        base = next((k for k in session.cells if _is_plain(session, k, who.prompts)), key)
        if key == base:
            continue
        row: dict[str, Any] = {"key": key, "label": who.label, "prompts": who.prompts, "same_weights": who.exact}
        row |= agreement(session.outputs[base], session.outputs[key])
        session.margins(session.outputs[base], prompts[who.prompts], row["divergences"])
        rows.append({**row, "unstable": sorted(session.unstable.get(key, ()))})
    return rows


def _is_plain(session: Session, key: str, prompts: str) -> bool:
    who = session.contenders[key]
    return (who.worker, who.model, who.prompts) == ("slipstream", "plain", prompts)


def markdown(results: dict[str, Any]) -> str:
    """Render the results as Markdown."""
    return document(results, [noise, figure_table, speed_table, text_notes, origin])


def figure_table(results: dict[str, Any]) -> list[str]:
    body = []
    for row in results["figures"]:
        figure = Figure.of(row)
        if row["verdict"] == "skipped":
            body.append([row["figure"], figure.bound, "", "", f"skipped: {row['reason'].splitlines()[-1]}"])
            continue
        interval = ends(from_json(Estimate, row), figure.show, " to ")
        verdict = "reached" if row["verdict"] == "reached" else "**missed**"
        body.append([row["figure"], figure.bound, figure.show(row["value"]), interval, verdict])
    return [rows(["figure", "must reach", "measured", "95 % interval", ""], body, (0, 4))]


def speed_table(results: dict[str, Any]) -> list[str]:
    """Tabulate speeds, and acceptance as in `slipstream.core.stats`."""
    heads = ["contender", "prompts", "draft length", "tokens/s, median (quartiles)", "acceptance rate", "tokens a step"]
    body = []
    for row in results["contenders"]:
        speed, rate, tau = row["tokens_per_second"], row["acceptance_rate"], row["mean_acceptance_length"]
        body.append(
            [
                row["label"],
                row["prompts"],
                row["draft_tokens"] or "-",
                f"{speed['median']:.0f} ({speed['q1']:.0f} to {speed['q3']:.0f})",
                "-" if rate is None else f"{100 * rate:.0f} %",
                "-" if tau is None else f"{tau:.2f}",
            ]
        )
    return [rows(heads, body, (0, 1))]


def text_notes(results: dict[str, Any]) -> list[str]:
    """Write one line for each contender about its outputs, compared with our plain decoding."""
    if not results["agreement"]:
        return []
    notes = ["Texts compared with Slipstream's plain decoding, greedy:", ""]
    for row in results["agreement"]:
        note = f"- {row['label']} ({row['prompts']}): {100 * row['identical']:.0f} % of the prompts identical"
        if not row["same_weights"]:
            note += " (other weights, so other texts are expected)"
        if row["divergences"]:
            first = min(row["divergences"], key=lambda d: d["token"])
            note += f", first difference at token {first['token']}"
        margins = [d["margin"] for d in row["divergences"] if "margin" in d]
        if margins and row["same_weights"]:
            note += f", where the target's two best logits lie at most {max(margins):.1g} apart"
        if row["unstable"]:
            note += f"; not the same in every round on {len(row['unstable'])} prompts"
        notes.append(note)
    return notes


def origin(results: dict[str, Any]) -> list[str]:
    source, machine = results["provenance"], results["provenance"]["machine"]
    count = {name: len(rows) for name, rows in results["prompts"].items()}
    new = [p["new"] for rows in results["prompts"].values() for p in rows]
    rounds = max((len(cells[0]) for cells in (c["seconds"] for c in results["contenders"])), default=0)
    return [
        f"{source['date']}, commit {source['commit']}; {machine['cpu']}, {machine['cores']} cores, "
        f"{source['threads']} threads, {source['dtype']}; "
        f"{min(new)} to {max(new)} new tokens, {', '.join(f'{n} {s}' for s, n in count.items())} prompts, "
        f"{rounds} rounds. {versions(source)}",
        "",
        f"    {source['command']}",
    ]
