"""`python -m benchmarks.forced`: what drafts of forced text gain under schemas of real tools.

SmolLM2 in 16, 8 and 4 bits fills in eight schemas, alone and four requests at a time. Each cell compares the default
drafter with the drafter `grammar` before it and without, in turns, on eight different requests. Spellings of forced
texts are forgotten before each pass, so the first request of a pass meets an unknown schema. The benchmark also tells
which share of the bytes that the form forces was drafted, and how long the drafter takes a step under a schema of 4 kB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from statistics import mean, median
from time import monotonic, process_time
from typing import Any

from benchmarks.forced_schemas import TOOLS, Tool
from benchmarks.gguf.files import file_of
from benchmarks.markdown import beside
from benchmarks.paired_cells import Batch, Cells, compare
from benchmarks.protocol import ROOT, THREADS
from slipstream import LLM, SamplingParams, Structured, zoo
from slipstream.core.sequence import Sequence
from slipstream.measure.provenance import commit, machine, now
from slipstream.tokens.text import load_tokenizer

BITS: dict[int, tuple[str, str | None]] = {16: ("F16", None), 8: ("F16", "w8a8"), 4: ("Q4_1", None)}
"""Kind of the file of SmolLM2, and `quantize`, by the bits of the weights."""
LEAST = {16: 1.4, 8: 1.3, 4: 1.3}
SHARE, MICROSECONDS = 0.9, 50.0


class WithForced(LLM):
    """Begins each pass without what earlier passes have taught about the spelling of forced texts."""

    def decode(self, seqs: Seq[Sequence]) -> Iterator[list[Sequence]]:
        structured = seqs[0].params.structured
        assert structured is not None
        _, _, form = self._grammars._compiled(structured)
        form.spellings.clear()
        return super().decode(seqs)


class WithoutForced(LLM):
    """Decodes without drafts of forced text."""

    _forced_tokens = 0  # type: ignore[assignment]


def smollm2(bits: int, drafts: bool, streams: int) -> LLM:
    """SmolLM2 in this format, with the drafters that `slipstream serve smollm2` takes, or without."""
    kind, quantize = BITS[bits]
    head = zoo.head_dir("eagle3", zoo.smollm2_file())
    stack = ["suffix", ("eagle3", {"head": head})] if drafts else None
    file = file_of("smollm2", kind, ROOT / "build" / "gguf")
    tokenizer = load_tokenizer(zoo.smollm2_file())  # the 16-bit file that is made of it has none
    return WithForced(file, stack, tokenizer=tokenizer, threads=THREADS, quantize=quantize, max_batch=streams)


def make_batch(llm: LLM, tool: Tool, tokens: int) -> Batch:
    """Make the requests of one tool. Each of `streams` clients begins one when another ends, and no request is made
    twice, because the target would write it in the same tokens again."""
    params = SamplingParams(max_tokens=tokens, structured=Structured(json_schema=tool.schema))
    return [(llm.chat_prompt(tool.messages(request)), params) for request in tool.requests]


def forced_share(llm: LLM, tool: Tool, seq: Sequence) -> tuple[int, int]:
    """Bytes of an output that its form forced, white space aside, and how many of them were drafted as such."""
    structured = Structured(json_schema=tool.schema)
    _, _, spelled = llm._grammars._compiled(structured)
    symbols, matcher = spelled.symbols, spelled.grammar.deep_copy()
    forced = drafted = 0
    for token, proposer in zip(seq.output, seq.proposers, strict=True):
        for symbol in symbols.of(token):
            only = symbols.read_mask(matcher.compute_bitmask()).only
            forced += only == symbol
            drafted += only == symbol and proposer == "grammar"
            if not matcher.try_consume_tokens([symbol]):
                return forced, drafted
    return forced, drafted


def microseconds(llm: LLM) -> float:
    """Mean time of finding forced text in a step, along texts under a schema of 4 kB that were read before."""
    schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    for tool in TOOLS:
        schema["properties"][tool.name] = tool.schema
    schema["required"] = list(schema["properties"])
    form, stops = Structured(json_schema=schema), frozenset(llm.target.capabilities.eos_ids)
    text = json.dumps({tool.name: tool.example for tool in TOOLS})
    ids, took, steps = llm.tokenizer.encode(text), 0.0, 0
    for timed in (False, True):
        constraint, at = llm._grammars.make_constraint(form, stops), 0
        while at < len(ids):
            constraint.find_allowed(ids[:at], [()])
            began = process_time()
            draft = constraint.find_forced(ids[:at], as_before=True).tokens
            took += (process_time() - began) * timed
            steps += timed
            same = 0
            while same < len(draft) and at + same < len(ids) and draft[same] == ids[at + same]:
                same += 1
            at += same + 1
    return 1e6 * took / steps


def run(options: argparse.Namespace) -> dict[str, Any]:
    fixed = {"passes": options.passes, "tokens": options.tokens, "draft": options.draft, "commit": commit()}
    cells = Cells(options.out / "forced.json", monotonic() + 60 * options.minutes, fixed)
    host = 0.0
    for bits in options.bits:
        llm = smollm2(bits, options.draft == "default", max(options.streams))
        without = WithoutForced(llm.target, llm.drafter, tokenizer=llm.tokenizer, max_batch=llm.max_batch)
        host = median(microseconds(llm) for _ in range(15))
        for streams in options.streams:
            for tool in TOOLS[: options.tools]:

                def measure(tool: Tool = tool, streams: int = streams, llm: LLM = llm, base: LLM = without) -> Any:
                    llm.max_batch = base.max_batch = streams
                    cell = compare(base, llm, [make_batch(llm, tool, options.tokens)], options.passes)
                    seqs = [llm.sequence(*request) for request in make_batch(llm, tool, options.tokens)]
                    for _ in llm.decode(seqs):
                        pass
                    shares = [forced_share(llm, tool, seq) for seq in seqs]
                    done = cell.pop("done")
                    cell["forced"], cell["drafted"] = (sum(each) for each in zip(*shares, strict=True))
                    cell["tokens"] = sum(len(each.token_ids) for each in done)
                    return cell

                cell = cells.add(f"{bits} bits, {streams} streams, {tool.name}", measure)
                if cell:
                    print(bits, streams, tool.name, f"{cell['gain']['value']:.2f}", file=sys.stderr, flush=True)
    results = {"cells": cells.cells, "left_out": cells.left_out, "microseconds": host}
    cells.write(date=now(), machine=machine(), microseconds=host, left_out=cells.left_out)
    return results


def figures(results: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Return the bars: name, bound, measured, whether it is an upper bound."""
    rows, cells = [], results["cells"]
    for bits, least in LEAST.items():
        gains = [cell["gain"]["value"] for key, cell in cells.items() if key.startswith(f"{bits} bits")]
        if gains:
            rows += [(f"{bits} bits, mean", least, mean(gains), False), (f"{bits} bits, worst", 1.0, min(gains), False)]
    forced, drafted = (sum(cell[name] for cell in cells.values()) for name in ("forced", "drafted"))
    rows.append(("share of forced bytes that are drafted", SHARE, drafted / max(1, forced), False))
    rows.append(("microseconds of the drafter a step, schema of 4 kB", MICROSECONDS, results["microseconds"], True))
    return rows


