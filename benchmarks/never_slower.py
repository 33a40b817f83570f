"""`python -m benchmarks.never_slower` finds the worst case of the default drafter against plain decoding.

A cell is a combination of model, kind of text, number of streams and bits of the weights, on an idle machine or with
another process on one core. In each cell, the default drafter and plain decoding decode the same requests in turns,
prompts included. A stream sends its next request when one has ended. The run fails if the upper bound of a 95 %
interval of the speed-up is below `BOUND`. The interval is for further passes over the same texts, because kinds of text
differ far more than passes do. Cells of kind "plain" compare plain decoding with itself, which shows the noise.
Speed-ups that the policy of draft lengths predicts are compared with the measured speed-up of the steps that read no
prompt. The benchmark also times rows by depth of context. A run that was interrupted continues when it is started
again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Any

from benchmarks.derived_decoders import derived_decoder
from benchmarks.forced_schemas import TOOLS
from benchmarks.gguf.files import file_of
from benchmarks.markdown import beside
from benchmarks.paired_cells import Batch, Cells, compare, of_passes
from benchmarks.protocol import ROOT, THREADS
from slipstream import LLM, SamplingParams, Structured, zoo
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.timed_step import Step
from slipstream.measure.prompts import choose_prompts
from slipstream.measure.provenance import commit, machine, now
from slipstream.targets.target_costs import measure_costs
from slipstream.tokens.text import load_tokenizer

BOUND = 0.99
MEANS = {16: 1.4, 8: 1.35, 4: 1.3}
BITS: dict[int, tuple[str, str | None]] = {16: ("F16", None), 8: ("F16", "w8a8"), 4: ("Q4_1", None)}
"""Format of the file, and the setting `quantize`, by the bits of the weights. Derived models are always made from F16
files."""
KINDS = ("plain", "code", "edit", "proofread", "summary", "chat", "tools", "long", "sampled")
DERIVED = ("mixture", "hybrid")
"""Targets that `derived_decoders` makes from the synthetic target "510M"."""
LONG = 6000
"""Tokens of the prompts of kind "long"."""
DEPTHS, ROWS = (100, 1000, LONG), (1, 2, 4, 8, 16)
IDLE, BUSY = "idle", "busy"
LENGTHS = (1.0, 0.5, 1.25, 0.75, 1.5)
"""Numbers of tokens of requests, as multiples of `--tokens`. If all were equal, requests without drafts would end
together, and their next prompts would be read together in fewer passes, which real requests never do."""


def models(target: str, bits: int, streams: int) -> tuple[LLM, LLM]:
    """Load one target in this format. Returns (plain decoding, the default drafter)."""
    kind, quantize = BITS[bits]
    files, embedded = ROOT / "build" / "gguf", load_tokenizer(zoo.target_dir())
    if target in DERIVED:
        drafts = LLM(derived_decoder(target, bits, THREADS, files), "suffix", tokenizer=embedded, max_batch=streams)
    elif target == "smollm2":
        stack = ["suffix", ("eagle3", {"head": zoo.head_dir("eagle3", zoo.smollm2_file())})]
        tokenizer = load_tokenizer(zoo.smollm2_file())  # the 16-bit file made from it has no tokenizer
        file = file_of(target, kind, files)
        drafts = LLM(file, stack, tokenizer=tokenizer, threads=THREADS, quantize=quantize, max_batch=streams)
    else:
        file, quantize = file_of(target, "F16", files), "int4" if bits == 4 else quantize
        drafts = LLM(file, "suffix", tokenizer=embedded, threads=THREADS, quantize=quantize, max_batch=streams)
    drafts.lengths = Predictions(drafts.most_draft_tokens)
    return LLM(drafts.target, draft_tokens=0, tokenizer=drafts.tokenizer, max_batch=streams), drafts


class Predictions(DraftLengths):
    """Draft lengths that record the predicted speed of each step that reads no prompt. plain, drafted: time of the
    tokens of these steps, in plain steps, without drafts and as predicted with drafts."""

    def __init__(self, most: int):
        super().__init__(most)
        self.plain = self.drafted = 0.0

    def learn(self, step: Step) -> None:
        speed = self.policy.speed if any(step.lengths) else 1.0
        tokens = step.repeats + sum(step.accepted) / len(step.ids)
        if not step.prompt_rows:
            self.plain, self.drafted = self.plain + tokens, self.drafted + tokens / speed
        super().learn(step)

    def predict(self) -> float | None:
        """Return the predicted speed-up of the recorded steps, and forget them; None if no steps were recorded."""
        predicted = self.plain / self.drafted if self.drafted else None
        self.plain = self.drafted = 0.0
        return predicted


def batches(llm: LLM, kind: str, streams: int, tokens: int) -> list[Batch]:
    """Make requests of one kind of text: three for each of `streams` clients, which begin one when another ends. Their
    numbers of tokens differ (see `LENGTHS`)."""
    how: dict[str, Any] = {"ignore_eos": True}
    if kind == "tools":
        how = {"structured": Structured(json_schema=TOOLS[3].schema)}
        prompts = [llm.chat_prompt(TOOLS[3].messages(request)) for request in TOOLS[3].requests]
    elif kind == "long":
        texts = [each.ids for each in choose_prompts(llm, "summary,proofread,code", 20).prompts]
        whole = [token for ids in texts for token in ids]
        room = llm.target.context - int(max(LENGTHS) * tokens) - 1
        prompts = [(whole * (1 + LONG // len(whole)))[at : at + min(LONG, room)] for at in (0, 100, 200)]
    else:
        family = {"sampled": "chat,varied", "plain": "chat"}.get(kind, kind)
        prompts = [each.ids for each in choose_prompts(llm, family, 12).prompts]
    if kind == "sampled":
        how |= {"temperature": 1.0, "seed": 1}
    count = 1 if kind == "long" and streams > 4 else 3  # prompts of 6k fill the memory
    lengths = [int(tokens * LENGTHS[i % len(LENGTHS)]) for i in range(count * streams)]
    each = zip(itertools.cycle(prompts), lengths, strict=False)
    return [[(prompt, SamplingParams(max_tokens=length, **how)) for prompt, length in each]]


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """Run another process that computes on one core, if `busy`."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def row_costs(llm: LLM) -> dict[str, dict[str, float]]:
    """Measure the seconds of passes over several numbers of rows, by depth of the context."""
    depths = [depth for depth in DEPTHS if depth + max(ROWS) < llm.target.context]
    curves = {depth: measure_costs(llm.target, ROWS, past=depth) for depth in depths}
    return {str(depth): {str(n): curve(n) for n in ROWS} for depth, curve in curves.items()}


