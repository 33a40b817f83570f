"""The figures of `benchmarks.gguf.shapes` and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gguf.lineup import LLAMACPP, SLIPSTREAM
from benchmarks.gguf.ngram_server import PLAIN
from benchmarks.markdown import beside, bound, run_of
from benchmarks.markdown_tables import render_markdown_rows as rows

LONG = 512
DECODING, READING = "decoding", f"prompt of {LONG}"
READING_BAR = dict.fromkeys(("Gemma-3-1B", "SmolLM3-3B", "Phi-4-mini"), 1.2)
SHARE_BAR = dict.fromkeys(("Gemma-3-1B", "Qwen3-30B-A3B"), 0.75)
DECODING_BAR, COPY_BAR, UNION_BAR = 1.15, 2.0, 1.1

BUILDS = (
    "ik_llama.cpp and llama.cpp are compiled for this processor (GGML_NATIVE); both run with flash attention and a "
    "cache of keys and values in float16."
)


def figures_of(models: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare what was measured with the bars. A model without a rival that runs has no figure against rivals."""
    return [row for name, model in models.items() for row in _figures(name, model)]


def _figures(name: str, model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for what, bar in ((DECODING, DECODING_BAR), (READING, READING_BAR.get(name))):
        times = model["seconds"][what]
        rivals = [who for who in times if who != SLIPSTREAM]
        if bar is not None and rivals and SLIPSTREAM in times:
            best = min(rivals, key=lambda who: statistics.median(times[who]))
            ratios = [one / own for one, own in zip(times[best], times[SLIPSTREAM], strict=True)]
            spread = {"value": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
            yield _row(f"{name}, {what}: speed over {best}", bar, spread)
    if name in SHARE_BAR:
        share = _share(model, SLIPSTREAM)
        yield _row(f"{name}: share of the read bandwidth, decoding", SHARE_BAR[name], {"value": share})
    if "passes" in model:
        one, many = model["passes"].values()
        count, union = list(model["passes"])[1], many["bytes"] / one["bytes"]
        value = many["milliseconds"] / one["milliseconds"] / union
        text = f"{name}: a pass of {count} rows over 1 row, over its bytes ({union:.2f}x)"
        yield _row(text, UNION_BAR, {"value": value}, at_most=True)
    drafted = [who for who in model["copies"] if who.startswith(LLAMACPP) and not who.endswith(PLAIN)]
    if drafted:
        copies = model["copies"]
        best = min(drafted, key=lambda who: statistics.median(copies[who]["seconds"]))
        own = [each for who, each in copies.items() if who.startswith(SLIPSTREAM)]
        fast = min(statistics.median(each["seconds"]) for each in own)
        value = statistics.median(copies[best]["seconds"]) / fast
        yield _row(f"{name}, copies: speed over {best}", COPY_BAR, {"value": value})


def _row(text: str, bar: float, estimate: Mapping[str, Any], at_most: bool = False) -> dict[str, Any]:
    value = estimate["value"]
    reached = value <= bar if at_most else value >= bar
    return {"text": text, "reach": bar, "at_most": at_most, "low": None, "high": None, **estimate, "reached": reached}


def _share(model: Mapping[str, Any], who: str) -> float:
    """Return the share of the bandwidth that a loop of additions reaches."""
    took = statistics.median(model["seconds"][DECODING][who])
    return float(_token_bytes(model, who) / took / model["bandwidth"])


def _token_bytes(model: Mapping[str, Any], who: str) -> float:
    return float(model["sizes"]["packed" if who == SLIPSTREAM else "file"]["token"])


def heading(results: dict[str, Any]) -> list[str]:
    return [
        "# Shapes of published models, random weights, the same GGUF file",
        "",
        f"{run_of(results['provenance'])}. Greedy; the better rival counts. A ratio is the median of the ratios of all "
        f"rounds, because other guests of the host slow some rounds down. {BUILDS} Where a model has fewer layers than "
        "published, the table says so; its vocabulary is whole.",
    ]


def figures(results: dict[str, Any]) -> list[str]:
    body = [
        (
            row["text"], f"at {'most' if row['at_most'] else 'least'} {bound(row['reach'])}",
            beside(row["value"], row["reach"]),
            _spread(row),
            "yes" if row["reached"] else "**no**",
        )
        for row in sorted(results["figures"], key=lambda row: row["reached"])
    ]  # fmt: skip
    return [rows(["figure", "must reach", "measured", "lowest to highest round", "reached"], body, (0, 1))]


def _spread(row: Mapping[str, Any]) -> str:
    return "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}"


def speeds(results: dict[str, Any]) -> list[str]:
    body = []
    for name, model in results["models"].items():
        here, published = model["layers"]
        layers = str(here) if here == published else f"{here} of {published}"
        for who, seconds in model["seconds"][DECODING].items():
            reading = model["seconds"][READING][who]
            body.append(
                (
                    name, layers, who, f"{_token_bytes(model, who) / 1e9:.2f}", _rates(seconds), _rates(reading),
                    f"{_share(model, who):.2f}", f"{model['alike'].get(who, 1):.4f}",
                )
            )  # fmt: skip
    heads = ["model", "layers", "contender", "GB a token reads", "decoding, tokens/s", f"{READING}, tokens/s",
             "share of the read bandwidth", "correlation of logits with ours"]  # fmt: skip
    return [rows(heads, body)]


def _rates(seconds: list[float]) -> str:
    rates = sorted(1 / each for each in seconds)
    return f"{statistics.median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})"


def passes(results: dict[str, Any]) -> list[str]:
    """Milliseconds of a pass by its rows."""
    body = [
        (name, count, f"{each['milliseconds']:.1f}", f"{each['bytes'] / 1e9:.2f}")
        for name, model in results["models"].items()
        for count, each in model.get("passes", {}).items()
    ]
    return [rows(["model", "rows", "ms", "GB"], body)] if body else []


def copies(results: dict[str, Any]) -> list[str]:
    """Speed of copies of a text that stands in the prompt."""
    body = []
    for name, model in results["models"].items():
        for who, each in model["copies"].items():
            drafted = "/".join(map(str, reversed(each["drafted"]))) if "drafted" in each else ""
            body.append((name, who, _rates(each["seconds"]), drafted, "yes" if each["right"] else "**no**"))
    heads = ["copies", "contender", "tokens/s", "draft tokens accepted/proposed", "text as expected"]
    return [rows(heads, body)] if body else []


def left_out(results: dict[str, Any]) -> list[str]:
    lines = [
        f"- {name}: {who} left out: {why}"
        for name, model in results["models"].items()
        for who, why in model["skipped"].items()
    ]
    by_commit: dict[str, list[str]] = {}
    for name, model in results["models"].items():
        by_commit.setdefault(f"{model['commit']}, {model['date'][:10]}", []).append(name)
    lines += [f"- measured at commit {commit}: {', '.join(names)}" for commit, names in by_commit.items()]
    return ["\n".join(lines)] if lines else []
