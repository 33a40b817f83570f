"""Makes the generated blocks of docs/tutorial.md, in order. A block runs the command that it shows, and reports the
result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.markdown import QUIET
from benchmarks.markdown_tables import render_markdown as table, render_markdown_rows as rows
from benchmarks.tutorial_kit import Kit, block, fence, named, warnings
from slipstream.drafters.registry import DRAFTERS
from slipstream.measure import plots
from slipstream.measure.estimates import explain_doubt
from slipstream.measure.tables import Estimate, Plot, percent, times

CLOSED_C, CLOSED_LONGEST = 0.05, 12
CLOSED_ALPHAS = (0.9, 0.8, 0.7, 0.6, 0.4)
SERVED = "slipstream simulate --hardware h100 -m 7B -md 0.5B --alpha 0.7 --batch 1,2,4,8,16,32,64,128,256"
CAPTIONS = {
    "speedup": "Points: over plain decoding in the same run. Bars: 95 % intervals. Dashed: plain decoding.",
    "speedup-by-category": "Points: speed-up over plain decoding in the same run, for each kind of prompt. Bars: 95 % "
    "intervals. Dashed: plain decoding.",
}
TRACED = "Write a Python function that reverses a string."
VERDICT = "No bug found in "
"""The first words of the last part of `verify`'s output."""


def prices(kit: Kit) -> str:
    command = "slipstream simulate --measure -m smollm2 --alpha 0.8"
    output = kit.json(command)
    curve, c = output["costs"]["curve"], output["costs"]["c"]
    counts, relative = curve["rows"], [s / curve["seconds"][0] for s in curve["seconds"]]

    def draw(axes: Any) -> None:
        plots.draw_lines(
            axes, [("measured", counts, relative), ("one pass per row", counts, counts)],
            "tokens that one target pass verifies", "time, in one-token passes", percent=False,
        )  # fmt: skip
        doubling(axes, counts, counts)

    plot = Plot(
        "prices", "Cost of a target pass by the number of tokens it verifies",
        "SmolLM2 in 4 bits, this machine; both axes logarithmic. Speculation gains from the gap between the two lines.",
        f"For {', '.join(map(str, counts))} tokens: {', '.join(f'{t:.2f}' for t in relative)} times a one-token pass",
        draw,
    )  # fmt: skip
    at = counts.index(8)
    said = (
        f"Here, a one-token pass of SmolLM2 takes {1e3 * curve['seconds'][0]:.2f} ms. A pass over "
        f"{counts[at]} tokens takes {relative[at]:.2f} times as long; without drafts, {counts[at]} tokens take "
        f"{counts[at]} passes. A suffix tree, which copies from earlier text, drafts a token in {c:.3f} one-token "
        "passes."
    )
    return block(fence(command), said, kit.draw("prices", plot))


