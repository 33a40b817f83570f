"""Compares perplexities of every weight format of GGUF files, on our own kernels and in llama.cpp, with the same file
and text. Also compares `quantize="int4"` with llama.cpp's Q4_K_M of the same weights.

    python -m benchmarks.gguf.kinds --text ../shared/data/spec_bench/question.jsonl     # needs `make gguf`

llama.cpp writes the files from the weights in 16 bits, with all matrices in one format. If rows do not divide into the
256 columns of a K-quant, llama.cpp uses another format; the table shows the formats in each file. SmolLM2's rows of 576
numbers do not divide; the rows of the synthetic target of 79M parameters do. Perplexities of windows of 512 tokens may
differ by 0.5 %. The ratio has a 95 % interval, because both programs round activations in different ways. The KL
divergence of each token's distribution is measured from the weights in 16 bits, computed in float64.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy import divergences, logits
from benchmarks.derived_models import larger
from benchmarks.gguf.files import checkpoint
from benchmarks.gguf.gguf_writer import convert_to_gguf
from benchmarks.gguf.llamacpp import Scorer, faults, llama_cpp
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT, THREADS
from slipstream import zoo
from slipstream.checkpoints.gguf_header import read_header
from slipstream.targets.describe import as_target
from slipstream.tokens.text import load_tokenizer

KINDS = {
    "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 21, "Q3_K": 11, "Q4_K": 14,
    "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4": 38,
}  # fmt: skip
"""For each weight format, llama.cpp's number of such files (`llama_ftype`)."""
Score = Callable[[list[int]], Tensor]
"""Function from token ids to logits, float64 [len(tokens), V]."""
MIXTURE, NUMBER = "Q4_K_M", 15
APART, WINDOW = 0.005, 512


def text_of(path: Path) -> str:
    """Return the content of a text file, or the joined prompts of Spec-Bench or HumanEval."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    entries = map(json.loads, text.splitlines())
    return "\n\n".join(one["turns"][0] if "turns" in one else one["prompt"] for one in entries)


def written(source: Path, file: Path, number: int, pure: bool) -> str | None:
    """Let llama.cpp convert a file in 16 bits to another format. Returns why it cannot, or None. pure: all matrices get
    this format."""
    library = llama_cpp()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = number, pure, THREADS
    faults()
    if library.llama_model_quantize(str(source).encode(), str(file).encode(), params):
        return faults() or "llama.cpp gave no reason"
    return None


def losses(score: Score, windows: Seq[list[int]]) -> Tensor:
    """Return -log p of each token except the first token of each window."""
    return torch.cat(
        [torch.nn.functional.cross_entropy(score(ids)[:-1], torch.tensor(ids[1:]), reduction="none") for ids in windows]
    )


def distance(score: Score, windows: Seq[list[int]], wanted: Seq[Tensor]) -> tuple[float, float]:
    """Return (mean KL divergence in nats, share of equal argmaxes)."""
    each = [divergences(want, score(ids)) for ids, want in zip(windows, wanted, strict=True)]
    return float(torch.cat([kl for kl, _ in each]).mean()), float(torch.cat([same for _, same in each]).double().mean())


def on_kernels(file: Path, **settings: Any) -> Score:
    return partial(logits, as_target(file, executor="native", threads=THREADS, **settings))


def on_engines(file: Path) -> tuple[Score, Score]:
    """Return the functions that score tokens with a file on our own kernels, and in llama.cpp."""
    return on_kernels(file), Scorer(file, WINDOW, THREADS)


def measure(source: Path, windows: Seq[list[int]], folder: Path, only: Seq[str]) -> tuple[list[Any], list[Any], bool]:
    """Return the rows of both tables, and whether all comparisons are within their bounds. source: checkpoint in 16
    bits."""
    base, kinds, orderly = convert_to_gguf(source, folder / "base.gguf", "f16").file, list[Any](), True
    for kind, number in ((kind, KINDS[kind]) for kind in only):
        file = base if kind == "F16" else folder / "kind.gguf"
        why = None if kind == "F16" else written(base, file, number, pure=True)
        if why is not None:
            kinds.append((kind, f"not measured: {why}", "", "", ""))
            continue
        stored = read_header(file).stored
        holds = ", ".join(
            f"{size / sum(stored.values()):.0%} {name}" for name, size in sorted(stored.items(), key=lambda x: -x[1])
        )
        packed_losses, exact_losses = (losses(score, windows) for score in on_engines(file))
        apart = packed_losses - exact_losses
        mean, wide = float(apart.mean()), 1.96 * float(apart.std()) / math.sqrt(len(apart))
        orderly &= abs(math.exp(mean) - 1) <= APART
        shown = " to ".join(f"{math.exp(end):.4f}" for end in (mean - wide, mean + wide))
        each = (f"{math.exp(each.mean()):.3f}" for each in (packed_losses, exact_losses))
        kinds.append((kind, holds, *each, f"{math.exp(mean):.4f} ({shown})"))
        print(*kinds[-1], file=sys.stderr)
    exact = as_target(base, executor="torch", dtype="float64")
    wanted = [logits(exact, ids).float() for ids in windows]
    del exact
    mixture = folder / "mixture.gguf"
    why = written(base, mixture, NUMBER, pure=False)
    if why is not None:
        return kinds, [(f"{MIXTURE}: not measured: {why}", "", "")], False
    ways = {"Slipstream, quantize='int4'": on_kernels(base, quantize="int4")}
    ways |= dict(zip((f"Slipstream, {MIXTURE}", f"llama.cpp, {MIXTURE}"), on_engines(mixture), strict=True))
    distances = {name: distance(score, windows, wanted) for name, score in ways.items()}
    first, *rivals = distances.values()
    orderly &= all(first[0] <= kl for kl, _ in rivals)
    return kinds, [(name, f"{kl:.2e}", f"{100 * same:.2f} %") for name, (kl, same) in distances.items()], orderly


def main(words: Seq[str] | None = None) -> int:
    """Print both tables. Returns 1 if a format is out of its bounds, or int4 is worse than Q4_K_M."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.kinds", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="text file, or question.jsonl, HumanEval.jsonl")
    parser.add_argument("--model", choices=("smollm2", "79M"), default="smollm2")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--scored", type=int, default=2048, help="number of tokens of the text to score")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "gguf", help="where converted models are kept")
    options = parser.parse_args(words)
    small = options.model == "smollm2"
    options.files.mkdir(parents=True, exist_ok=True)
    source = checkpoint("smollm2", options.files) if small else larger(options.files)
    ids = load_tokenizer(zoo.smollm2_file() if small else source).encode(text_of(options.text))[: options.scored]
    windows = [part for at in range(0, len(ids), WINDOW) if len(part := ids[at : at + WINDOW]) > 1]
    with tempfile.TemporaryDirectory() as folder:
        kinds, distances, orderly = measure(source, windows, Path(folder), options.only)
    print(f"{options.model}, {len(ids)} tokens of {options.text.name}\n")
    print(rows(["kind", "the file holds", "Slipstream", "llama.cpp", "ratio"], kinds, (0, 1)), end="\n\n")
    print(rows(["weights in 4 bits", "KL to float64", "equal argmaxes"], distances))
    return 0 if orderly else 1


if __name__ == "__main__":
    sys.exit(main())
