"""Host time of the lookups: `python -m benchmarks.lookup`.

The cost of a step with a lookup, without the target: `propose` and `observe` of one sequence, for growing lengths of
history. No model runs. The streams:

    random  uniform over the vocabulary: repetitions only by chance
    code    Python source of the standard library, split into words and punctuation

Reported are median and 95th percentile of the wall time that a step spends in the drafter, over `--steps` steps; the
processor time of a step, including verification of its draft tokens; the memory of the store at that history (by
`tracemalloc`, in a separate pass); and the machine.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import sysconfig
import tracemalloc
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

import torch

from slipstream.bench.provenance import machine
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.suffix import SuffixDrafter

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}
HISTORY = (1_000, 10_000, 100_000)
VOCABULARY = 8192
NOTHING = TargetOut(torch.empty(0, VOCABULARY))  # these drafters do not look at logits


@dataclass(frozen=True)
class Cell:
    """One drafter on one stream at one length of history; seconds a step, and bytes."""

    drafter: str
    stream: str
    history: int
    median: float
    p95: float
    cpu: float
    tokens: float
    memory: int


def uniform(n: int, seed: int = 1) -> list[int]:
    """n ids drawn uniformly."""
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(n)]


def code(n: int) -> list[int]:
    """n ids of words and punctuation of the standard library, file by file in the order of their names."""
    ids: dict[str, int] = {}
    out: list[int] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for word in re.findall(r"\n *| +|\w+|[^\w\s]", file.read_text(encoding="utf-8", errors="replace")):
            out.append(ids.setdefault(word, len(ids)) % VOCABULARY)
        if len(out) >= n:
            break
    return (out * (n // len(out) + 1))[:n]


STREAMS: dict[str, Callable[[int], list[int]]] = {"random": uniform, "code": code}


def measure(name: str, stream: str, tokens: Seq[int], history: int, steps: int, draft_tokens: int) -> Cell:
    """`steps` steps after `history` tokens. The text is the stream: draft tokens are accepted as far as they agree with
    it."""
    drafter, seq = DRAFTERS[name](), Sequence(list(tokens[:history]))
    seq.kv_len = history - 1
    step(drafter, seq, tokens, draft_tokens)  # indexes the prompt
    times, began = [], process_time()
    while len(times) < steps and len(seq.tokens) + draft_tokens < len(tokens):
        times.append(step(drafter, seq, tokens, draft_tokens))
    cpu = (process_time() - began) / len(times)
    tracemalloc.start()
    other, again = DRAFTERS[name](), Sequence(list(tokens[:history]))
    before = tracemalloc.get_traced_memory()[0]
    other.propose([again], [draft_tokens])
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    gained = (len(seq.tokens) - history) / (len(times) + 1)
    return Cell(name, stream, history, median(times), quantiles(times, n=20)[-1], cpu, gained, memory)


def step(drafter: Drafter, seq: Sequence, tokens: Seq[int], draft_tokens: int) -> float:
    """One step in which the text continues as in `tokens`; returns the seconds in the drafter."""
    began = perf_counter()
    draft = drafter.propose([seq], [draft_tokens])
    spent = perf_counter() - began
    verdict = verify(draft, tokens[len(seq.tokens) : len(seq.tokens) + draft_tokens + 1])
    seq.advance(verdict, draft, 0)
    began = perf_counter()
    drafter.observe([seq], draft, NOTHING, verdict)
    return spent + perf_counter() - began


def verify(draft: Draft, text: Seq[int]) -> Verdict:
    """The draft tokens that agree with the text, and the token after them."""
    children, node, path = draft.children(0), -1, list[int]()
    while True:
        token = text[len(path)]
        node = next((i for i in children.get(node, ()) if draft.ids[i] == token), -1)
        if node < 0:
            return Verdict([path], [token], [None], [False])
        path.append(node)


def table(cells: Seq[Cell]) -> str:
    rows = ["| drafter | stream | history | median µs | p95 µs | CPU µs | tokens a step | store MB |", "|" + "---|" * 8]
    for c in cells:
        times = " | ".join(f"{1e6 * seconds:.1f}" for seconds in (c.median, c.p95, c.cpu))
        rows.append(f"| {c.drafter} | {c.stream} | {c.history} | {times} | {c.tokens:.2f} | {c.memory / 2**20:.1f} |")
    return "\n".join(rows)


def main(arguments: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2000, help="measured steps of each cell")
    parser.add_argument("--draft-tokens", type=int, default=8, help="maximum draft tokens per step")
    parser.add_argument("--history", type=int, nargs="+", default=HISTORY, help="tokens before the first step")
    parser.add_argument("--only", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    options = parser.parse_args(arguments)
    cells = []
    for stream, make in STREAMS.items():
        tokens = make(max(options.history) + (options.draft_tokens + 1) * (options.steps + 2))
        for history in options.history:
            cells += [
                measure(name, stream, tokens, history, options.steps, options.draft_tokens) for name in options.only
            ]
    about = machine()
    print(table(cells))
    print(f"\n{about['cpu']}, {about['cores']} cores, {about['system']}, Python {sys.version.split()[0]}")
    print(f"command: python -m benchmarks.lookup {' '.join(sys.argv[1:] if arguments is None else arguments)}".strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