def doubling(axes: Any, xs: list[int], ys: list[int]) -> None:
    """Make both axes logarithmic, with these ticks only."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set_yticks(ys, [f"{y:,}" for y in ys])


def closed_form(kit: Kit) -> str:
    from slipstream.theory.closed_forms import best_gamma, speedup

    gammas = list(range(1, CLOSED_LONGEST + 1))
    lines = [(f"alpha {a:g}", gammas, [speedup(a, g, CLOSED_C) for g in gammas]) for a in CLOSED_ALPHAS]

    def draw(axes: Any) -> None:
        plots.draw_lines(axes, lines, "draft length gamma", "speed-up", percent=False, few=True)
        axes.axhline(1, color=plots.SOFT, linewidth=1, linestyle=(0, (3, 2)))

    best = [(a, best_gamma(a, CLOSED_C, CLOSED_LONGEST)) for a in CLOSED_ALPHAS]
    said = "; ".join(f"{a:g}: {g} draft tokens, {times(speedup(a, g, CLOSED_C))}" for a, g in best)
    plot = Plot(
        "closed-form", "Speed-up by draft length", f"Closed form at c = {CLOSED_C:g}, with free verification. Dashed: "
        "plain decoding.", f"Best draft length up to {CLOSED_LONGEST}, by alpha: {said}", draw, height=3.0,
    )  # fmt: skip
    return kit.draw("closed-form", plot)


def pairs(kit: Kit) -> str:
    from slipstream.measure.known_pairs import PAIRS, predict_pair
    from slipstream.measure.report_simulate import describe_assumptions, describe_rate, show_published
    from slipstream.measure.roofline import find_hardware

    place, body = find_hardware("h100"), []
    for pair in PAIRS:
        _, seen = predict_pair(pair, place)
        gain = f"{times(seen.speedup)}, K={seen.draft_tokens}" if seen.draft_tokens else "no gain"
        body.append([
            f"{pair.target} + {pair.draft}", show_published(pair.acceptance, "%"), show_published(pair.speedup, "x"),
            f"{seen.costs.c:.2f}", f"{gain} ({describe_rate(seen)})",
        ])  # fmt: skip
    heads = ["target + draft", "acceptance, published", "speed-up, published", "c on H100", "predicted"]
    return block(fence("slipstream simulate --pairs"), rows(heads, body), describe_assumptions(place))


def drafters(kit: Kit) -> str:
    from slipstream.cli.drafters import summary

    body = [
        [f"`{name}`", spec.needs.value, summary(name).replace("*", "")]
        for name, spec in DRAFTERS.items()
        if name != "none"
    ]
    return block(fence("slipstream drafters"), rows(["drafter", "needs", "how it drafts"], body, (0, 1, 2)))


def check_pair(kit: Kit) -> str:
    command = "slipstream info embedded embedded"
    return block(fence(command), fence(kit.run(command), "text"))


def lookups(kit: Kit) -> str:
    size = "--prompts 2 -n 8 --rounds 1" if kit.quick else "--prompts 6 -n 96 --rounds 3 --seconds 20"
    return bench_block(
        kit, f"slipstream bench -m smollm2 proofread,summary {fixed('ngram', 'suffix', 'lookahead', 'eagle3')} {size} "
        "--out lookups.json", ["speedup-by-category"],
    )  # fmt: skip


def fixed(*names: str) -> str:
    """Return options for these drafters with their fixed draft lengths, so that acceptance is the same in every run."""
    return " ".join(f"--drafter {name}:draft_tokens={DRAFTERS[name].length}" for name in names)


def bench(kit: Kit) -> str:
    size = "--prompts 2 -n 8 --rounds 1" if kit.quick else "--prompts 6 -n 96 --rounds 3 --seconds 20"
    return bench_block(
        kit, "slipstream bench -m smollm2 proofread,chat --drafter suffix --drafter eagle3 --drafter suffix,eagle3 "
        f"{size} --out bench.json", ["speedup-by-category"],
    )  # fmt: skip


def bench_block(kit: Kit, command: str, wanted: list[str]) -> str:
    result, shown = kit.measure(command)
    name = command.split()[-1].removesuffix(".json")
    drawn = [kit.draw(f"{name}-{plot}", replace(named(shown, plot), caption=CAPTIONS[plot])) for plot in wanted]
    return block(fence(command), shown.lead, table(shown.tables[0]), *drawn, warnings(result))


def verify(kit: Kit) -> str:
    """Make the block of `verify`. It shows only the verdict, because the tables before it fill two screens."""
    size = "--prompts 1 -n 8 --texts 2" if kit.quick else "--prompts 4 -n 32"
    command = f"slipstream verify -m embedded --drafter model -k 4 {size}"
    output = kit.run(command, fails=True)
    return block(fence(command), fence(output[max(output.find(VERDICT), 0) :], "text"))


def tune(kit: Kit) -> str:
    size = "--prompts 1 -n 8 --rounds 1" if kit.quick else "--prompts 4 --confirm 2 --rounds 3 --seconds 8"
    return printed(kit, f"slipstream tune -m smollm2 {size} --write tuned.json")


def printed(kit: Kit, command: str) -> str:
    """Make a block of a command and its output."""
    return block(fence(command), fence(kit.run(command, fails=True), "text"))


def gpt2(kit: Kit) -> str:
    size = "--prompts 1 -n 8 --rounds 1" if kit.quick else "--prompts 2 -n 24 --rounds 3 --seconds 8"
    make = "python -m benchmarks.gpt2_pair gpt2-pair"
    pair = "-m gpt2-pair/target -md gpt2-pair/draft"
    command = f"slipstream bench code {pair} --drafter model -k 2 --ignore-eos {size} --out gpt2.json"
    kit.run(make)
    result, shown = kit.measure(command)
    fast = next(arm for arm in result.data["arms"] if not arm["plain"])
    f, gain, k = fast["overall"], fast["overall"]["speedup"], fast["draft_tokens"]
    # Duration of a step in plain decode steps. The time of the prefill is divided among all steps.
    steps = f["mean_acceptance_length"] / gain["value"]
    c = f["shares"]["draft"] * steps / k
    verdict = "not statistically significant"
    if not explain_doubt(Estimate(**gain)):
        verdict = "slower than plain decoding" if gain["value"] < 1 else "faster"
    said = (
        f"A step with {k} draft tokens takes as long as {steps:.2f} plain decode steps, {c:.2f} of them for each draft "
        f"token. It yields at most {k + 1} tokens, and {f['mean_acceptance_length']:.2f} at an acceptance rate of "
        f"{percent(f['acceptance_rate'])}. The speed-up is {times(gain['value'])}: {verdict}. With one draft token "
        f"per step, the acceptance rate would have to exceed {percent(c)}."
    )
    return block(fence(f"{make}\n{command}"), said, table(shown.tables[0]), warnings(result))


def lengths(kit: Kit) -> str:
    size = "--prompts 1 -n 8 --rounds 1" if kit.quick else "--prompts 6 -n 96 --rounds 3 --seconds 30"
    command = f"slipstream bench -m smollm2 proofread,summary --drafter suffix -k 2:8,10 {size} --out lengths.json"
    result, shown = kit.measure(command)
    drawn = [
        kit.draw("lengths-acceptance", named(shown, "acceptance-by-axis")),
        kit.draw("lengths-speed", speeds(result.data["arms"], "draft_tokens", "draft length K")),
    ]
    return block(fence(command), shown.lead, table(shown.tables[0]), *drawn, warnings(result))


def speeds(arms: list[dict[str, Any]], axis: str, title: str) -> Plot:
    """Plot measured and predicted tokens per second over an axis, with plain decoding."""
    fast, plain = [arm for arm in arms if not arm["plain"]], [arm for arm in arms if arm["plain"]]
    lines = [("measured", [a[axis] for a in fast], [_rate(a) for a in fast])]
    known = [a for a in fast if a.get("predicted")]
    if known:
        expected = [a["predicted"]["tokens_per_second"] for a in known]
        lines.append(("predicted", [a[axis] for a in known], expected))
    level = [_rate(a) for a in plain] if len(plain) == len(fast) else [_rate(plain[0])] * len(fast)
    lines.append(("plain decoding", lines[0][1], level))

    def draw(axes: Any) -> None:
        plots.draw_lines(axes, lines, title, "tokens/s", percent=False, few=True)
        axes.set_ylim(bottom=0)

    return Plot(
        "speed", f"Tokens per second by {title}",
        "Prefill included; all settings take turns in one run. The closed forms predict from the acceptance rates at "
        "the longest draft and from the target's cost by number of tokens." if known else
        "All sequences together; all settings take turns in one run.",
        f"At {', '.join(map(str, lines[0][1]))}: "
        + "; ".join(f"{name} {_spell(xs, ys, lines[0][1])}" for name, xs, ys in lines), draw,
    )  # fmt: skip


def _spell(xs: list[Any], ys: list[float], places: list[Any]) -> str:
    """List the values of a line at `places`; "none" if the line has no value there."""
    known = dict(zip(xs, ys, strict=True))
    return ", ".join(f"{known[place]:.0f}" if place in known else "none" for place in places)


def _rate(arm: dict[str, Any]) -> float:
    value: float = arm["overall"]["tokens_per_second"]["value"]
    return value


def tracker(kit: Kit) -> str:
    command = f"slipstream trace -m smollm2 --chat '{TRACED}' -n {20 if kit.quick else 120} --drafter suffix,eagle3"
    result, shown = kit.measure(f"{command} -k 4 --out tracker.json")
    drawn = kit.draw("tracker-acceptance-over-time", named(shown, "acceptance-over-time"))
    return block(fence(f"{command} -k 4 --out tracker.json"), shown.lead, drawn, warnings(result))


def load(kit: Kit) -> str:
    output = kit.json(SERVED)
    loads = output["loads"]
    xs = [each["batch"] for each in loads]
    lines = [
        ("plain", xs, [each["plain_tokens_per_second"] for each in loads]),
        ("with speculation", xs, [each["tokens_per_second"] for each in loads]),
    ]

    def draw(axes: Any) -> None:
        plots.draw_lines(axes, lines, "sequences at once", "tokens/s, all sequences", percent=False)
        doubling(axes, xs, [200, 500, 1000, 2000, 5000, 10000, 20000])

    gains = [f"{each['speedup']:.2f}x at batch {each['batch']}" for each in loads]
    body = [
        [e["batch"], e["draft_tokens"], f"{e['plain_tokens_per_second']:.0f}", f"{e['tokens_per_second']:.0f}",
         times(e["speedup"]), f"{e['plain_tokens_per_second_per_user']:.0f}", f"{e['tokens_per_second_per_user']:.0f}"]
        for e in loads
    ]  # fmt: skip
    heads = [
        "sequences at once",
        "best K",
        "tokens/s, plain",
        "with speculation",
        "gain",
        "per sequence, plain",
        "per sequence, with",
    ]
    plot = Plot(
        "load", "Throughput by the number of sequences at once",
        f"Roofline of one {output['hardware']['name']}, 7B + 0.5B in 16 bits, alpha 0.7; prefill and queueing not "
        "counted. Both axes logarithmic.", "; ".join(gains), draw,
    )  # fmt: skip
    return block(fence(SERVED), rows(heads, body, ()), kit.draw("load", plot))


def batches(kit: Kit) -> str:
    size = "--batch 1,2,4,8 --prompts 1 -n 8 --rounds 1"
    if not kit.quick:
        size = "--batch 1,2,4,8 --prompts 8 -n 64 --rounds 3 --seconds 30"
    command = f"slipstream bench -m smollm2 edit --drafter suffix -k 8 {size} --out batches.json"
    result, shown = kit.measure(command)
    plot = speeds(result.data["arms"], "batch", "batch size")
    return block(fence(command), shown.lead, table(shown.tables[0]), kit.draw("batches", plot), warnings(result))


def origin(kit: Kit) -> str:
    from slipstream.measure.provenance import commit, machine, now, versions

    here = machine()
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    shares = [source.get("neighbours") or 0.0 for source in kit.sources]
    noisy = max(shares, default=0.0) >= QUIET
    busy = f" The machine was not idle: up to {percent(max(shares))} of its time went to other work." if noisy else ""
    settings = " Quick settings: these figures only show that everything runs." if kit.quick else ""
    return (
        f"Measured on {now()[:10]} by `make figures` on {here['cores']} cores of {here['cpu']} "
        f"({', '.join(here['vector'])}); commit {commit() or 'unknown'}; {named}.{busy}{settings}"
    )
