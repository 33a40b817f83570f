"""Measures SmolLM2 by families of prompts. The default drafter is compared with plain decoding, and with ik_llama.cpp,
llama.cpp, OpenVINO GenAI and transformers, each plain and with n-gram lookup in the sequence so far.

    python -m benchmarks.gguf.families --data ../shared/data     # needs `make ik-llamacpp gguf peer-genai`
    python -m benchmarks.gguf.families --data ../shared/data --only slipstream --bits 4 \
        --drafter eagle3 --draft FOLDER     # with another draft head

Outputs are greedy and end with an end-of-text token, or after 128 tokens. A prompt counts if no contender's output
loops. In each pass every contender runs each prompt once, in rotating order. Weight formats with the same number of
bits are compared. A rival counts with plain decoding or lookup, whichever is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.figures import spread
from benchmarks.gguf.files import started, started_from_checkpoint
from benchmarks.gguf.lineup import GENAI, IK, LLAMACPP, SLIPSTREAM, TRANSFORMERS, Side
from benchmarks.markdown import beside, bound, document, noise, run_of, versions
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT
from benchmarks.provenance import provenance
from slipstream import zoo
from slipstream.checkpoints.config import DecoderConfig
from slipstream.cli.options import check_length
from slipstream.drafters.draft_plan import WITH_HEAD
from slipstream.measure.estimates import estimate_mean, estimate_ratio
from slipstream.measure.loops import find_looping
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.settings import AUTO
from slipstream.tokens.text import load_tokenizer

TOKENS, LONGEST = 128, 1024
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
FAMILIES = dict.fromkeys(CHAT, "chat") | {
    "translation": "translation", "summarization": "summary", "qa": "questions", "math_reasoning": "mathematics",
    "rag": "questions on texts",
}  # fmt: skip
"""Family of each category of Spec-Bench."""
CODE, COPY = "code", "copy, with a prediction"
SIDES = [
    *(
        Side(SLIPSTREAM, kind, bits, quantize)
        for kind, bits, quantize in (("F16", 16, None), ("F16", 8, "w8a8"), ("Q4_1", 4, None))
    ),
    *(Side(who, kind, bits) for who in (IK, LLAMACPP) for kind, bits in (("F16", 16), ("Q8_0", 8), ("Q4_K_M", 4))),
    Side(GENAI, "fp16", 16), Side(GENAI, "int8", 8),
    Side(TRANSFORMERS, "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32", 16),
]  # fmt: skip
"""Contenders. On a processor without bfloat16 products, float32 is the fastest dtype in transformers."""
LOOKUP = 4
"""Draft length of contenders that read the checkpoint; the same as `rival_worker.DRAFT`."""
PLAIN, DRAFTED = "plain", "drafted"
"""How each contender decodes. With DRAFTED, Slipstream drafts with `--drafter`, and rivals with lookup."""
BARS = {16: 1.25, 8: 1.1, 4: 1.1}
"""By bits of the weights, the mean speed-up over plain decoding that must be reached."""
WORST, COPIED, OVER = 0.97, 2.0, {IK: 1.15, LLAMACPP: 1.5, GENAI: 1.5, TRANSFORMERS: 3.0}


@dataclass(frozen=True)
class Asked:
    """A request: ids of the prompt, and of the prediction, a text that the answer will probably contain."""

    family: str
    name: str
    ids: list[int]
    prediction: list[int]


def arguments(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.families", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench/question.jsonl and humaneval/")
    parser.add_argument("--each", type=int, default=10, help="prompts of each family")
    parser.add_argument("--bits", type=int, nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--only", nargs="+", choices=(SLIPSTREAM, *OVER), default=[SLIPSTREAM, *OVER])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit: no pass begins later")
    parser.add_argument("--drafter", default=WITH_HEAD, help="drafter of Slipstream; several, with commas, are stacked")
    parser.add_argument("--draft", type=Path, help="draft model or head of the drafter, instead of the embedded one")
    parser.add_argument("--draft-tokens", type=check_length, default=AUTO, help="most draft tokens of a step, or auto")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "gguf", help="where converted models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(words)


def asked(data: Path, each: int) -> Iterator[Asked]:
    """Yield the first prompts of each family. Texts to copy are the beginnings of Spec-Bench's texts to summarise."""
    tokenizer, counts = load_tokenizer(zoo.smollm2_file()), dict[str, int]()

    def one(family: str, text: str, copied: str = "") -> Iterator[Asked]:
        number = counts[family] = counts.get(family, 0) + 1
        if number <= each:
            talk = [{"role": "user", "content": text}]
            ids = tokenizer.encode(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
            prediction = tokenizer.encode(copied) if copied else []
            if len(ids) <= LONGEST:
                yield Asked(family, f"{family} {number}", ids, prediction)
            else:
                counts[family] -= 1

    for line in (data / "spec_bench" / "question.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        family = FAMILIES[entry["category"]]
        # The first two prompts of each of the eight chat categories, so that ten prompts contain several categories.
        if family != "chat" or entry["question_id"] % 10 in (1, 2):
            yield from one(family, entry["turns"][0])
        if family == "summary":
            text = " ".join(entry["turns"][0].split()[1:91])
            yield from one(COPY, f"Correct the mistakes in this text. Change nothing else.\n\n{text}", text)
    for line in (data / "humaneval" / "HumanEval.jsonl").read_text(encoding="utf-8").splitlines():
        yield from one(CODE, f"Complete this Python function:\n\n```python\n{json.loads(line)['prompt']}```")


class Contender:
    """One process with one file. Keeps the seconds per token of plain and drafted decoding, as [requests][passes]."""

    def __init__(self, side: Side, files: Path, **drafts: Any):
        self.side, self.seconds, self.texts = side, dict[str, list[list[float]]](), dict[str, list[list[int]]]()
        self.ends = DecoderConfig.load(zoo.smollm2_file()).eos_ids
        self.reads_files = side.who in (SLIPSTREAM, IK, LLAMACPP)
        if self.reads_files:
            self.worker = started(side, "smollm2", files, **drafts)
        else:
            self.worker = started_from_checkpoint(side, "smollm2", files)

    def ask(self, one: Asked, place: int, way: str, kept: bool = True) -> None:
        drafted, wanted = way == DRAFTED, {"ids": one.ids, "tokens": TOKENS, "ends": self.ends}
        if self.reads_files:
            took = self.worker.call("request", name="model", drafted=drafted, prediction=one.prediction, **wanted)
        else:
            name, length = ("lookup", LOOKUP) if drafted else ("plain", 0)
            took = self.worker.call("generate", name=name, draft_tokens=length, **wanted)
        cells, texts = self.seconds.setdefault(way, []), self.texts.setdefault(way, [])
        while len(cells) <= place:
            cells.append([])
            texts.append(took["tokens"])
        if kept:
            cells[place].append(took["seconds"] / len(took["tokens"]))


def main(words: Seq[str] | None = None) -> int:
    """Measure, and write real-smollm2.json and real-smollm2.md; other drafters than the default add their name to the
    file names. Returns 1 if a bar is missed."""
    options = arguments(words)
    chosen = "default" if options.drafter == WITH_HEAD else options.drafter.replace(",", "+")
    drafts = {"drafter": options.drafter, "draft_tokens": options.draft_tokens}
    head = zoo.head_dir("eagle3", zoo.smollm2_file()) if "eagle3" in options.drafter else None
    if draft := options.draft or head:
        drafts["draft"] = str(draft.resolve())
    requests = list(asked(options.data, options.each))
    neighbours = OtherProcesses()
    sides = [side for side in SIDES if side.who in options.only and side.bits in options.bits]
    contenders = [Contender(side, options.files, **drafts) for side in sides]
    try:
        ways = [(contender, way) for contender in contenders for way in (PLAIN, DRAFTED)]
        for contender, way in ways:  # the first calls compile or allocate
            contender.ask(requests[0], 0, way, kept=False)
        begun = monotonic()
        for number in range(options.passes):
            if number and monotonic() - begun > 60 * options.minutes:
                break
            for place, one in enumerate(requests):
                turn = (number + place) % len(ways)
                for contender, way in ways[turn:] + ways[:turn]:
                    contender.ask(one, place, way)
            print(f"pass {number + 1}: {monotonic() - begun:.0f} s", file=sys.stderr)
        seen = {c.side.label: c.worker.call("info")["versions"] for c in contenders}
    finally:
        for contender in contenders:
            contender.worker.close()
    files = [options.data / "spec_bench" / "question.jsonl", options.data / "humaneval" / "HumanEval.jsonl"]
    command = ["python", "-m", "benchmarks.gguf.families", *(sys.argv[1:] if words is None else words)]
    source = provenance("smollm2", "smollm2", {file.name: digest([file]) for file in files}, command)
    source |= {"versions": seen, "neighbours": neighbours.share()}
    results = {"schema": 1, "provenance": source, **summary(contenders, requests, chosen)}
    table = document(results, [heading, noise, figures, families, rates])
    options.out.mkdir(parents=True, exist_ok=True)
    name = "real-smollm2" if chosen == "default" else f"real-smollm2-{chosen}"
    (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(table)
    print(table)
    return 0 if all(row["reached"] for row in results["figures"]) else 1


def summary(contenders: Seq[Contender], requests: Seq[Asked], chosen: str = "default") -> dict[str, Any]:
    """Return the results to write: speed-ups by family, speed-ups over rivals, and rates. chosen: name of our
    drafter."""
    loops = set()
    for contender in contenders:
        for texts in contender.texts.values():
            loops |= set(find_looping(dict(enumerate(texts))))
    kept = [i for i in range(len(requests)) if i not in loops]
    names = list(dict.fromkeys(requests[i].family for i in kept))
    places = {name: [i for i in kept if requests[i].family == name] for name in names}
    passes = min(len(row) for c in contenders for cells in c.seconds.values() for row in cells)

    def cells(contender: Contender, way: str, family: str) -> list[list[float]]:
        return [contender.seconds[way][i][:passes] for i in places[family]]

    def typical(contender: Contender, way: str) -> float:
        """Return the geometric mean over families of the seconds per token."""
        return statistics.geometric_mean(estimate_mean(cells(contender, way, family)).value for family in names)

    slipstream = {c.side.bits: c for c in contenders if c.side.who == SLIPSTREAM}
    gains = {
        bits: {f: vars(estimate_ratio(cells(c, PLAIN, f), cells(c, DRAFTED, f))) for f in names}
        for bits, c in slipstream.items()
    }
    differing = {
        bits: [requests[i].name for i in kept if c.texts[PLAIN][i] != c.texts[DRAFTED][i]]
        for bits, c in slipstream.items()
    }
    lines = []
    for bits, by_family in gains.items():
        usual = [one["value"] for family, one in by_family.items() if family != COPY]
        value = statistics.geometric_mean(usual)
        lines.append((f"{chosen} over plain, {bits} bits, mean of families without {COPY!r}", BARS[bits], value))
        lines.append((f"the same, worst family, {bits} bits", WORST, min(usual)))
        if COPY in by_family:
            lines.append((f"{COPY}, {bits} bits, over plain", COPIED, by_family[COPY]["value"]))
        for who, bar in OVER.items():
            rivals = [
                (typical(c, way), way)
                for c in contenders
                if c.side.who == who and c.side.bits == bits
                for way in (PLAIN, DRAFTED)
            ]
            if rivals:
                best, way = min(rivals)
                lines.append(
                    (
                        f"{chosen}, {bits} bits, over {who} {way}, mean of all families",
                        bar,
                        best / typical(slipstream[bits], DRAFTED),
                    )
                )
    return {
        "figures": [{"text": t, "reach": bar, "value": v, "reached": v >= bar} for t, bar, v in lines],
        "drafter": chosen,
        "gains": gains,
        "differing": differing,
        "passes": passes,
        "prompts": {family: len(each) for family, each in places.items()},
        "looping": len(loops),
        "seconds": {
            f"{c.side.label}, {way}": {family: cells(c, way, family) for family in names}
            for c in contenders for way in (PLAIN, DRAFTED)
        },
    }  # fmt: skip


def heading(results: dict[str, Any]) -> list[str]:
    source, prompts = results["provenance"], results["prompts"]
    listed = ", ".join(f"{family} {count}" for family, count in prompts.items())
    differ = {bits: names for bits, names in results["differing"].items() if names}
    return [
        "# SmolLM2-135M-Instruct by families of prompts",
        "",
        f"{run_of(source)}, {results['passes']} passes. Prompts: {listed}; {results['looping']} more looped and do "
        f"not count. {versions(source)} Drafted texts that differ from our plain ones: {differ or 'none'}.",
    ]


def figures(results: dict[str, Any]) -> list[str]:
    body = [
        (row["text"], f"at least {bound(row['reach'], unit='x')}", beside(row["value"], row["reach"], unit="x"),
         "yes" if row["reached"] else "**no**")
        for row in sorted(results["figures"], key=lambda row: row["reached"])
    ]  # fmt: skip
    return [rows(["figure", "must reach", "measured", "reached"], body, (0, 1))]


def families(results: dict[str, Any]) -> list[str]:
    """Tabulate the speed-up of our drafter over plain decoding."""
    body = []
    for family in results["prompts"]:
        each = [by_family[family] for by_family in results["gains"].values()]
        body.append(
            (
                family,
                *(f"{e['value']:.2f}x" + (f" ({e['low']:.2f} to {e['high']:.2f})" if e["low"] else "") for e in each),
            )
        )
    return [rows([f"{results['drafter']} over plain", *(f"{bits} bits" for bits in results["gains"])], body)]


def rates(results: dict[str, Any]) -> list[str]:
    """Tabulate tokens per second, prompt included: medians over prompts and passes."""
    body = []
    for name, each in results["seconds"].items():
        medians = [spread([[1 / s for s in text] for text in cells])["median"] for cells in each.values()]
        body.append((name, *(f"{rate:.0f}" for rate in medians)))
    return [rows(["tokens/s", *results["prompts"]], body)]


if __name__ == "__main__":
    sys.exit(main())