def measure_cell(plain: LLM, drafts: LLM, kind: str, streams: int, tokens: int, passes: int) -> dict[str, Any]:
    """Measure a cell. Its predicted speed-up is None for the kinds "plain" and "tools"; the policy does not choose the
    lengths of forced text, which "tools" has."""
    asked, lengths = batches(plain, kind, streams, tokens), drafts.lengths
    plain.max_batch = drafts.max_batch = streams
    assert isinstance(lengths, Predictions)
    cell = compare(plain, plain if kind == "plain" else drafts, asked, passes, lengths.predict)
    del cell["done"]
    predicted = lengths.predict()
    decoding = of_passes(cell["base_decoding"], cell["other_decoding"])
    known = kind not in ("plain", "tools")
    return cell | {"decoding": decoding.value, "predicted": predicted if known else None}


def run(options: argparse.Namespace) -> dict[str, Any]:
    fixed = {"passes": options.passes, "tokens": options.tokens, "commit": commit()}
    cells = Cells(options.out / "never-slower.json", monotonic() + 60 * options.minutes, fixed)
    for target in options.targets:
        for bits in options.bits:
            plain, drafts = models(target, bits, max(options.streams))
            for moment in options.machine:
                with neighbour(moment == BUSY):
                    key = f"{target}, {bits} bits, {moment}"
                    cells.add(f"rows of {key}", lambda llm=plain: {"rows": row_costs(llm)})  # type: ignore[misc]
                    for streams in options.streams:
                        for kind in options.kinds:

                            def measure(kind: str = kind, streams: int = streams, pair: Any = (plain, drafts)) -> Any:
                                return measure_cell(*pair, kind, streams, options.tokens, options.passes)

                            cell = cells.add(f"{key}, {streams} streams, {kind}", measure)
                            if cell:
                                print(key, streams, kind, f"{cell['gain']['value']:.3f}", file=sys.stderr, flush=True)
    cells.write(date=now(), machine=machine(), left_out=cells.left_out)
    return {"cells": cells.cells, "left_out": cells.left_out}