def markdown(results: dict[str, Any]) -> str:
    lines = ["| figure | must reach | measured |", "|---|---|---|"]
    lines += [f"| {name} | {bound:g} | {beside(value, bound)} |" for name, bound, value, _ in figures(results)]
    lines += ["", "| cell | speed-up | 95 % | texts that differ |", "|---|---|---|---|"]
    for key, cell in results["cells"].items():
        gain = cell["gain"]
        ends = "" if gain["low"] is None else f"{gain['low']:.2f} to {gain['high']:.2f}"
        lines.append(f"| {key} | {gain['value']:.2f} | {ends} | {cell['differing']} |")
    return "\n".join(
        [*lines, *(["", f"Not measured: {', '.join(results['left_out'])}."] if results["left_out"] else [])]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forced", description=__doc__)
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--passes", type=int, default=3, help="timed passes; one more warms up")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output")
    parser.add_argument("--tools", type=int, default=len(TOOLS), help="how many of the schemas")
    parser.add_argument("--minutes", type=float, default=10, help="no cell begins after it; run again to go on")
    parser.add_argument("--draft", choices=("default", "none"), default="default", help="the drafter after `grammar`")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    results = run(options)
    text = markdown(results)
    (options.out / "forced.md").write_text(text + "\n")
    print(text)
    missed = [value > bound if most else value < bound for _, bound, value, most in figures(results)]
    return 1 if any(missed) or results["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
