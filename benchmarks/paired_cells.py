"""Cells of a benchmark: two ways of decoding the same requests, in turns, with an interval; kept in a file.

A cell is measured in passes. In each pass both ways decode every batch of the cell, one right after the other, and the
order changes from pass to pass. A file of results is written after each cell, and a run with the same file goes on
with the cells that it lacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from slipstream.core.params import SamplingParams
from slipstream.llm import LLM, Completion
from slipstream.measure.estimates import estimate_ratio

Batch = tuple[list[list[int]], SamplingParams]
"""Prompts of requests that run together, and the parameters of all."""


class Cells:
    """The cells of one run, by their keys. file: where they are kept. deadline: on `monotonic`; no cell begins after
    it. fixed: what a cell of the file must have been measured with; others are measured again."""

    def __init__(self, file: Path, deadline: float, fixed: dict[str, Any]):
        self.file, self.deadline, self.fixed = file, deadline, json.loads(json.dumps(fixed))
        known = json.loads(file.read_text()) if file.exists() else {}
        self.cells: dict[str, dict[str, Any]] = known.get("cells", {}) if known.get("fixed") == self.fixed else {}
        self.left_out: list[str] = []

    def add(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return a cell: as it is known, or measured now; None if there is no time left."""
        if key not in self.cells:
            if monotonic() > self.deadline:
                self.left_out.append(key)
                return None
            self.cells[key] = measure()
            self.write()
        return self.cells[key]

    def write(self, **more: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({**more, "fixed": self.fixed, "cells": self.cells}, indent=1) + "\n")


def compare(base: LLM, other: LLM, batches: Seq[Batch], passes: int) -> dict[str, Any]:
    """Return a cell: the seconds of both ways [batches, passes], the speed of `other` over `base` with its interval,
    in how many batches the texts differ, and the last completions of `other`. The first pass warms up and does not
    count."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in ("base", "other")}
    done: list[Completion] = []
    differing = 0
    for number in range(-1, passes):
        for b, (prompts, params) in enumerate(batches):
            order = [("base", base), ("other", other)]
            texts = {}
            for name, llm in order if number % 2 else reversed(order):
                began = perf_counter()
                completions = llm.generate(prompts, params)
                took = perf_counter() - began
                texts[name] = [each.token_ids for each in completions]
                if number >= 0:
                    seconds[name][b].append(took)
                if name == "other" and number == passes - 1:
                    done += completions
            differing += texts["base"] != texts["other"]
    gain = estimate_ratio(seconds["base"], seconds["other"])
    if gain.low is None:  # few batches, or one that outweighs the others: an interval for further passes only
        passes_of = {name: [sum(each) for each in zip(*rows, strict=True)] for name, rows in seconds.items()}
        gain = estimate_ratio(passes_of["base"], passes_of["other"])
    return {"gain": vars(gain), **seconds, "differing": differing, "done": done}
