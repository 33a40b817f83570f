"""Who is compared on GGUF files, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = ("F32", "Q8_0", "Q4_K_M")
LENGTHS = (2, 4, 8, 16)
"""Draft lengths of the lookups: of each the fastest on prompts that are not measured is taken."""
SUFFIX = {"drafter": "suffix"}
RANDOM = {"temperature": 1.0}
"""Random text: sampled at temperature 1 after random ids, so that no draft is right for long."""


@dataclass(frozen=True)
class Side:
    """One contender: its worker, the name of its model there, and further arguments of `generate`.

    text  "greedy" or "random". lengths: to choose from.
    """

    label: str
    worker: str
    model: str
    text: str = "greedy"
    lengths: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """The typical time of `bottom` over that of `top` must be at least `reach`."""

    text: str
    top: str
    bottom: str
    reach: float


def sides(kinds: tuple[str, ...], lengths: tuple[int, ...]) -> dict[str, Side]:
    """All contenders, by key. lengths: draft lengths to choose from."""
    found = {}
    for kind in kinds:
        found |= {
            f"{kind} plain": Side(f"{kind}, Slipstream plain", "slipstream", kind),
            f"{kind} bindings": Side(f"{kind}, llama-cpp-python plain", "bindings", kind),
            f"{kind} lookup": Side(
                f"{kind}, Slipstream with the suffix tree", "slipstream", kind, lengths=lengths, arguments=SUFFIX
            ),
            f"{kind} auto": Side(
                f"{kind}, Slipstream with the suffix tree, chosen lengths", "slipstream", kind, arguments=SUFFIX
            ),
            f"{kind} bindings lookup": Side(
                f"{kind}, llama-cpp-python with prompt lookup", "bindings", f"{kind} lookup", lengths=lengths
            ),
            f"{kind} random": Side(
                f"{kind}, random text, Slipstream plain", "slipstream", kind, "random", arguments=RANDOM
            ),
            f"{kind} control": Side(
                f"{kind}, random text, Slipstream with the suffix tree", "slipstream", kind, "random",
                arguments=RANDOM | SUFFIX,
            ),
        }  # fmt: skip
    return found


def bars(kinds: tuple[str, ...]) -> list[Bar]:
    """What must be reached."""
    found = [
        Bar(f"{kind}: plain against llama-cpp-python plain", f"{kind} plain", f"{kind} bindings", 0.95)
        for kind in kinds
    ]
    found += [
        Bar(f"{kind}: lookup against llama-cpp-python's lookup", f"{kind} lookup", f"{kind} bindings lookup", 1.15)
        for kind in kinds
    ]
    return found + [
        Bar(f"{kind}: random text, chosen lengths against plain", f"{kind} control", f"{kind} random", 0.97)
        for kind in kinds
    ]
