"""What a page says of a tune result."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from slipstream.lab import plots
from slipstream.lab.plots import Plot
from slipstream.lab.report_bench import interval
from slipstream.lab.report_page import Section, Table, percent, times
from slipstream.lab.results import Result


def section(result: Result) -> Section:
    data = result.data
    made = Section("Which drafter, and how far?", lead(data))
    if data["raced"]:
        made.tables.append(raced(data["raced"]))
    if data["drafters"]:
        made.plots.append(predictions(data["drafters"], data["raced"]))
        made.tables.append(recorded(data["drafters"]))
    if data["configs"]:
        made.html = configs(data["configs"])
    if data["choice"] and data["choice"]["lengths"]:
        spans = (
            f"{a if a == b else f'{a} to {b}'}: {f'K={k}' if k else 'off'}" for a, b, k in data["choice"]["lengths"]
        )
        made.notes.append(f"Draft length by batch size, predicted: {', '.join(spans)}.")
    return made


def lead(data: dict[str, Any]) -> str:
    choice = data["choice"]
    if not data["raced"]:
        return "Nothing was confirmed before the run ended, so nothing is chosen."
    if choice is None:
        return "None: no drafter was faster than plain decoding beyond doubt."
    return (
        f"{choice['label']}, K={choice['draft_tokens']}: {times(choice['predicted'])} predicted, "
        f"{interval(choice['speedup'])} measured over plain decoding."
    )


def raced(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [
            f"{row['label']}, K={row['draft_tokens']}", times(row["predicted"]), interval(row["speedup"]),
            f"{100 * (row['predicted'] / row['speedup']['value'] - 1):+.0f} %", "yes" if row["exact"] else "NO",
        ]
        for row in rows
    ]  # fmt: skip
    heads = ("setting", "predicted", "measured (95 %)", "off by", "texts as plain")
    return Table("Raced against plain decoding", heads, cells, left=(0, 4))


def recorded(rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        m, gains = row["measured"], row["predicted"]
        best = max(range(len(gains)), key=gains.__getitem__)
        rates = " ".join(percent(rate) for rate in m["position_rates"])
        step = m["costs"]["seconds"][0] + m["plain_host"]
        cost = (m["draft_fixed"] + m["draft_each"] * m["draft_tokens"]) / step
        drafted = percent(m["drafted"][0] if m["drafted"] else 0.0)
        cells.append([row["label"], drafted, rates, f"{cost:.2f}", str(best + 1), times(gains[best])])
    heads = ("drafter", "rounds that draft", "accepted by position", "cost in plain steps", "best K", "predicted")
    return Table("Recorded at the longest draft", heads, cells, left=(0, 2))


def predictions(rows: list[dict[str, Any]], confirmed: list[dict[str, Any]]) -> Plot:
    def draw(axes: Any, narrow: bool) -> None:
        for i, row in enumerate(rows):
            colour, gains = plots.SERIES[i % len(plots.SERIES)], row["predicted"]
            dash = plots.DASHES[i % len(plots.DASHES)]
            axes.plot(range(1, len(gains) + 1), gains, color=colour, linestyle=dash, label=row["label"])
            for done in confirmed:
                if done["contender"] == i:
                    gain = done["speedup"]
                    spread = [[gain["value"] - gain["low"]], [gain["high"] - gain["value"]]]
                    marker = plots.MARKERS[i % len(plots.MARKERS)]
                    axes.errorbar([done["draft_tokens"]], [gain["value"]], spread, fmt=marker, color=colour, capsize=3)
        axes.axhline(1, color=plots.SOFT, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_xlabel("draft length K")
        axes.set_ylabel("speed-up over plain decoding")
        plots.ticks(axes, range(1, max(len(row["predicted"]) for row in rows) + 1))
        plots.legend(axes, narrow, columns=3)

    return Plot(
        "tune-predicted", "Predicted and measured speed-up",
        "Lines: predicted from one recording. Points: raced against plain decoding, with 95 % intervals. At 1 lies "
        "plain decoding.",
        "; ".join(f"{r['label']}: {', '.join(times(g) for g in r['predicted'])} at K = 1, 2, ..." for r in rows),
        draw, height=3.6,
    )  # fmt: skip


def configs(made: dict[str, Any]) -> str:
    """The choice for every program, to be copied."""
    parts = []
    for name, entry in made.items():
        text = json.dumps(entry, indent=1) if name == "slipstream" else entry["text"]
        note = "" if name == "slipstream" else entry["note"]
        code = f'<div class="scroll" tabindex="0"><pre><code>{escape(text)}</code></pre></div>' if text else ""
        parts.append(f"<h3>{escape(name)}</h3>{code}" + (f'<p class="note">{escape(note)}</p>' if note else ""))
    return f"<details open><summary>The choice as a configuration</summary>{''.join(parts)}</details>"
