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
from slipstream.measure.estimates import Estimate, estimate_ratio

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


def decode(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Completion], float, float]:
    """Return completions of requests that run together, and when the last prompt was read and the last text ended, on
    `perf_counter`."""
    seqs, read = [llm.sequence(prompt, params) for prompt in prompts], 0.0
    for _ in llm.decode(seqs):
        if not read and all(len(seq.tokens) > seq.prompt for seq in seqs):
            read = perf_counter()
    ended = perf_counter()
    return [llm.completion(seq) for seq in seqs], read, ended


def compare(
    base: LLM, other: LLM, batches: Seq[Batch], passes: int, decoded: Callable[[float], None] = lambda _: None
) -> dict[str, Any]:
    """Return a cell: the seconds of both ways [batches, passes], prompts included and of decoding alone, the speed of
    `other` over `base` with its interval, in how many batches the texts differ, and the last completions of `other`.
    The first pass warms up and does not count. decoded: called after each batch of `other` that counts, with the time
    on `perf_counter` at which its decoding began."""
    names = ("base", "other", "base_decoding", "other_decoding")
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in names}
    done: list[Completion] = []
    differing = 0
    for number in range(-1, passes):
        for b, (prompts, params) in enumerate(batches):
            order = [("base", base), ("other", other)]
            texts = {}
            for name, llm in order if number % 2 else reversed(order):
                began = perf_counter()
                completions, read, ended = decode(llm, prompts, params)
                texts[name] = [each.token_ids for each in completions]
                if number >= 0:
                    seconds[name][b].append(ended - began)
                    seconds[f"{name}_decoding"][b].append(ended - read)
                if name == "other" and number >= 0:
                    decoded(read)
                if name == "other" and number == passes - 1:
                    done += completions
            differing += texts["base"] != texts["other"]
    gain = estimate_ratio(seconds["base"], seconds["other"])
    if gain.low is None:  # few batches, or one that outweighs the others
        gain = of_passes(seconds["base"], seconds["other"])
    return {"gain": vars(gain), **seconds, "differing": differing, "done": done}


def of_passes(top: Seq[Seq[float]], bottom: Seq[Seq[float]], together: Callable[[Seq[float]], float] = sum) -> Estimate:
    """Estimate the ratio of the seconds [batches, passes] of all batches, with an interval for further passes over the
    same texts. together: of the batches of a pass; `geometric_mean` lets a stall in one of them count less."""
    each = ([together(one) for one in zip(*rows, strict=True)] for rows in (top, bottom))
    return estimate_ratio(next(each), next(each))
