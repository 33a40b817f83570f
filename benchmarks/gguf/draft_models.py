"""Compares synthetic targets of 0.5B and 1.1B parameters and a draft model of 46M with llama.cpp and ik_llama.cpp. Each
system decodes plainly, with n-gram lookup, and with the same draft model.

    python -m benchmarks.gguf.draft_models --model 510M --data ../shared/data   # needs `make ik-llamacpp gguf`

Slipstream chooses draft lengths; rivals count with their best setting. Outputs are greedy and of fixed length, after
prompts of HumanEval after which the target does not loop. In each pass every contender runs each prompt once, in
rotating order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence as Seq
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.derived_models import deeper, wider
from benchmarks.figures import spread
from benchmarks.gguf.families import figures
from benchmarks.gguf.files import SIZES, file_of, started
from benchmarks.gguf.gguf_writer import convert_to_gguf
from benchmarks.gguf.lineup import IK, LLAMACPP, MODELS, SLIPSTREAM, Side
from benchmarks.markdown import document, noise, run_of, versions
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT, THREADS
from benchmarks.provenance import provenance
from slipstream import LLM, SamplingParams, zoo
from slipstream.measure.estimates import estimate_mean, estimate_ratio
from slipstream.measure.loops import find_looping
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.tokens.text import load_tokenizer

TOKENS = 96
SETTINGS = ((16, 0.75), (8, 0.5), (4, 0.5), (4, 0.25))
"""Settings of rivals: most draft tokens, and the probability below which the draft model stops drafting. The first
setting is llama.cpp's default."""
OURS = {"plain": "none", "draft model": "model", "suffix tree before it": "suffix,model"}
BITS = {
    16: [Side(SLIPSTREAM, "F16", 16), *(Side(who, "F16", 16) for who in (LLAMACPP, IK))],
    8: [Side(SLIPSTREAM, "F16", 8, "w8a8"), *(Side(who, "Q8_0", 8) for who in (LLAMACPP, IK))],
    4: [Side(SLIPSTREAM, "F16", 4, "int4"), *(Side(who, "Q4_K_M", 4) for who in (LLAMACPP, IK))],
}
BAR = 2.5
"""Speed-up over the best setting of llama.cpp that must be reached."""

Cells = dict[str, list[list[float]]]
"""Seconds per token by contender, as [prompts][passes]."""


def arguments(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.draft_models", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="510M")
    parser.add_argument("--bits", type=int, choices=BITS, default=8)
    parser.add_argument("--data", type=Path, required=True, help="folder with humaneval/")
    parser.add_argument("--draft-bits", type=int, choices=BITS, help="bits of all draft models; default: as the target")
    parser.add_argument("--each", type=int, default=10, help="prompts")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "gguf", help="where converted models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(words)


def draft_model(folder: Path) -> Path:
    """Make the draft model: the embedded draft model with four times its width and two layers more."""
    path, wide = folder / "draft-46M", folder / "draft-46M-wide"
    if not path.exists():
        deeper(path, wide if wide.exists() else wider(wide, zoo.draft_dir(), 4), 2)
    return path


def without_loops(file: Path) -> Iterator[list[int]]:
    """Yield prompts after which the embedded target does not loop. The synthetic targets write the same text."""
    llm, tokenizer = LLM(zoo.target_dir()), load_tokenizer(zoo.target_dir())
    for line in file.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)["prompt"]
        text = llm.generate(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))[0].token_ids
        if not find_looping({0: list(text)}):
            yield tokenizer.encode(prompt)


