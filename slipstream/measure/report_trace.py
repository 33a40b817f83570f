"""Makes the report of a trace: tokens by proposer, the acceptance rate over time and, on a page, the coloured text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.strict import JsonObject
from slipstream.measure import plots
from slipstream.measure.measurements import RollingRate, TraceData, TracedToken
from slipstream.measure.results import Result
from slipstream.measure.tables import CellValue, Column, Plot, Section, Table, percent, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEFORE = 400
"""Number of characters of the prompt's end that a page shows."""


def make_section(result: Result) -> Section:
    data, settings = result.read_data(TraceData), result.settings
    report = Section("Trace of one generation", write_lead(settings, data.stats))
    if not data.tokens:
        return report
    report.trace = show_text(data) | {"distribution": settings["distribution"]}
    if data.rolling:
        report.plots.append(plot_rates(data.rolling, settings["window"]))
    report.plots.append(plot_histogram(data.stats))
    report.tables.append(tabulate_proposers(data))
    return report


def write_lead(settings: JsonObject, stats: JsonObject) -> str:
    if not stats["steps"]:
        return "Nothing was generated before the run ended."
    tau = stats["mean_acceptance_length"]
    said = f"{stats['tokens']} tokens in {stats['steps']} steps: {tau:.2f} per step."
    if stats["proposed"]:
        said += (
            f" {stats['accepted']} of {stats['proposed']} draft tokens of {settings['contender']} were accepted: "
            f"acceptance rate {percent(stats['acceptance_rate'])}."
        )
    return said


def name_proposers(data: TraceData) -> list[str]:
    """Return the names of all proposers of tokens: the target first, then drafters in order of appearance."""
    named = [token.by for token in data.tokens] + [lost.by for token in data.tokens for lost in token.rejected]
    return ["target", *(name for name in dict.fromkeys(named) if name != "target")]


def show_text(data: TraceData) -> JsonObject:
    """Collect the values that a page shows for each token. The browser shows `label` while the pointer rests on a
    token."""
    prompt = data.prompt["text"]
    return {
        "who": name_proposers(data),
        "prompt": ("… " if len(prompt) > BEFORE else "") + prompt[-BEFORE:],
        "tokens": list(zip(data.tokens, data.pieces, strict=False)),
        "words": data.vocabulary,
        "visible": make_visible,
        "label": label_token,
    }


def make_visible(piece: str) -> str:
    """Return the text of a token, with visible marks if it is empty or consists of white space."""
    if piece and not piece.strip():
        piece = piece.replace("\n", "⏎\n").replace("\t", "⇥")
    return piece or "·"


def label_token(token: TracedToken, words: dict[str, str]) -> str:
    """Describe a token: step, proposer, probabilities, and the draft tokens that were rejected at its position.
    words: id of a rejected token -> text."""
    kind = "accepted draft token of" if token.drafted else "chosen by"
    lost = [f"rejected: {words[str(each.token)]!r} of {each.by}, {each.chances}" for each in token.rejected]
    return "; ".join([f"step {token.step + 1}: {kind} {token.by}, {token.chances}", *lost])


def plot_rates(points: list[RollingRate], window: int) -> Plot:
    xs = [point.token for point in points]
    groups = [
        (f"last {window} steps", xs, [point.rate for point in points]),
        ("since the beginning", xs, [point.overall for point in points]),
    ]
    return Plot(
        "acceptance-over-time", "Acceptance over time",
        f"Accepted draft tokens over verified ones: in the last {window} steps that drafted, and since the beginning.",
        "; ".join(f"by token {point.token}: {percent(point.rate)}" for point in points[:: 1 + len(points) // 12]),
        lambda axes: plots.draw_lines(axes, groups, "output token", "acceptance rate"),
    )  # fmt: skip


def plot_histogram(stats: JsonObject) -> Plot:
    counts = stats["histogram"]

    def draw(axes: Axes) -> None:
        axes.bar(range(len(counts)), counts, width=0.7, color=plots.SERIES[0])
        for x, count in enumerate(counts):
            if count:
                axes.annotate(str(count), (x, count), xytext=(0, 3), textcoords="offset points", ha="center",
                              color=plots.INK)  # fmt: skip
        axes.set_xticks(range(len(counts)))
        axes.set_xlabel("draft tokens accepted in a step")
        axes.set_ylabel("steps")
        axes.grid(visible=False, axis="x")

    return Plot(
        "accepted-histogram", "Accepted draft tokens per step",
        "Number of steps by accepted draft tokens. Prefill has no draft tokens and counts at 0.",
        "; ".join(f"{i} accepted: {n} steps" for i, n in enumerate(counts)), draw, height=2.5,
    )  # fmt: skip


def tabulate_proposers(data: TraceData) -> Table:
    """Tabulate output tokens and rejected draft tokens by proposer."""
    rows: list[list[CellValue]] = []
    for name in name_proposers(data):
        tokens = [token for token in data.tokens if token.by == name]
        lost = [each for token in data.tokens for each in token.rejected if each.by == name]
        mean = sum(token.p for token in tokens) / len(tokens) if tokens else None
        share = len(tokens) / len(data.tokens)
        rows.append([name, len(tokens), share, "" if name == "target" else len(lost), mean])
    columns = [words("proposed by"), Column("tokens"), Column("share", "%"), Column("rejected"),
               Column("mean p", digits=2)]  # fmt: skip
    note = "Only the first rejected token of a draft counts as rejected; the tokens after it were not verified."
    return Table("Who proposed what", columns, rows, note)
