"""Measures what a reduced draft vocabulary of an MTP layer gains and costs. Times are measured with the shapes of
Qwen3.5-0.8B and Qwen3.5-4B and random weights in 4 bits; tokens are counted in texts of other data sets.

    python -m benchmarks.draft_vocabulary --data FOLDER [--rounds 30] [--draft 3] [--only Qwen3.5-0.8B]

Gain: the time of a draft token, of a pass over one row (plain decoding) and of a pass over a draft and its pending
token are measured interleaved. `break_even` is the acceptance rate at which a step with a draft is as fast as plain
decoding. `speed` is the speed over plain decoding at an acceptance rate of 0.8. `may_miss` is the share of tokens that
a reduced vocabulary may lack before it is slower than the complete vocabulary, if the acceptance rate falls from 0.8 by
this share.

Cost: tokens outside the reduced vocabulary cannot be drafted. Their share is counted with SmolLM2's tokenizer, for the
same shares of its vocabulary. FOLDER has `spec_bench/question.jsonl` and `humaneval/HumanEval.jsonl`. Tokens are
counted in every second prompt, for four vocabularies: the first ids; the most frequent tokens of Slipstream's own
source and documentation; the most frequent tokens of the other prompts; and the first ids with all earlier tokens of
the text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gguf.random_models import SHAPES
from benchmarks.markdown import document, noise, run_of
from benchmarks.protocol import ROOT, THREADS
from benchmarks.recurrent_passes import random_executor, random_weights, run
from slipstream import zoo
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.native.native_heads import NativeMtp
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.executor.executor import Batch
from slipstream.measure.provenance import OtherProcesses, commit, machine, now, public
from slipstream.tokens.text import load_tokenizer

MODELS = ("Qwen3.5-0.8B", "Qwen3.5-4B")
CUTS = (None, 65536, 32768, 8192)
"""Sizes of the draft vocabulary; None: all ids."""
PAST, ACCEPTED = 200, 0.8


def tokens_per_step(accepted: float, draft: int) -> float:
    """Return the expected number of tokens per step if each draft token is accepted with the probability `accepted`."""
    return sum(accepted**i for i in range(draft + 1))


def least_accepted(tokens: float, draft: int) -> float:
    """Return the probability of acceptance at which a step yields `tokens` tokens; 1 if no probability is high
    enough."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, draft) < tokens else (low, middle)
    return high


Heads = dict[int | None, NativeMtp]
"""MTP layers by the size of their draft vocabulary."""


def packed(shape: Mapping[str, Any], cuts: Seq[int | None] = CUTS) -> tuple[NativeExecutor, Heads]:
    """Make a target of this shape, and its MTP layer with each size of the draft vocabulary."""
    executor = random_executor({"max_position_embeddings": 32768, **shape, "tie_word_embeddings": True})
    config, fmt = executor.config.mtp_layer(sparse=False), LoadSettings(quantize="int4").weight_format
    tables = executor.packed_tables
    return executor, {cut: NativeMtp(config, random_weights(config), tables, None, fmt, cut) for cut in cuts}


def times(executor: NativeExecutor, heads: Heads, rounds: int, draft: int) -> dict[str, Any]:
    """Return median seconds of a pass over one row, of a pass over a draft, and of a draft token with each
    vocabulary."""
    config, cuts = executor.config, tuple(heads)
    run(executor, 0, PAST)
    hidden = torch.randn(PAST + 1, config.hidden_size, generator=torch.Generator().manual_seed(1))
    for head in heads.values():
        head.extend(Batch((1,), torch.arange(PAST), range(PAST), (0, PAST), (0,), (None,), (PAST - 1,)), hidden[:PAST])
    last = Batch((1,), torch.tensor([7]), (PAST,), (0, 1), (PAST,), (None,), (0,))
    took: dict[Any, list[float]] = {}

    def timed(what: Any, call: Callable[[], object]) -> None:
        began = perf_counter()
        call()
        took.setdefault(what, []).append(perf_counter() - began)

    for number in range(rounds):
        for cut in (*cuts[number % len(cuts) :], *cuts[: number % len(cuts)]):
            timed(cut, lambda cut=cut: heads[cut].decode_steps(last, hidden[PAST:], draft))  # type: ignore[misc]
            timed("verify", lambda: run(executor, PAST, draft + 1))
            timed("plain", lambda: run(executor, PAST, 1))
    plain, verify = (statistics.median(took[what]) for what in ("plain", "verify"))
    rows, expected = [], tokens_per_step(ACCEPTED, draft)
    for cut in cuts:
        low, each, high = (x / draft for x in statistics.quantiles(took[cut], n=4))
        cost = (verify + draft * each) / plain
        rows.append({
            "ids": cut or config.vocab_size, "draft_token": each, "quartiles": [low, high], "cost": cost,
            "break_even": least_accepted(cost, draft), "speed": expected / cost,
        })  # fmt: skip
        rows[-1]["may_miss"] = 1 - least_accepted(expected * cost / rows[0]["cost"], draft) / ACCEPTED
    bytes_of = {"target": executor.memory()["weights"], "layer": heads[cuts[0]].memory()["weights"]}
    return {"plain": plain, "verify": verify, "bytes": bytes_of, "cuts": rows}