def main(words: Seq[str] | None = None) -> int:
    """Measure, and write draft-MODEL.json and draft-MODEL.md. Returns 1 if the bar is missed."""
    options = arguments(words)
    file = options.data / "humaneval" / "HumanEval.jsonl"
    neighbours, draft = OtherProcesses(), draft_model(options.files)
    prompts = list(islice(without_loops(file), options.each))
    draft_bits = options.draft_bits or options.bits
    drafts = {side.who: side for side in BITS[draft_bits]}
    ways: dict[str, Any] = {}
    for side in BITS[options.bits]:
        quantize = drafts[side.who].quantize or "none"
        worker = started(
            side, options.model, options.files, draft=str(draft), drafters=OURS, draft_quantize=quantize
        )  # fmt: skip
        if side.who == SLIPSTREAM:
            ways |= {f"{side.label}, {way}": (worker, {"name": way, "drafted": True}) for way in OURS}
        else:
            kind = drafts[side.who].kind
            small = options.files / f"draft-46M-{kind}.gguf"
            if not small.exists():
                convert_to_gguf(draft, small, kind.lower())
            target = str(file_of(options.model, side.kind, options.files))
            worker.call("load", name="with draft", file=target, threads=THREADS, draft=str(small))
            ways[f"{side.label}, plain"] = worker, {"name": "model", "drafted": False}
            ways[f"{side.label}, lookup"] = worker, {"name": "model", "drafted": True}
            ways |= {f"{side.label}, draft model, {most} from {least}": (
                worker, {"name": "with draft", "drafted": True, "chain": most, "least": least}
            ) for most, least in SETTINGS}  # fmt: skip
    whole, later = Cells(), Cells()
    texts: dict[str, list[list[int]]] = {}
    try:
        for worker, how in ways.values():  # the first calls compile or allocate
            worker.call("request", ids=prompts[0], tokens=16, **how)
        for number in range(options.passes):
            for place, ids in enumerate(prompts):
                turn, names = (number + place) % len(ways), list(ways)
                for name in names[turn:] + names[:turn]:
                    worker, how = ways[name]
                    took = worker.call("request", ids=ids, tokens=TOKENS, **how)
                    for cells, seconds in (
                        (whole, took["seconds"] / TOKENS),
                        (later, (took["seconds"] - took["first"]) / (TOKENS - took["count"])),
                    ):
                        if not number:
                            cells.setdefault(name, []).append([])
                        cells[name][place].append(seconds)
                    if not number:
                        texts.setdefault(name, []).append(took["tokens"])
        workers = dict.fromkeys(worker for worker, _ in ways.values())
        seen = {worker.name: worker.call("info")["versions"] for worker in workers}
    finally:
        for worker, _ in ways.values():
            worker.close()
    command = ["python", "-m", "benchmarks.gguf.draft_models", *(sys.argv[1:] if words is None else words)]
    source = provenance(options.model, str(draft), {file.name: digest([file])}, command)
    source |= {"versions": seen, "neighbours": neighbours.share(), "model": options.model, "bits": options.bits,
               "draft_bits": draft_bits}  # fmt: skip
    results = {"schema": 1, "provenance": source, "passes": options.passes, **summary(whole, later, texts)}
    name = f"draft-{options.model}-{options.bits}-{draft_bits}-bits"
    table = document(results, [heading, noise, figures, rates])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(table)
    print(table)
    return 0 if all(row["reached"] for row in results["figures"]) else 1


def summary(whole: Cells, later: Cells, texts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Return the results to write: the figures, which are about the time after the first token, and all times. Prompts
    with an output that loops are left out."""
    loops = {i for each in texts.values() for i in find_looping(dict(enumerate(each)))}
    kept = [i for i in range(len(next(iter(texts.values())))) if i not in loops]
    whole, later = ({name: [cells[i] for i in kept] for name, cells in each.items()} for each in (whole, later))
    ours = [name for name in later if name.startswith(SLIPSTREAM)]
    lines = []
    for who in (LLAMACPP, IK):
        rival = min((n for n in later if n.startswith(who)), key=lambda n: estimate_mean(later[n]).value)
        for name in ours[1:]:
            value = estimate_ratio(later[rival], later[name]).value
            lines.append((f"{name}, over {rival}", BAR if who == LLAMACPP else 1.0, value))
    return {
        "figures": [{"text": t, "reach": bar, "value": v, "reached": v >= bar} for t, bar, v in lines],
        "prompts": len(kept),
        "looping": len(loops),
        "equal": all(texts[name][i] == texts[ours[0]][i] for name in ours for i in kept),
        "seconds": {name: {"after the first token": later[name], "in all": whole[name]} for name in later},
    }


def heading(results: dict[str, Any]) -> list[str]:
    source = results["provenance"]
    return [
        f"# A {MODELS[source['model']]}, in {source['bits']} bits with a draft model of 46M in {source['draft_bits']}",
        "",
        f"{run_of(source)}, {results['passes']} passes. {results['prompts']} prompts of HumanEval, {TOKENS} tokens; "
        f"{results['looping']} more looped and do not count. {versions(source)} Our texts are "
        f"{'equal' if results['equal'] else '**not equal**'}. The figures are of the time after the first token.",
    ]


def rates(results: dict[str, Any]) -> list[str]:
    """Tabulate tokens per second (medians over prompts and passes), and the speed-up over plain decoding of the same
    contender."""
    body, heads = [], ["tokens/s"]
    for name, each in results["seconds"].items():
        plain = results["seconds"][f"{name.split(', ')[0]}, plain"]
        cells = []
        for what, seconds in each.items():
            rate = spread([[1 / s for s in text] for text in seconds])
            gain = estimate_ratio(plain[what], seconds).value
            cells += [f"{rate['median']:.0f} ({rate['q1']:.0f} to {rate['q3']:.0f})", f"{gain:.2f}x"]
        heads = ["tokens/s", *(head for what in each for head in (what, "over plain"))]
        body.append((name, *cells))
    return [rows(heads, body)]


if __name__ == "__main__":
    sys.exit(main())
