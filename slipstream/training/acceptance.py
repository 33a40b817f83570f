"""Simulated acceptance length: what decoding would measure, from one forward over finished text.

Take text that the target itself wrote under some temperature, and let c[i, j] be the chance that guess j of a draft
which starts behind token i stands, *given that text*, if all guesses before it do. Speculative sampling accepts a
guess x ~ q with probability min(1, p(x) / q(x)), so the chance of "guess j is accepted and is x" is min(p(x), q(x)),
and given that the text has x there, it is

    c[i, j] = min(1, q(x) / p(x))              a sampled guess
    c[i, j] = 1 if the guess is x, else 0      a point mass (and every guess at temperature 0)

Later guesses are conditioned on the text, which is right: they only matter if all before them stand, and then the
text is what was drafted. Rounds then form a renewal process over the text: a round that starts behind token i and
keeps m guesses makes the next one start behind i + m + 1. Its expected number of rounds follows by one sweep, and

    tau = tokens / rounds

is an unbiased estimate of what `SpecStats.mean_acceptance_length` measures on such text, prefill round included.
Averaging accepted lengths over all positions instead would be biased: decoding does not start at every position, it
skips over the easy ones.
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
from slipstream.training.packing import Stream


@dataclass(frozen=True)
class Written:
    """A text that the target wrote: `tokens`, of which the first `prompt` were given to it; `limit`: how long it might
    have become."""

    tokens: list[int]
    prompt: int
    limit: int


@dataclass(frozen=True)
class HeldOutText:
    """Texts written under one temperature, padded: tokens int64 [R, L]."""

    texts: list[Written]
    temperature: float

    @property
    def tokens(self) -> Tensor:
        longest = max(len(t.tokens) for t in self.texts)
        return torch.tensor([t.tokens + [0] * (longest - len(t.tokens)) for t in self.texts])


def write_texts(
    llm: LLM, stream: Stream, temperature: float, prompts: int, prompt_tokens: int, new_tokens: int, seed: int
) -> HeldOutText:
    """Continue prompts cut from a stream with the target itself.

    A document with answers is continued where its first answer begins; any other behind at most `prompt_tokens`.
    """
    rng = np.random.default_rng([seed, 13])
    count = len(stream.starts) - 1
    picked = rng.permutation(count)[: 4 * prompts].tolist()
    asked: list[list[int]] = []
    for d in picked:
        start, end = int(stream.starts[d]), int(stream.starts[d + 1])
        cut = prompt_tokens
        if stream.mask is not None and stream.mask[start:end].any():
            cut = int(np.argmax(stream.mask[start:end]))
        ids = stream.tokens[start : min(start + cut, end - 1)].tolist()[-(llm.target.context // 2) :]
        if len(ids) >= 2:
            asked.append(ids)
    while len(asked) < prompts and len(stream.tokens) > prompt_tokens + 1:  # few documents: prompts from within them
        at = int(rng.integers(0, len(stream.tokens) - prompt_tokens))
        asked.append(stream.tokens[at : at + prompt_tokens].tolist())
    asked = asked[:prompts]
    params = [SamplingParams(temperature=temperature, max_tokens=new_tokens, seed=seed + i) for i in range(len(asked))]
    done = llm.generate(asked, params)
    texts = [
        Written([*c.prompt_token_ids, *c.token_ids], len(p), min(llm.target.context, len(p) + new_tokens))
        for p, c in zip(asked, done, strict=True)
    ]
    return HeldOutText(texts, temperature)


def save_texts(path: Path, held: HeldOutText) -> None:
    lengths = np.array([[len(t.tokens), t.prompt, t.limit] for t in held.texts], dtype=np.int64)
    flat = np.concatenate([np.asarray(t.tokens, dtype=np.int64) for t in held.texts])
    with path.open("wb") as file:
        np.savez(file, lengths=lengths, tokens=flat, temperature=held.temperature)


def load_texts(path: Path) -> HeldOutText:
    with np.load(path) as found:
        ends = found["lengths"][:, 0].cumsum()
        texts = [
            Written(found["tokens"][end - n : end].tolist(), int(prompt), int(limit))
            for end, (n, prompt, limit) in zip(ends, found["lengths"], strict=True)
        ]
        return HeldOutText(texts, float(found["temperature"]))


def chances(q: Tensor, p: Tensor, tokens: Tensor, temperature: float, own: Tensor | None = None) -> Tensor:
    """Chance of each sampled guess to stand, given that `tokens` is what the target wrote.

    q [..., V'], p [..., V]: logits of the draft and of the target at the same places; tokens [...] -> [...], float64.
    own: the tokens as the draft numbers them, -1 for ids that it cannot guess; None if V' = V.
    """
    own = tokens if own is None else own
    if temperature == 0:
        return (q.argmax(-1) == own).double()
    probs = SamplingParams(temperature=temperature)
    drawn = warp(q.reshape(-1, q.shape[-1]), probs).gather(1, own.reshape(-1, 1).clamp(min=0))  # [M, 1]
    wanted = warp(p.reshape(-1, p.shape[-1]), probs).gather(1, tokens.reshape(-1, 1))  # [M, 1]
    chance = (drawn / wanted).clamp(max=1.0).nan_to_num(0.0).reshape(tokens.shape).double()
    return chance * (own >= 0)


def expected_rounds(chance: Tensor, text: Written) -> float:
    """Expected rounds to write a text, prefill included.

    chance: [L, K], row i: the guesses of a draft that starts behind token i.
    """
    table, depth = chance.tolist(), chance.shape[1]
    end = len(text.tokens)
    visits = [0.0] * (end + 1)
    visits[text.prompt] = 1.0  # the prefill round wrote the first token
    rounds = 1.0
    for i in range(text.prompt, end - 1):  # token i is the last one known; at end - 1 all are
        if (here := visits[i]) == 0.0:
            continue
        rounds += here
        stands = 1.0
        for j in range(min(depth, text.limit - i - 2)):  # the last token before the limit needs no guess
            if i + 1 + j >= end:
                break
            kept = stands * table[i][j]
            visits[min(end, i + 1 + j)] += here * (stands - kept)
            stands = kept
        else:
            j = min(depth, text.limit - i - 2)
            visits[min(end, i + 1 + j)] += here * stands
    return rounds


LAWS = 2**25
"""Numbers in the laws of one window of texts: so many that a large vocabulary does not fill the memory."""


def held_windows(held: HeldOutText, teacher: Teacher, taps: Seq[int]) -> list[Window]:
    """The texts with the target's states, made once for all evaluations of a run."""
    tokens = held.tokens
    rows = max(1, min(16, LAWS // (tokens.shape[1] * teacher.config.vocab_size)))
    parts = [tokens[i : i + rows] for i in range(0, len(tokens), rows)]
    read = (teacher.read(part, taps) for part in parts)
    return [
        Window(part.to(teacher.device), torch.ones_like(part, dtype=torch.bool), taps)
        for part, taps in zip(parts, read, strict=True)
    ]


def acceptance_length(of: Callable[[Window], Tensor], held: HeldOutText, windows: Seq[Window]) -> float:
    """Simulated tau: tokens written over expected rounds, under the chain of guesses whose chances `of` gives.

    of: window [R, L] -> [R, L, K], row i the guesses of a draft that starts behind token i (see `chances`).
    """
    texts = iter(held.texts)
    made, rounds = 0, 0.0
    for window in windows:
        for chance in of(window).cpu():
            text = next(texts)
            made += len(text.tokens) - text.prompt
            rounds += expected_rounds(chance, text)
    return made / rounds
