"""Compares weights of four bits with float16 in GGUF files: speed, acceptance, and perplexity of held-out text.

    python -m benchmarks.gguf.precision           # the embedded pair, half a minute; needs `make gguf`

Each row of the table has the embedded target in another format. The draft model is always the embedded draft model in
float16. All rows are measured in one interleaved run in one process: for each prompt every arm runs once, in rotating
order.

Perplexity is measured on the embedded held-out texts, which were not in the training data: code prompts after their
first token, and the known answers to edits after their requests. It needs no sampling, so only the choice of texts is
random.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.figures import spread
from benchmarks.gguf.gguf_writer import convert_to_gguf
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.prompts import SETS, Prompt, load
from benchmarks.protocol import THREADS
from benchmarks.provenance import provenance
from slipstream import zoo
from slipstream.core.params import SamplingParams
from slipstream.core.structured import Structured
from slipstream.llm import LLM
from slipstream.measure.estimates import estimate_ratio
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.measure.tables import Estimate, ends, interval, percent
from slipstream.targets.describe import as_target

KINDS = ("f16", "q8_0", "q4_k_m")
"""Formats of the target. The others are compared with the first."""
DRAFT_TOKENS = 4

Text = tuple[list[int], list[int]]
"""Two lists of token ids: the text that is read, and the text after it that is scored."""


def held_out(llm: LLM) -> dict[str, list[Text]]:
    """Return the texts whose perplexity is measured, by set of prompts."""
    code = [llm.tokenizer.encode(entry["prompt"]) for entry in zoo.prompts("code")]
    edits = [
        (llm.chat_prompt(entry["prompt"]), llm.tokenizer.encode(entry["answer"], add_special_tokens=False))
        for entry in zoo.prompts("edit")
    ]
    return {"code": [(ids[:1], ids[1:]) for ids in code], "edit": edits}


def losses(llm: LLM, texts: Mapping[str, list[Text]]) -> dict[str, list[list[float]]]:
    """Return for each text of each set: [negative log-likelihood in nats, number of tokens]."""
    losses: dict[str, list[list[float]]] = {}
    for name, pairs in texts.items():
        params = [
            SamplingParams(max_tokens=len(text), ignore_eos=True, logprobs=0, structured=Structured(tokens=text))
            for _, text in pairs
        ]
        done = llm.generate([read for read, _ in pairs], params)
        losses[name] = [[-sum(each.logprob for each in one.logprobs or ()), len(one.token_ids)] for one in done]
    return losses


def perplexity(of: Seq[Seq[float]]) -> float:
    """Return the perplexity of all texts together, in which every token has the same weight."""
    return math.exp(sum(loss for loss, _ in of) / sum(count for _, count in of))


def times_of(
    arms: Mapping[str, LLM], prompts: Seq[Prompt], rounds: int, seen: dict[str, list[int]], clock: Callable[[], float]
) -> dict[str, Any]:
    """Return the seconds [prompts][rounds] of each arm. Adds accepted and proposed tokens of each arm to `seen`."""
    seconds: dict[str, Any] = {name: [[] for _ in prompts] for name in arms}
    names = list(arms)
    for number in range(-1, rounds):  # the first pass is not timed
        for p, prompt in enumerate(prompts):
            turn = (number + p) % len(names)
            for name in names[turn:] + names[:turn]:
                began = clock()
                done = arms[name].generate([prompt.ids], SamplingParams(max_tokens=prompt.tokens, ignore_eos=True))[0]
                if number >= 0:
                    seconds[name][p].append(clock() - began)
                    seen[name][0] += done.stats.accepted
                    seen[name][1] += done.stats.proposed
    return seconds


def measure(options: argparse.Namespace, command: list[str], folder: Path) -> dict[str, Any]:
    """Measure, and return the results as plain JSON values."""
    threads, clock = (1, process_time) if options.processor_time else (THREADS, perf_counter)
    neighbours = OtherProcesses()
    draft = as_target(convert_to_gguf(zoo.draft_dir(), folder / "draft.gguf", "f16").file, threads=threads)
    arms, stored, scored = dict[str, LLM](), dict[str, Mapping[str, int]](), dict[str, Any]()
    for kind in KINDS:
        written = convert_to_gguf(zoo.target_dir(), folder / f"target-{kind}.gguf", kind)
        plain = LLM(written.file, threads=threads)
        arms[f"{kind} plain"] = plain
        arms[f"{kind} draft"] = LLM(plain.target, draft, tokenizer=plain.tokenizer, draft_tokens=DRAFT_TOKENS)
        stored[kind], scored[kind] = written.stored, losses(plain, held_out(plain))
    sets, _ = load(zoo.HERE / "prompts", plain.tokenizer, options.prompts)
    chosen = [Prompt(p.ids, min(options.tokens, p.tokens), p.kind) for name in SETS for p in sets[name]]
    seen = {name: [0, 0] for name in arms}
    seconds = times_of(arms, chosen, options.rounds, seen, clock)
    base, rows = seconds[f"{KINDS[0]} plain"], []
    for kind in KINDS:
        row: dict[str, Any] = {"kind": kind, "stored": dict(stored[kind]), "losses": scored[kind]}
        row["perplexity"] = {name: perplexity(of) for name, of in scored[kind].items()}
        for arm in ("plain", "draft"):
            times = seconds[f"{kind} {arm}"]
            rates = [[p.tokens / s for s in cells] for p, cells in zip(chosen, times, strict=True)]
            row[arm] = {
                "seconds": times,
                "tokens_per_second": spread(rates),
                "speedup": asdict(estimate_ratio(base, times)),
            }
        accepted, proposed = seen[f"{kind} draft"]
        row["acceptance_rate"] = accepted / proposed if proposed else None
        rows.append(row)
    files = {name: digest([zoo.HERE / "prompts" / f"{name}.jsonl"]) for name in SETS}
    source = provenance(str(zoo.target_dir()), str(zoo.draft_dir()), files, command)
    return {
        "rows": rows,
        "provenance": source | {"neighbours": neighbours.share(), "processor_time": options.processor_time},
    }


def table(results: Mapping[str, Any]) -> str:
    """Tabulate the results, with one row for each format."""
    heads = [
        "weights", "MB", "plain, tokens/s", "over float16", f"with the draft model, K={DRAFT_TOKENS}",
        "over float16 plain", "accepted", "perplexity, code", "perplexity, edits",
    ]  # fmt: skip
    body = [
        [
            row["kind"].upper(), f"{sum(row['stored'].values()) / 1e6:.1f}",
            f"{row['plain']['tokens_per_second']['median']:.0f}", interval(Estimate(**row["plain"]["speedup"])),
            f"{row['draft']['tokens_per_second']['median']:.0f}", interval(Estimate(**row["draft"]["speedup"])),
            percent(row["acceptance_rate"]), *(f"{row['perplexity'][name]:.3f}" for name in SETS),
        ]
        for row in results["rows"]
    ]  # fmt: skip
    return rows(heads, body)


def compared(results: Mapping[str, Any]) -> str:
    """Describe for each format the loss of the held-out texts, and how the weights are stored."""
    base, said = results["rows"][0], []
    for row in results["rows"][1:]:
        losses, base_losses = ([x for name in SETS for x in one["losses"][name]] for one in (row, base))
        change = estimate_ratio([x for x, _ in losses], [x for x, _ in base_losses])
        total = sum(row["stored"].values())
        kinds = ", ".join(
            f"{percent(size / total)} {kind}" for kind, size in sorted(row["stored"].items(), key=lambda item: -item[1])
        )
        said.append(
            f"{row['kind'].upper()} ({kinds} of the bytes): the negative log-likelihood of the {len(losses)} texts is "
            f"{change.value:.4f} times that of {base['kind'].upper()} ({ends(change, '{:.4f}'.format, ' to ')})."
        )
    if results["provenance"]["processor_time"]:
        said.append("Tokens per second of processor time of one thread, because the machine had other work.")
    return " ".join(said)


def main(words: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.precision", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts of each set whose speed is measured")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="run one thread and measure its processor time instead of wall time, for a machine with other work",
    )
    parser.add_argument("--json", action="store_true", help="print all results as JSON instead of the table")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        command = ["python", "-m", "benchmarks.gguf.precision", *(sys.argv[1:] if words is None else words)]
        results = measure(options, command, Path(folder))
    print(json.dumps(results) if options.json else f"{table(results)}\n\n{compared(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
