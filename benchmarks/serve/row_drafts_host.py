"""Measures the host time of drafting in the vLLM plug-in, with many rows of long contexts and without an engine."""

from __future__ import annotations

import statistics
import sysconfig
import time
from pathlib import Path

from slipstream.integrations.row_drafts import Row, RowDrafts, RowRequest
from slipstream.integrations.vllm import make_lookup
from slipstream.tokens.text import load_tokenizer

ROWS, CONTEXT, STEPS, MOST = 64, 2000, 40, 16


class Text:
    """A greedy request whose output is known. Draft tokens are accepted if they equal the known output."""

    def __init__(self, number: int, tokens: list[int]):
        self.id, self.tokens, self.length, self.draft = f"row {number}", tokens, CONTEXT, list[int]()

    def step(self) -> Row:
        right = 0
        while right < len(self.draft) and self.draft[right] == self.tokens[self.length + right]:
            right += 1
        self.length += right + 1
        many = len(self.draft)
        request = RowRequest(CONTEXT, CONTEXT + 4000)
        return Row(self.id, self.length, lambda a, b: self.tokens[a:b], right + 1, many, 1 + many, lambda: request)


def texts(vocabulary: str) -> list[list[int]]:
    """Return source files of Python's library, long enough for all steps even if every draft is accepted completely."""
    tokenizer = load_tokenizer(vocabulary)
    need, texts = CONTEXT + STEPS * (MOST + 1) + MOST, list[list[int]]()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda file: -file.stat().st_size):
        ids = list(tokenizer.encode(file.read_text(encoding="utf-8")))
        texts += [ids[at : at + need] for at in range(0, len(ids) - need, need)]
        if len(texts) >= ROWS:
            return texts[:ROWS]
    raise RuntimeError("Python's library is too small")


def measure(drafter: str, vocabulary: str) -> dict[str, float]:
    """Return microseconds per row of the median step, of the first step, which reads all prompts, and of the slowest
    other step. Every row drafts its full draft length in every step. accepted: accepted draft tokens per row and
    step."""
    rows = [Text(i, ids) for i, ids in enumerate(texts(vocabulary))]
    drafts = RowDrafts(make_lookup(1 << 20, drafter), MOST, CONTEXT + 4000, timed=False)
    alive, spent, accepted = {row.id for row in rows}, [], 0
    for _ in range(STEPS):
        steps = [row.step() for row in rows]
        accepted += sum(row.gained - 1 for row in steps)
        begin = time.perf_counter()
        drafted = drafts.propose(steps, alive)
        spent.append(1e6 * (time.perf_counter() - begin) / ROWS)
        for row, draft in zip(rows, drafted, strict=True):
            row.draft = draft
    later = spent[1:]
    return {"median": statistics.median(later), "slowest": max(later), "first": spent[0],
            "accepted": accepted / ROWS / STEPS}  # fmt: skip
