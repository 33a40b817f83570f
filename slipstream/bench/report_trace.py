"""Report of a trace. On a page: the text with details on every token, and the acceptance rate over time."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from slipstream.bench import plots
from slipstream.bench.plots import Plot
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Section, Table, percent, words

SCRIPT = Path(__file__).parent / "templates" / "trace.js"
BEFORE = 400
"""Characters of the prompt's end that are shown."""


def section(result: Result) -> Section:
    data, settings = result.data, result.settings
    stats = data["stats"]
    made = Section("Trace of one generation", lead(settings, stats))
    if not data["tokens"]:
        return made
    made.html = text(result)
    made.script = SCRIPT.read_text(encoding="utf-8")
    if data["rolling"]:
        made.plots.append(over_time(data["rolling"], settings["window"]))
    made.plots.append(histogram(stats))
    if stats["position_rates"]:
        made.plots.append(plots.by_position([("accepted", stats["position_rates"])]))
        made.notes.append("Accepted by position: " + " ".join(map(percent, stats["position_rates"])) + ".")
    made.tables += [by_proposer(data), steps(data)]
    return made


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
    """HTML of the tokens, the legend, and the panel with details on one token."""
    data, who = result.data, proposers(result.data)
    legend = "".join(
        f'<li><span class="t by{i}">{escape(name)}</span> '
        f"{'chosen by the target itself' if name == 'target' else 'proposed, and accepted'}</li>"
        for i, name in enumerate(who)
    )
    spans = []
    for i, (token, piece) in enumerate(zip(data["tokens"], data["pieces"], strict=False)):
        lost = "".join(
            f'<del class="by{who.index(g["by"])}">{visible(str(data["vocabulary"][str(g["token"])]))}</del>'
            for g in token["rejected"]
        )
        spans.append(
            f'{lost}<span class="t by{who.index(token["by"])}" data-i="{i}" tabindex="{0 if i == 0 else -1}" '
            f'role="button" aria-label="{escape(label(data, i))}">{visible(piece)}</span>'
        )
    prompt = data["prompt"]["text"]
    before = ("… " if len(prompt) > BEFORE else "") + prompt[-BEFORE:]
    facts = [fact(data, i) for i in range(len(data["tokens"]))]
    note = (
        "p and entropy are of the softmax of the target's logits, because temperature 0 makes the distribution one-hot."
        if result.settings["distribution"] == "softmax"
        else "p and entropy are of the distribution that verification used, after temperature and filters."
    )
    payload = json.dumps(facts, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
    return f"""<h2>The text</h2>
<ul class="legend">{legend}<li><label><input type="checkbox" class="show-lost"> show rejected tokens</label></li></ul>
<div class="trace">
<pre class="tokens"><span class="prompt">{escape(before)}</span>{"".join(spans)}</pre>
<div class="panel" aria-live="polite"><p class="hint">Point at a token, or use the arrow keys on one.</p></div>
</div>
<p class="note">{note} A draft token without q was chosen deterministically.</p>
<script type="application/json" class="facts">{payload}</script>"""


def visible(piece: str) -> str:
    """Escaped text in which a token of only white space is visible."""
    if piece and not piece.strip():
        piece = piece.replace("\n", "⏎\n").replace("\t", "⇥")
    return escape(piece) or "·"


def label(data: dict[str, Any], i: int) -> str:
    token = data["tokens"][i]
    kind = "accepted draft token of" if token["drafted"] else "chosen by"
    return f"{data['pieces'][i].strip() or 'white space'}: {kind} {token['by']}, p {token['p']:.2f}"


def fact(data: dict[str, Any], i: int) -> dict[str, Any]:
    """The texts that the panel shows for one token."""
    token, words = data["tokens"][i], data["vocabulary"]
    return {
        "text": data["pieces"][i],
        "id": token["token"],
        "from": f"proposed by {token['by']}, accepted" if token["drafted"] else "chosen by the target itself",
        "step": f"step {token['step'] + 1}, token {token['place'] + 1} of "
        f"{data['steps'][token['step']]['tokens']}",
        "p": number(token["p"]),
        "q": "" if token["q"] is None else number(token["q"]),
        "entropy": f"{token['entropy']:.2f} bits",
        "rejected": [[words[str(g["token"])], g["by"], number(g["p"]), "" if g["q"] is None else number(g["q"])]
                     for g in token["rejected"]],
        "top": [[words[str(t)], number(p)] for t, p in token["top"]],
    }  # fmt: skip


def number(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0005 or p == 0 else "<0.001"


def over_time(points: list[dict[str, Any]], window: int) -> Plot:
    xs = [point["token"] for point in points]
    groups = [
        (f"last {window} steps", xs, [p["rate"] for p in points]),
        ("since the beginning", xs, [p["overall"] for p in points]),
    ]

    def draw(axes: Any, narrow: bool) -> None:
        plots.lines(axes, groups, "output token", "acceptance rate", narrow)

    return Plot(
        "acceptance-over-time", "Acceptance over time",
        f"Accepted draft tokens over verified ones: in the last {window} steps that drafted, and since the beginning.",
        "; ".join(f"by token {p['token']}: {percent(p['rate'])}" for p in points), draw,
    )  # fmt: skip


def histogram(stats: dict[str, Any]) -> Plot:
    counts = stats["histogram"]

    def draw(axes: Any, narrow: bool) -> None:
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
        "; ".join(f"{i} accepted: {n} steps" for i, n in enumerate(counts)), draw, height=2.8,
    )  # fmt: skip


def by_proposer(data: dict[str, Any]) -> Table:
    """Output tokens and rejected draft tokens by proposer."""
    rows = []
    everything = len(data["tokens"])
    for name in proposers(data):
        own = [t for t in data["tokens"] if t["by"] == name]
        lost = [g for t in data["tokens"] for g in t["rejected"] if g["by"] == name]
        mean = sum(t["p"] for t in own) / len(own) if own else None
        rows.append([name, len(own), len(own) / everything, "" if name == "target" else len(lost), mean])
    columns = [words("proposed by"), Column("tokens"), Column("share", "%"), Column("rejected"),
               Column("mean p", digits=2)]  # fmt: skip
    note = "Only the first rejected token of a draft counts as rejected; the tokens after it were not verified."
    return Table("Who proposed what", columns, rows, note)


def steps(data: dict[str, Any]) -> Table:
    """Every step as text, for readers who cannot distinguish the colours."""
    rows, at = [], 0
    for i, each in enumerate(data["steps"]):
        said = "".join(data["pieces"][at : at + each["tokens"]])
        at += each["tokens"]
        rows.append([i + 1, each["drafted"], each["accepted"], each["tokens"], repr(said)[1:-1]])
    columns = [Column("step"), Column("draft tokens"), Column("accepted"), Column("tokens"), words("text")]
    return Table("Step by step", columns, rows, long=True)
