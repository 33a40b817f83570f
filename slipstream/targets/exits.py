"""Measure early exits: how often each agrees with the whole model, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import EarlyExit
from slipstream.theory.closed_forms import best_gamma, speedup

STARTS, TOKENS, REPEATS = 4, 32, 9


@dataclass(frozen=True)
class Exit:
    """layers     how many layers run before the exit.
    agreement  share of positions of a greedy text at which its argmax is the whole model's: alpha.
    cost       of one draft token in units of one decode step: drafting it through this exit, plus one more row in the
               later layers to verify it. The c of the closed forms.
    """

    layers: int
    agreement: float
    cost: float

    @property
    def gamma(self) -> int:
        """Draft length with the greatest expected speed-up, at least 1."""
        return max(1, best_gamma(self.agreement, self.cost))

    @property
    def speedup(self) -> float:
        """Expected at that length (Leviathan et al. 2211.17192, theorem 3.8). The formula counts a whole pass for
        verification. Here the first layers run once for each draft token, the last one included, so their weights are
        read as often as in a separate pass: rows are saved, not weight reads."""
        return speedup(self.agreement, self.gamma, self.cost)


def measure_exits(target: EarlyExit, text: Seq[int] | None = None) -> list[Exit]:
    """Every exit of `target`, 1..layers-1.

    text  token ids to measure agreement on, at least 2; None: greedy texts of the target after a few single tokens.

    Takes a few dozen steps and one pass per layer; running sequences are not touched. Costs are interpolated linearly
    between one layer and all, and are at least the share of the layers: timed alone, a single layer may stay in the
    processor's cache, which it does not while the model decodes. Raises what running the target raises.
    """
    texts = [list(text)[: target.max_pending]] if text is not None else _own_texts(target)
    layers = target.layers
    agree, count = [0] * (layers + 1), 0
    for tokens in texts:
        seq, rest = Sequence(tokens[:1]), Draft.chains([tokens[1:]], device=target.device)
        hidden, picks = None, []
        try:
            for i in range(layers):
                out = target.run([seq], rest, layers=(i, i + 1), hidden=hidden)
                picks.append(out.logits.argmax(-1))  # [n]
                hidden = out.hidden[i + 1].clone()  # [n, d]
        finally:
            target.release(seq.id)
        for i in range(layers):
            agree[i + 1] += int((picks[i] == picks[-1]).sum())
        count += len(tokens)
    first, whole, row = _seconds(target)
    each = max(0.0, whole - first) / (layers - 1) if layers > 1 else 0.0

    def cost(e: int) -> float:
        draft = max((first + (e - 1) * each) / whole, e / layers)
        return min(1.0, draft + row / whole * (1 - e / layers))

    return [Exit(e, agree[e] / count, cost(e)) for e in range(1, layers)]


def _own_texts(target: EarlyExit) -> list[list[int]]:
    length = max(2, min(TOKENS, target.max_pending, target.context))
    seqs = [Sequence([(2 * i + 1) * target.vocab_size // (2 * STARTS)]) for i in range(STARTS)]
    try:
        while len(seqs[0].tokens) < length:
            logits = target.run(seqs, Draft.empty(STARTS, target.device)).logits
            target.commit(seqs, [[]] * STARTS)
            for seq, token in zip(seqs, logits.argmax(-1).tolist(), strict=True):
                seq.kv_len = len(seq.tokens)
                seq.tokens.append(token)
        return [seq.tokens for seq in seqs]
    finally:
        for seq in seqs:
            target.release(seq.id)


def _seconds(target: EarlyExit) -> tuple[float, float, float]:
    """Minimum seconds of one token through the first layer and through all, and of each further row; interleaved. The
    minimum of several repetitions is least affected by other load on the machine."""
    seq, more = Sequence([0]), 4
    one, several = Draft.empty(1, target.device), Draft.chains([[0] * more], device=target.device)
    kinds: list[tuple[tuple[int, int] | None, Draft]] = [((0, 1), one), (None, one), (None, several)]
    times: list[list[float]] = [[] for _ in kinds]
    try:
        for index in range(REPEATS + 1):
            for (layers, draft), spent in zip(kinds, times, strict=True):
                began = perf_counter()
                target.run([seq], draft, layers=layers)
                if target.device.type == "cuda":
                    torch.cuda.synchronize(target.device)
                if index:  # the first repetition binds buffers and packs weights
                    spent.append(perf_counter() - began)
    finally:
        target.release(seq.id)
    first, whole, wide = map(min, times)
    return min(first, whole), whole, max(0.0, wide - whole) / more