def gains(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cells that compare the default drafter with plain decoding."""
    return {key: cell for key, cell in results["cells"].items() if "gain" in cell and not is_control(key)}


def is_control(key: str) -> bool:
    return key.endswith(", plain")


def upper(cell: dict[str, Any]) -> float:
    """Return the upper bound of a cell's interval, or its value if it has no interval."""
    gain = cell["gain"]
    return float(gain["value"] if gain["high"] is None else gain["high"])


def figures(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return the figures as (name, bound, measured value)."""
    cells = gains(results)
    if not cells:
        return []
    worst = min(cells, key=lambda key: upper(cells[key]))
    rows = [(f"worst upper bound ({worst})", BOUND, upper(cells[worst]))]
    rows.append(("worst cell as it stands", 0.98, min(cell["gain"]["value"] for cell in cells.values())))
    for bits, least in MEANS.items():
        some = [cell["gain"]["value"] for key, cell in cells.items() if f", {bits} bits, {IDLE}" in key]
        rows += [(f"mean, {bits} bits, idle", least, mean(some))] if some else []
    near = [abs(cell["predicted"] / cell["decoding"] - 1) < 0.1 for cell in cells.values() if cell["predicted"]]
    rows += [("share of cells whose decoding is predicted within 10 %", 0.9, mean(near))] if near else []
    return rows


def noise(results: dict[str, Any]) -> str:
    """Describe how much two measurements of plain decoding differ, and how wide intervals are."""
    controls = [cell["gain"]["value"] for key, cell in results["cells"].items() if "gain" in cell and is_control(key)]
    widths = [math.sqrt(upper(cell) / (cell["gain"]["low"] or upper(cell))) - 1 for cell in gains(results).values()]
    said = f"Plain decoding against itself: {min(controls):.3f} to {max(controls):.3f}. " if controls else ""
    return said + (f"Half of the intervals are narrower than {median(widths):.1%} either way." if widths else "")


def markdown(results: dict[str, Any]) -> str:
    lines = ["| figure | must reach | measured |", "|---|---|---|"]
    lines += [f"| {name} | {bound:g} | {beside(value, bound)} |" for name, bound, value in figures(results)]
    lines += ["", noise(results), ""]
    lines += ["| cell | speed-up | 95 % | decoding alone | predicted |", "|---|---|---|---|---|"]
    measured = [(key, cell) for key, cell in results["cells"].items() if "gain" in cell]
    for key, cell in sorted(measured, key=lambda item: upper(item[1])):
        gain, known = cell["gain"], cell["predicted"]
        ends = "" if gain["low"] is None else f"{gain['low']:.3f} to {gain['high']:.3f}"
        alone, known = f"{cell['decoding']:.3f}", "" if known is None else f"{known:.3f}"
        lines.append(f"| {key} | {gain['value']:.3f} | {ends} | {alone} | {known} |")
    lines += [
        "",
        f"| seconds of a pass over rows | depth | {' | '.join(map(str, ROWS))} |",
        "|---" * (2 + len(ROWS)) + "|",
    ]
    for key, cell in results["cells"].items():
        for depth, seconds in cell.get("rows", {}).items():
            lines.append(f"| {key} | {depth} | {' | '.join(f'{each:.4f}' for each in seconds.values())} |")
    if results["left_out"]:
        lines += ["", f"Not measured yet: {len(results['left_out'])} cells. Run again to go on."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.never_slower", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=["smollm2"], choices=("smollm2", "510M", *DERIVED))
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--machine", nargs="+", choices=(IDLE, BUSY), default=[IDLE, BUSY])
    parser.add_argument("--passes", type=int, default=5, help="timed passes; one more warms up")
    parser.add_argument("--tokens", type=int, default=64, help="usual number of tokens of an output")
    parser.add_argument("--minutes", type=float, default=60, help="no cell begins later; run again to continue")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    results = run(options)
    text = markdown(results)
    (options.out / "never-slower.md").write_text(text + "\n")
    print(text)
    below = [key for key, cell in gains(results).items() if upper(cell) < BOUND]
    return 1 if below or results["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
