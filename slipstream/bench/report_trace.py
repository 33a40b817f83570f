"""Report of a trace: who proposed what; on a page the text in colours, and the acceptance rate over time."""

from typing import Any

from slipstream.bench import plots
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Plot, Section, Table, percent, words
from slipstream.templates import filled

BEFORE = 400
"""Characters of the prompt's end that are shown."""


def section(result: Result) -> Section:
    data, settings = result.data, result.settings
    stats = data["stats"]
    report = Section("Trace of one generation", lead(settings, stats))
    if not data["tokens"]:
        return report
    report.html = text(result)
    if data["rolling"]:
        report.plots.append(over_time(data["rolling"], settings["window"]))
    report.plots.append(histogram(stats))
    report.tables.append(by_proposer(data))
    return report


def lead(settings: dict[str, Any], stats: dict[str, Any]) -> str:
    tau = stats["mean_acceptance_length"]
    if not stats["steps"]:
        return "Nothing was generated before the run ended."
    said = f"{stats['tokens']} tokens in {stats['steps']} steps: {tau:.2f} per step."
    if stats["proposed"]:
        said += (
            f" {stats['accepted']} of {stats['proposed']} draft tokens of {settings['contender']} were accepted: "
            f"acceptance rate {percent(stats['acceptance_rate'])}."
        )
    return said


def proposers(data: dict[str, Any]) -> list[str]:
    """The names of all that proposed a token: the target first, then in order of appearance."""
    named = [t["by"] for t in data["tokens"]] + [g["by"] for t in data["tokens"] for g in t["rejected"]]
    return ["target", *(name for name in dict.fromkeys(named) if name != "target")]


def text(result: Result) -> str:
    """HTML of the tokens and the legend. Where a pointer rests on a token, the browser shows its `label`."""
    data, prompt = result.data, result.data["prompt"]["text"]
    return filled(
        "trace.html",
        who=proposers(data),
        prompt=("… " if len(prompt) > BEFORE else "") + prompt[-BEFORE:],
        tokens=list(zip(data["tokens"], data["pieces"], strict=False)),
        words=data["vocabulary"],
        distribution=result.settings["distribution"],
        visible=visible,
        label=label,
    )


def visible(piece: str) -> str:
    """The text, or marks in which a token of only white space is visible."""
    if piece and not piece.strip():
        piece = piece.replace("\n", "⏎\n").replace("\t", "⇥")
    return piece or "·"


def label(token: dict[str, Any], words: dict[str, str]) -> str:
    """Where a token is from, its step, its probabilities, and the draft tokens that were rejected in its place.
    words: id of a rejected token -> its text."""
    kind = "accepted draft token of" if token["drafted"] else "chosen by"
    lost = [f"rejected: {words[str(g['token'])]!r} of {g['by']}, {chances(g)}" for g in token["rejected"]]
    return "; ".join([f"step {token['step'] + 1}: {kind} {token['by']}, {chances(token)}", *lost])


def chances(token: dict[str, Any]) -> str:
    return f"p {token['p']:.3f}" + ("" if token["q"] is None else f", q {token['q']:.3f}")


def over_time(points: list[dict[str, Any]], window: int) -> Plot:
    xs = [point["token"] for point in points]
    groups = [
        (f"last {window} steps", xs, [p["rate"] for p in points]),
        ("since the beginning", xs, [p["overall"] for p in points]),
    ]
    return Plot(
        "acceptance-over-time", "Acceptance over time",
        f"Accepted draft tokens over verified ones: in the last {window} steps that drafted, and since the beginning.",
        "; ".join(f"by token {p['token']}: {percent(p['rate'])}" for p in points),
        lambda axes: plots.lines(axes, groups, "output token", "acceptance rate"),
    )  # fmt: skip


def histogram(stats: dict[str, Any]) -> Plot:
    counts = stats["histogram"]

    def draw(axes: Any) -> None:
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


def by_proposer(data: dict[str, Any]) -> Table:
    """Output tokens and rejected draft tokens by proposer."""
    rows = []
    everything = len(data["tokens"])
    for name in proposers(data):
        tokens = [t for t in data["tokens"] if t["by"] == name]
        lost = [g for t in data["tokens"] for g in t["rejected"] if g["by"] == name]
        mean = sum(t["p"] for t in tokens) / len(tokens) if tokens else None
        rows.append([name, len(tokens), len(tokens) / everything, "" if name == "target" else len(lost), mean])
    columns = [words("proposed by"), Column("tokens"), Column("share", "%"), Column("rejected"),
               Column("mean p", digits=2)]  # fmt: skip
    note = "Only the first rejected token of a draft counts as rejected; the tokens after it were not verified."
    return Table("Who proposed what", columns, rows, note)
