"""Cells of a benchmark. A cell compares two engines that decode the same requests in turns, and has an interval.

A cell is measured in passes. In each pass both engines decode every batch of the cell, one directly after the other,
and their order changes from pass to pass. The file of results is written after each cell. A later run with the same
file continues with the cells that are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from statistics import mean
from time import monotonic, perf_counter
from typing import Any

from slipstream.core.params import SamplingParams
from slipstream.llm import LLM, Completion
from slipstream.measure.estimates import Estimate, estimate_ratio

Batch = list[tuple[list[int], SamplingParams]]
"""Prompts and sampling parameters of requests that run together."""


class Cells:
    """The cells of one run, by key. file: file of results. deadline: time on `monotonic` after which no cell begins.
    fixed: settings; if the file has cells with other settings, all cells are measured again."""

    def __init__(self, file: Path, deadline: float, fixed: dict[str, Any]):
        self.file, self.deadline, self.fixed = file, deadline, json.loads(json.dumps(fixed))
        known = json.loads(file.read_text()) if file.exists() else {}
        self.cells: dict[str, dict[str, Any]] = known.get("cells", {}) if known.get("fixed") == self.fixed else {}
        self.left_out: list[str] = []

    def add(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return a cell from the file, or measure it now; None if there is no time left."""
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


def decode(llm: LLM, batch: Batch) -> tuple[list[Completion], float, float]:
    """Decode requests, at most `llm.max_batch` at a time: when a request ends, the next one begins. Returns the
    completions, the seconds of all steps, and the mean seconds per token of a request in the steps that read no
    prompt."""
    seqs = [llm.sequence(prompt, params) for prompt, params in batch]
    lengths = {seq.id: len(seq.tokens) for seq in seqs}
    tokens = decoding = 0.0
    began = before = perf_counter()
    for ran in llm.decode(seqs):
        ended = perf_counter()
        if all(lengths[seq.id] > seq.prompt for seq in ran):
            decoding += ended - before
            tokens += mean(len(seq.tokens) - lengths[seq.id] for seq in ran)
        before = ended
        lengths.update((seq.id, len(seq.tokens)) for seq in ran)
    return [llm.completion(seq) for seq in seqs], before - began, decoding / max(1.0, tokens)


def compare(
    base: LLM, other: LLM, batches: Seq[Batch], passes: int, warmed: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Measure a cell. It has the seconds of both engines [batches, passes], with prompts, and the seconds per token of
    decoding alone; the speed of `other` over `base` with its interval; the number of batches whose outputs differ; and
    the last completions of `other`. The first pass warms up and does not count. warmed: called after this pass."""
    names = ("base", "other", "base_decoding", "other_decoding")
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in names}
    done: list[Completion] = []
    differing = 0
    for number in range(-1, passes):
        if number == 0:
            warmed()
        for b, batch in enumerate(batches):
            order = [("base", base), ("other", other)]
            texts = {}
            for name, llm in order if number % 2 else reversed(order):
                completions, whole, decoding = decode(llm, batch)
                texts[name] = [each.token_ids for each in completions]
                if number >= 0:
                    seconds[name][b].append(whole)
                    seconds[f"{name}_decoding"][b].append(decoding)
                if name == "other" and number == passes - 1:
                    done += completions
            differing += texts["base"] != texts["other"]
    gain = estimate_ratio(seconds["base"], seconds["other"])
    if gain.low is None:  # few batches, or one batch that dominates
        gain = of_passes(seconds["base"], seconds["other"])
    return {"gain": vars(gain), **seconds, "differing": differing, "done": done}


def of_passes(top: Seq[Seq[float]], bottom: Seq[Seq[float]]) -> Estimate:
    """Estimate the ratio of the seconds [batches, passes] over all batches, with an interval for further passes over
    the same texts."""
    each = ([sum(one) for one in zip(*rows, strict=True)] for rows in (top, bottom))
    return estimate_ratio(next(each), next(each))
