"""Compares two greedy texts, and tests whether rounding can explain a difference.

In float32 a row of logits rounds differently if other rows are computed in the same pass. If the logits of the target's
two most likely tokens differ by less than this rounding, either token may win. Such a near-tie is always reported; any
other difference is a bug.
"""

from collections.abc import Callable, Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import count_common
from slipstream.core.target import Target, release_after, start_sequence
from slipstream.measure.measurements import Divergence

Scores = Callable[[Tensor, Seq[int]], Tensor]
"""(logits [V], earlier output) -> scores [V]; the index of the first maximum is the next token."""


def find_divergence(
    target: Target,
    prompt: Seq[int],
    plain: Seq[int],
    other: Seq[int],
    rows: int = 5,
    scores: Scores = lambda logits, output: logits,
) -> Divergence | None:
    """Find the first difference between the outputs of plain decoding and of another method; None if they are equal.

    rows    number of rows that one pass of the other method verified.
    scores  computes the scores whose maximum is the next token, if these are not the logits.
    """
    if list(plain) == list(other):
        return None
    position = count_common(plain, other)
    alone, among, prefilled = (
        scores(_logits(target, prompt, plain[:position], n), plain[:position]) for n in (0, rows - 1, None)
    )  # [V] each
    noise = max(distance(alone, row) for row in (among, prefilled))
    taken = alone[other[position]] if position < min(len(plain), len(other)) else alone.topk(2).values[1]
    return Divergence(position, float(alone.max() - taken), noise)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest |a - b| of two rows of scores. An entry that is -inf in both rows counts as 0, an entry that
    is -inf in one row as infinite."""
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


def _logits(target: Target, prompt: Seq[int], output: Seq[int], extra: int | None) -> Tensor:
    """Return the target's logits [V] after an output. The last token is run in one pass with `extra` draft tokens, or,
    if `extra` is None, in one pass with the prompt and the whole output."""
    unended = SamplingParams(max_tokens=target.context)  # some models end a text at its limit by force
    with release_after(target, start_sequence(target, prompt, context=target.context, params=unended)) as seq:
        seq.tokens += output
        tokens = list(seq.tokens)
        if extra is not None and len(tokens) > 1:
            seq.tokens = tokens[:-1]
            target.run([seq], Draft.empty(1, target.device))
            target.commit([seq], [[]])
            seq.kv_len = len(seq.tokens)
            seq.tokens = tokens
        room = max(0, min(extra or 0, target.context - len(tokens)))
        out = target.run([seq], Draft.chains([[int(tokens[-1])] * room], device=target.device))
        return out.logits[0].to(torch.float64).clone()
