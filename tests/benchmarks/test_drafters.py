"""The figures of the drafters' benchmark, from made-up measurements."""

from types import SimpleNamespace
from typing import Any

from benchmarks.drafters import figures


def arm(label: str, temperature: float, code: float, edit: float) -> dict[str, Any]:
    parts = {kind: {"speedup": {"value": value}} for kind, value in (("code", code), ("edit", edit))}
    overall = {"speedup": {"value": (code + edit) / 2}}
    return {
        "label": label, "temperature": temperature, "plain": label == "plain", "categories": parts, "overall": overall,
    }  # fmt: skip


MIX = SimpleNamespace(data={"arms": [
    arm("plain", 0.0, 1, 1), arm("suffix", 0.0, 2, 3), arm("model", 0.0, 2.4, 2), arm("suffix+model", 0.0, 3, 2.7),
]})  # fmt: skip
RANDOM = SimpleNamespace(data={"arms": [
    arm("plain", 1.0, 1, 1), arm("suffix", 1.0, 0.9, 0.9), arm("model", 1.0, 1, 1),
]})  # fmt: skip


def test_a_hybrid_is_compared_with_the_best_single_drafter_of_each_kind() -> None:
    rows = {row["figure"]: row for row in figures({"mix": MIX})}  # type: ignore[dict-item]
    best = rows["best drafter against plain decoding, greedy, code"]
    assert (best["measured"], best["by"], best["verdict"]) == (3, "suffix+model", "reached")
    edits = rows["hybrid (suffix+model) against the best single drafter (suffix), edit, greedy"]
    assert (round(edits["measured"], 6), edits["verdict"]) == (0.9, "missed")
    code = rows["hybrid (suffix+model) against the best single drafter (model), code, greedy"]
    assert (round(code["measured"], 6), code["verdict"]) == (1.25, "reached")


def test_a_run_that_was_not_requested_has_no_figure() -> None:
    text = "any drafter with chosen draft lengths against plain decoding, random tokens"
    assert text not in {row["figure"] for row in figures({"mix": MIX})}  # type: ignore[dict-item]
    row = next(row for row in figures({"mix": MIX, "random": RANDOM}) if row["figure"] == text)  # type: ignore[dict-item]
    assert (row["measured"], row["by"], row["verdict"]) == (0.9, "suffix", "missed")