def texts(data: Path) -> dict[str, list[str]]:
    """Return the texts of each kind. Texts of code include the solutions."""
    found: dict[str, list[str]] = {}
    for line in (data / "spec_bench" / "question.jsonl").read_text(encoding="utf-8").splitlines():
        each = json.loads(line)
        kind = each["category"] if each["category"] in KINDS else "chats"
        found.setdefault(kind, []).append("\n".join(each["turns"]))
    lines = (data / "humaneval" / "HumanEval.jsonl").read_text(encoding="utf-8").splitlines()
    found["code"] = [each["prompt"] + each["canonical_solution"] for each in map(json.loads, lines)]
    return found


KINDS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def missed(data: Path, shares: Iterable[float]) -> dict[str, Any]:
    """Count the share of the texts' tokens that vocabularies with these shares of all ids cannot draft."""
    tokenizer = load_tokenizer(zoo.smollm2_file())
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("slipstream/**/*.py")]
    own = Counter(id_ for file in files for id_ in tokenizer.encode(file.read_text(encoding="utf-8")))
    ids = {kind: [tokenizer.encode(text) for text in each] for kind, each in texts(data).items()}
    half = Counter(id_ for each in ids.values() for text in each[::2] for id_ in text)
    vocab, rows = len(tokenizer), []
    for share in shares:
        size = round(share * vocab)
        kept = {"first ids": set(range(size)), "own text": most_common(own, size), "prompts": most_common(half, size)}
        for way, drafted in kept.items():
            lost = {kind: sum(id_ not in drafted for text in each[1::2] for id_ in text) for kind, each in ids.items()}
            rows.append({"share": share, "ids": size, "way": way, "lost": lost})
        new = {kind: sum(len(set(text) - kept["first ids"]) for text in each[1::2]) for kind, each in ids.items()}
        rows.append({"share": share, "ids": size, "way": "first ids and the text so far", "lost": new})
    counted = {kind: sum(map(len, each[1::2])) for kind, each in ids.items()}
    return {"vocab": vocab, "tokens": counted, "occurring": {"own text": len(own), "prompts": len(half)}, "cuts": rows}


def most_common(counts: Counter[int], size: int) -> set[int]:
    """Return the `size` most frequent ids. If fewer ids occur, the first of the other ids are added."""
    chosen = {id_ for id_, _ in counts.most_common(size)}
    rest = (id_ for id_ in range(max(counts) + size) if id_ not in chosen)
    while len(chosen) < size:
        chosen.add(next(rest))
    return chosen


def heading(results: dict[str, Any]) -> list[str]:
    return [
        "# A reduced draft vocabulary", "",
        f"{run_of(results['provenance'])}; random weights in 4 bits, after {PAST} tokens, drafts of "
        f"{results['draft']}. Speed: over plain decoding, if {ACCEPTED:.0%} of draft tokens are accepted. May miss: "
        "share of tokens that a cut may leave out before the whole vocabulary is faster.",
    ]  # fmt: skip


def gains(results: dict[str, Any]) -> list[str]:
    lines = [
        "| shape | ids | ms a draft token | ms plain | ms to verify | accepted to break even | speed | may miss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in results["times"].items():
        lines += [
            f"| {name} | {row['ids']:,} | {row['draft_token'] * 1e3:.2f} | {each['plain'] * 1e3:.1f} "
            f"| {each['verify'] * 1e3:.1f} | {row['break_even']:.2f} | {row['speed']:.2f}x | {row['may_miss']:.1%} |"
            for row in each["cuts"]
        ]
    return lines


def costs(results: dict[str, Any]) -> list[str]:
    counted = results["missed"]["tokens"]
    lines = [
        f"Share of tokens that a cut cannot draft, SmolLM2's tokenizer ({results['missed']['vocab']:,} ids), "
        f"{sum(counted.values()):,} tokens.", "",
        f"| share of the ids | ids | chosen by | all | {' | '.join(counted)} |",
        f"| --- | --- | --- | {' | '.join(['---:'] * (1 + len(counted)))} |",
    ]  # fmt: skip
    for row in results["missed"]["cuts"]:
        shares = [sum(row["lost"].values()) / sum(counted.values()), *(row["lost"][x] / n for x, n in counted.items())]
        parts = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {row['share']:.1%} | {row['ids']:,} | {row['way']} | {parts} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--draft", type=int, default=3, help="draft tokens of a step")
    parser.add_argument("--only", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options, neighbours = parser.parse_args(), OtherProcesses()
    timed = {name: times(*packed(SHAPES[name].config), options.rounds, options.draft) for name in options.only}
    write(options, timed, neighbours.share())


def write(options: argparse.Namespace, timed: dict[str, Any], neighbours: float | None) -> None:
    vocab, command = SHAPES[MODELS[0]].config["vocab_size"], ["python -m benchmarks.draft_vocabulary", *sys.argv[1:]]
    source = {"date": now(), "command": public(" ".join(command)), "commit": commit(), "machine": machine()}
    results = {
        "schema": 1, "provenance": source | {"threads": THREADS, "neighbours": neighbours}, "draft": options.draft,
        "times": timed, "missed": missed(options.data, [cut / vocab for cut in CUTS if cut]),
    }  # fmt: skip
    file = options.out / "draft-vocabulary.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    file.with_suffix(".md").write_text(document(results, [heading, noise, gains, costs]))
    print(file.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
