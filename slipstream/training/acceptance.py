"""Simulated acceptance length: an estimate of what decoding would measure, from one forward pass over finished text.

Take text that the target wrote at some temperature. Let c[i, j] be the probability, *given that text*, that draft token
j of a draft that starts after token i is accepted if all draft tokens before it are. Speculative sampling accepts a
draft token x ~ q with probability min(1, p(x) / q(x)), so "draft token j is x and is accepted" has probability
min(p(x), q(x)). Given that the text has x at that position,

    c[i, j] = min(1, q(x) / p(x))                    for a sampled draft token
    c[i, j] = 1 if the draft token is x, else 0      for a point mass (and for every draft token at temperature 0)

Later draft tokens are conditioned on the text. This is correct: they only matter if all before them are accepted, and
then the text is what was drafted. The steps form a renewal process over the text: a step that starts after token i and
accepts m draft tokens makes the next one start after i + m + 1. One pass over the text gives the expected number of
steps, and

    tau = tokens / steps

is an unbiased estimate of what `SpecStats.mean_acceptance_length` measures on that text, prefill step included.
Averaging accepted lengths over all positions would be biased, because decoding does not start at every position: it
skips the easy ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.core.warp import warp
from slipstream.llm import LLM
from slipstream.training.features import Teacher, Window
from slipstream.training.packing import Stream, write_masked
from slipstream.training.regenerate import prompts_of


@dataclass(frozen=True)
class Written:
    """A text that the target wrote.

    tokens  prompt and output. prompt: number of prompt tokens. limit: the maximum length of `tokens`.
    """

    tokens: list[int]
    prompt: int
    limit: int


@dataclass(frozen=True)
class HeldOutText:
    """Texts written at one temperature. `tokens`: int64 [R, L], padded with 0."""

    texts: list[Written]
    temperature: float

    @property
    def tokens(self) -> Tensor:
        longest = max(len(t.tokens) for t in self.texts)
        return torch.tensor([t.tokens + [0] * (longest - len(t.tokens)) for t in self.texts])


def write_texts(
    llm: LLM, stream: Stream, temperature: float, prompts: int, prompt_tokens: int, new_tokens: int, seed: int
) -> HeldOutText:
    """Let the target continue prefixes of a stream's documents (`prompts_of`)."""
    lengths, longest = (prompt_tokens, prompt_tokens), llm.target.context // 2
    asked = prompts_of(stream, np.random.default_rng([seed, 13]), prompts, lengths, longest)
    params = [SamplingParams(temperature=temperature, max_tokens=new_tokens, seed=seed + i) for i in range(len(asked))]
    done = llm.generate(asked, params)
    texts = [
        Written([*c.prompt_token_ids, *c.token_ids], len(p), min(llm.target.context, len(p) + new_tokens))
        for p, c in zip(asked, done, strict=True)
    ]
    return HeldOutText(texts, temperature)


def save_texts(path: Path, text: HeldOutText, vocab_size: int) -> None:
    """Write a stream in which the output of each text is marked as an answer."""
    marked = [(t.tokens, [i >= t.prompt for i in range(len(t.tokens))]) for t in text.texts]
    write_masked(path, marked, None, vocab_size)


def load_texts(path: Path, new_tokens: int, context: int, temperature: float) -> HeldOutText:
    """What `save_texts` wrote of texts with at most so many new tokens."""
    texts = []
    for tokens, mask in Stream.open(path, whole=True).documents():
        prompt = len(tokens) - sum(mask or ())
        texts.append(Written(tokens, prompt, min(context, prompt + new_tokens)))
    return HeldOutText(texts, temperature)


def acceptance_probs(
    q: Tensor, p: Tensor, tokens: Tensor, temperature: float, draft_ids: Tensor | None = None
) -> Tensor:
    """Probability that each sampled draft token is accepted, given that the target wrote `tokens`.

    q [..., V'], p [..., V]: draft and target logits at the same positions; tokens [...] -> [...], float64.
    draft_ids: the tokens as draft vocabulary ids, -1 for ids outside the draft vocabulary; None if V' = V.
    """
    draft_ids = tokens if draft_ids is None else draft_ids
    if temperature == 0:
        return (q.argmax(-1) == draft_ids).double()
    params = SamplingParams(temperature=temperature)
    draft_probs = warp(q.reshape(-1, q.shape[-1]), params).gather(1, draft_ids.reshape(-1, 1).clamp(min=0))  # [M, 1]
    target_probs = warp(p.reshape(-1, p.shape[-1]), params).gather(1, tokens.reshape(-1, 1))  # [M, 1]
    accepted = (draft_probs / target_probs).clamp(max=1.0).nan_to_num(0.0).reshape(tokens.shape).double()
    return accepted * (draft_ids >= 0)


def expected_steps(probs: Tensor, text: Written) -> float:
    """Expected number of steps that generate a text, prefill included.

    probs: [L, K], row i: acceptance probabilities of the draft tokens after token i.
    """
    table, depth = probs.tolist(), probs.shape[1]
    end = len(text.tokens)
    visits = [0.0] * (end + 1)
    visits[text.prompt] = 1.0  # the prefill step wrote the first token
    steps = 1.0
    for i in range(text.prompt, end - 1):  # token i is the last known one; at end - 1 the text is complete
        if (here := visits[i]) == 0.0:
            continue
        steps += here
        reached = 1.0  # probability that all draft tokens so far are accepted
        for j in range(min(depth, text.limit - i - 2)):  # the last token before the limit needs no draft token
            if i + 1 + j >= end:
                break
            kept = reached * table[i][j]
            visits[min(end, i + 1 + j)] += here * (reached - kept)
            reached = kept
        else:
            j = min(depth, text.limit - i - 2)
            visits[min(end, i + 1 + j)] += here * reached
    return steps


MAX_WINDOW_PROBS = 2**25
"""Most probabilities in one window of texts: keeps memory bounded for large vocabularies."""


def held_windows(text: HeldOutText, teacher: Teacher, taps: Seq[int]) -> list[Window]:
    """The texts with the target's hidden states, computed once for all evaluations of a run; their output counts."""
    tokens = text.tokens
    place = torch.arange(tokens.shape[1])
    output = torch.stack([(t.prompt <= place) & (place < len(t.tokens)) for t in text.texts])  # bool [R, L]
    rows = max(1, min(16, MAX_WINDOW_PROBS // (tokens.shape[1] * teacher.config.vocab_size)))
    return [
        Window(part.to(teacher.device), output[i : i + rows].to(teacher.device), teacher.read(part, taps))
        for i, part in zip(range(0, len(tokens), rows), tokens.split(rows), strict=True)
    ]


def acceptance_length(of: Callable[[Window], Tensor], heldout: HeldOutText, windows: Seq[Window]) -> float:
    """Simulated tau: generated tokens divided by the expected number of steps.

    of: window [R, L] -> acceptance probabilities [R, L, K], row i for the draft tokens after token i (see
        `acceptance_probs`).
    """
    texts = iter(heldout.texts)
    tokens, steps = 0, 0.0
    for window in windows:
        for probs in of(window).cpu():
            text = next(texts)
            tokens += len(text.tokens) - text.prompt
            steps += expected_steps(probs, text)
    return tokens / steps
