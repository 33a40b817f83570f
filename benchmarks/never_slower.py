"""`python -m benchmarks.never_slower`: the worst cell of the default drafter against plain decoding.

Cells are models x kinds of text x streams x bits of the weights, on an idle machine and with another process on one
core. In each cell both ways decode the same requests in turns, and the run fails where the upper bound of a 95 %
interval is below `BOUND`. It also times rows by depth of context. A run that is cut goes on where it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

from benchmarks.derived_decoders import derived_decoder
from benchmarks.forced_schemas import TOOLS
from benchmarks.gguf.files import file_of
from benchmarks.markdown import beside
from benchmarks.paired_cells import Batch, Cells, compare
from benchmarks.protocol import ROOT, THREADS
from slipstream import LLM, SamplingParams, Structured, zoo
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.measure.prompts import choose_prompts
from slipstream.measure.provenance import commit, machine, now
from slipstream.targets.target_costs import measure_costs
from slipstream.tokens.text import load_tokenizer

BOUND = 0.99
MEANS = {16: 1.4, 8: 1.35, 4: 1.3}
BITS: dict[int, tuple[str, str | None]] = {16: ("F16", None), 8: ("F16", "w8a8"), 4: ("Q4_1", None)}
"""Kind of the file, and `quantize`, by the bits of the weights. Derived models are read from F16 in all formats."""
KINDS = ("code", "edit", "proofread", "summary", "chat", "tools", "long", "sampled")
DERIVED = ("mixture", "hybrid")
"""Targets that `derived_decoders` makes; the file of "510M" is made once."""
LONG = 6000
"""Tokens of the prompts of kind "long"."""
DEPTHS, ROWS = (100, 1000, LONG), (1, 2, 4, 8, 16)
IDLE, BUSY = "idle", "busy"


def models(target: str, bits: int, streams: int) -> tuple[LLM, LLM]:
    """(plain decoding, the default drafter) of one target in this format."""
    kind, quantize = BITS[bits]
    files, embedded = ROOT / "build" / "gguf", load_tokenizer(zoo.target_dir())
    if target in DERIVED:
        drafts = LLM(derived_decoder(target, bits, THREADS, files), "suffix", tokenizer=embedded, max_batch=streams)
    elif target == "smollm2":
        stack = ["suffix", ("eagle3", {"head": zoo.head_dir("eagle3", zoo.smollm2_file())})]
        tokenizer = load_tokenizer(zoo.smollm2_file())  # the 16-bit file that is made of it has none
        file = file_of(target, kind, files)
        drafts = LLM(file, stack, tokenizer=tokenizer, threads=THREADS, quantize=quantize, max_batch=streams)
    else:
        file, quantize = file_of(target, "F16", files), "int4" if bits == 4 else quantize
        drafts = LLM(file, "suffix", tokenizer=embedded, threads=THREADS, quantize=quantize, max_batch=streams)
    return LLM(drafts.target, draft_tokens=0, tokenizer=drafts.tokenizer, max_batch=streams), drafts


def batches(llm: LLM, kind: str, streams: int, tokens: int) -> list[Batch]:
    """Requests of one kind of text: three batches, so that there is an interval, of `streams` each."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if kind == "tools":
        params = SamplingParams(max_tokens=tokens, structured=Structured(json_schema=TOOLS[3].schema))
        prompts = [llm.chat_prompt(TOOLS[3].messages(request)) for request in TOOLS[3].requests]
    elif kind == "long":
        texts = [each.ids for each in choose_prompts(llm, "summary,proofread,code", 20).prompts]
        whole = [token for ids in texts for token in ids]
        room = llm.target.context - tokens - 1
        prompts = [(whole * (1 + LONG // len(whole)))[at : at + min(LONG, room)] for at in (0, 100, 200)]
    else:
        prompts = [each.ids for each in choose_prompts(llm, "chat,varied" if kind == "sampled" else kind, 12).prompts]
    if kind == "sampled":
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=1)
    count = 1 if kind == "long" and streams > 4 else 3  # prompts of 6k fill the memory
    return [([prompts[(b * streams + i) % len(prompts)] for i in range(streams)], params) for b in range(count)]


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """Another process that computes on one core, or none."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def predicted(llm: LLM) -> float | None:
    """The speed-up that the policy of draft lengths predicts; 1 while the drafter rests; None: nothing is known yet."""
    lengths = llm.lengths
    if not isinstance(lengths, DraftLengths):
        return None
    return 1.0 if lengths.resting else lengths.policy.gains.rate or None


def row_costs(llm: LLM) -> dict[str, dict[str, float]]:
    """Seconds of a pass over some rows, by depth of the context."""
    depths = [depth for depth in DEPTHS if depth + max(ROWS) < llm.target.context]
    curves = {depth: measure_costs(llm.target, ROWS, past=depth) for depth in depths}
    return {str(depth): {str(n): curve(n) for n in ROWS} for depth, curve in curves.items()}


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
                                asked = batches(pair[0], kind, streams, options.tokens)
                                cell = compare(*pair, asked, options.passes)
                                del cell["done"]
                                return cell | {"predicted": predicted(pair[1])}

                            cell = cells.add(f"{key}, {streams} streams, {kind}", measure)
                            if cell:
                                print(key, streams, kind, f"{cell['gain']['value']:.3f}", file=sys.stderr, flush=True)
    cells.write(date=now(), machine=machine(), left_out=cells.left_out)
    return {"cells": cells.cells, "left_out": cells.left_out}


def gains(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: cell for key, cell in results["cells"].items() if "gain" in cell}


def upper(cell: dict[str, Any]) -> float:
    """The upper bound of a cell's interval; without one, the value."""
    gain = cell["gain"]
    return float(gain["value"] if gain["high"] is None else gain["high"])


def figures(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return the bars: name, bound, measured."""
    cells = gains(results)
    if not cells:
        return []
    worst = min(cells, key=lambda key: upper(cells[key]))
    rows = [(f"worst upper bound ({worst})", BOUND, upper(cells[worst]))]
    rows.append(("worst cell as it stands", 0.98, min(cell["gain"]["value"] for cell in cells.values())))
    for bits, least in MEANS.items():
        some = [cell["gain"]["value"] for key, cell in cells.items() if f", {bits} bits, {IDLE}" in key]
        rows += [(f"mean, {bits} bits, idle", least, mean(some))] if some else []
    near = [abs(cell["predicted"] / cell["gain"]["value"] - 1) < 0.1 for cell in cells.values() if cell["predicted"]]
    rows += [("share of cells predicted within 10 %", 0.9, mean(near))] if near else []
    return rows


def markdown(results: dict[str, Any]) -> str:
    lines = ["| figure | must reach | measured |", "|---|---|---|"]
    lines += [f"| {name} | {bound:g} | {beside(value, bound)} |" for name, bound, value in figures(results)]
    lines += ["", "| cell | speed-up | 95 % | predicted |", "|---|---|---|---|"]
    for key, cell in sorted(gains(results).items(), key=lambda item: upper(item[1])):
        gain, known = cell["gain"], cell["predicted"]
        ends = "" if gain["low"] is None else f"{gain['low']:.3f} to {gain['high']:.3f}"
        lines.append(f"| {key} | {gain['value']:.3f} | {ends} | {'' if known is None else f'{known:.2f}'} |")
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
    parser.add_argument("--passes", type=int, default=4, help="timed passes; one more warms up")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an output")
    parser.add_argument("--minutes", type=float, default=60, help="no cell begins after it; run again to go on")
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
