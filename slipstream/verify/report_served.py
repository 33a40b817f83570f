"""Report of a comparison of two servers."""

from __future__ import annotations

from typing import Any

from slipstream.bench.results import Result
from slipstream.bench.tables import Alarm, Column, Section, Table, small, words
from slipstream.verify.report_verify import short, verdict

BLIND_TO = (
    "What this comparison cannot see: whether the server drafts at all (its own metrics say so); a fault that both "
    "servers share; biases too small for this many samples; other prompts, sampling parameters and loads."
)


def section(result: Result) -> Section:
    data, settings = result.data, result.settings
    made = Section("Do two servers give the same output?", lead(data, settings))
    if data["greedy"]:
        made.tables.append(greedy(data["greedy"]))
    if data["sampled"]:
        made.tables.append(sampled(data["sampled"], settings))
    made.notes.append(BLIND_TO)
    return made


def lead(data: dict[str, Any], settings: dict[str, Any]) -> str:
    what = f"{settings['served']} and {settings['reference']}"
    if data["verdict"] == "BUG":
        return Alarm(f"BUG: {what} do not give the same output.")
    same = sum(row["verdict"] == "identical" for row in data["greedy"])
    return (
        f"No difference found between {what} that rounding does not explain: {same} of {len(data['greedy'])} greedy "
        f"texts identical, {len(data['sampled'])} prompts sampled {settings['samples']} times each (false-alarm "
        f"probability {settings['level']:g})."
    )


def greedy(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [short(row["prompt"]), row["tokens"], "yes" if row["repeats"] else "no", row["position"],
         None if row["margin"] is None else small(row["margin"]), verdict(row["verdict"])]
        for row in rows
    ]  # fmt: skip
    columns = [words("prompt"), Column("tokens"), words("reference repeats"), Column("differs at token"),
               Column("margin"), words("verdict")]  # fmt: skip
    return Table(
        "Greedy texts", columns, cells,
        f"Log-probabilities of shared beginnings differ by at most {small(rows[0]['noise'])} nats. A near-tie is a "
        "margin of at most twice that. Reference repeats: it gave the same text twice.",
    )  # fmt: skip


def sampled(rows: list[dict[str, Any]], settings: dict[str, Any]) -> Table:
    cells = []
    for row in rows:
        p = [None if row[name] is None else f"{row[name]:.2g}" for name in ("first_token", "ngrams", "second_p")]
        cells.append([short(row["prompt"]), row["samples"], *p, verdict(row["verdict"])])
    columns = [words("prompt"), Column("samples"), Column("p, first token"), Column("p, n-grams"), Column("p, again"),
               words("verdict")]  # fmt: skip
    return Table(
        f"Sampled texts of {settings['length']} tokens", columns, cells,
        "First token: G-test. N-grams: permutation test over whole texts. Again: p-value on new samples, where the "
        "first was below 0.01; only it decides.",
    )  # fmt: skip
