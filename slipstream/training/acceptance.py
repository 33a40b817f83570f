"""Simulated acceptance length: an estimate of the mean acceptance length, from one forward pass over finished text.

Take text that the target wrote at some temperature. Let c[i, j] be the probability, *given that text*, that draft token
j of a draft after token i is accepted if all earlier draft tokens are accepted. Speculative sampling accepts a draft
token x ~ q with probability min(1, p(x) / q(x)), so "draft token j is x and is accepted" has probability
min(p(x), q(x)). Given that the text has x at that position,

    c[i, j] = min(1, q(x) / p(x))                    for a sampled draft token
    c[i, j] = 1 if the draft token is x, else 0      for a point mass (and for every draft token at temperature 0)

Later draft tokens are conditioned on the text. This is correct: a draft token only matters if all draft tokens before
it are accepted, and then the text equals the draft. The steps form a renewal process over the text: after a step that
starts after token i and accepts m draft tokens, the next step starts after token i + m + 1. One pass gives the expected
number of steps, and

    tau = tokens / steps

is an unbiased estimate of `SpecStats.mean_acceptance_length` on that text, prefill step included. An average over all
positions would be biased, because decoding does not start a draft at every position: it skips positions that are easy
to predict.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.core.warp import warp
from slipstream.llm import LLM
from slipstream.training.features import Teacher, Window
from slipstream.training.methods import RunConfig
from slipstream.training.packing import Marked, TokenStream, write_masked
from slipstream.training.regenerate import continue_prompts, draw_prompts

MAX_WINDOW_PROBS = 2**25
"""Largest number of probabilities that are computed at once; bounds the memory for large vocabularies."""


@dataclass(frozen=True)
class Written:
    """A text that the target wrote.

    tokens  prompt and output tokens. prompt: number of prompt tokens. limit: the maximum length of `tokens`.
    """

    tokens: list[int]
    prompt: int
    limit: int


@dataclass
class HeldOutText:
    """Texts written at one temperature. windows: the texts in batches, filled by `read`; only output tokens count."""

    texts: list[Written]
    temperature: float
    windows: list[Window] = field(default_factory=list)

    def read(self, teacher: Teacher, taps: Seq[int]) -> None:
        """Compute the target's hidden states, once for all evaluations of a run."""
        longest = max(len(t.tokens) for t in self.texts)
        tokens = torch.tensor([t.tokens + [0] * (longest - len(t.tokens)) for t in self.texts])  # [R, L]
        place = torch.arange(longest)
        output = torch.stack([(t.prompt <= place) & (place < len(t.tokens)) for t in self.texts])  # bool [R, L]
        rows = max(1, min(16, MAX_WINDOW_PROBS // (longest * teacher.config.vocab_size)))
        self.windows = [
            Window(part.to(teacher.device), counts.to(teacher.device), teacher.read(part, taps))
            for part, counts in zip(tokens.split(rows), output.split(rows), strict=True)
        ]

    def acceptance_length(self, of: Callable[[Window], Tensor]) -> float:
        """Return the simulated tau: generated tokens divided by the expected number of steps.

        of: function from a window [R, L] to acceptance probabilities [R, L, K]; row i is for the draft tokens after
            token i (see `acceptance_probs`).
        """
        tables = [probs for window in self.windows for probs in of(window).cpu()]
        steps = sum(expect_steps(probs, text) for probs, text in zip(tables, self.texts, strict=True))
        return sum(len(text.tokens) - text.prompt for text in self.texts) / steps


def write_held_out_text(
    llm: LLM, streams: list[TokenStream], path: Path, temperature: float, config: RunConfig, say: Callable[[str], None]
) -> HeldOutText:
    """Return texts in which the target continues prefixes of the streams' documents (`draw_prompts`). Unless an earlier
    run has done so, they are generated and written to `path`, as a stream with the outputs marked as answers."""
    context = llm.target.context
    if not path.is_file():
        say(f"the target writes {config.texts} held-out texts at temperature {temperature:g}")
        prompt, each, marked = min(config.text_prompt, context // 2), -(-config.texts // len(streams)), list[Marked]()
        for seed, stream in enumerate(streams, config.seed):
            asked = draw_prompts(stream, np.random.default_rng([seed, 13]), each, (prompt, prompt), context // 2)
            params = SamplingParams(temperature=temperature, max_tokens=config.text_tokens)
            marked += continue_prompts(llm, asked, [replace(params, seed=seed + i) for i in range(len(asked))])
        write_masked(path, marked[: config.texts], None, llm.target.vocab_size)
    texts = []
    for tokens, mask in TokenStream.open(path, whole=True).documents():
        prompt = len(tokens) - sum(mask or ())
        texts.append(Written(tokens, prompt, min(context, prompt + config.text_tokens)))
    return HeldOutText(texts, temperature)


def acceptance_probs(
    q: Tensor, p: Tensor, tokens: Tensor, temperature: float, draft_ids: Tensor | None = None
) -> Tensor:
    """Return the probability that each sampled draft token is accepted, given that the target wrote `tokens`.

    q [..., V'], p [..., V]: draft and target logits at the same positions; tokens [...] -> [...], float64. draft_ids:
    `tokens` as ids of the draft vocabulary, -1 for ids outside it; None if V' = V."""
    draft_ids = tokens if draft_ids is None else draft_ids
    if temperature == 0:
        return (q.argmax(-1) == draft_ids).double()
    params = SamplingParams(temperature=temperature)
    draft_probs = warp(q.reshape(-1, q.shape[-1]), params).gather(1, draft_ids.reshape(-1, 1).clamp(min=0))  # [M, 1]
    target_probs = warp(p.reshape(-1, p.shape[-1]), params).gather(1, tokens.reshape(-1, 1))  # [M, 1]
    accepted = (draft_probs / target_probs).clamp(max=1.0).nan_to_num(0.0).reshape(tokens.shape).double()
    return accepted * (draft_ids >= 0)


def expect_steps(probs: Tensor, text: Written) -> float:
    """Return the expected number of steps that generate a text, prefill included.

    probs: [L, K], row i: acceptance probabilities of the draft tokens after token i."""
    table, depth = probs.tolist(), probs.shape[1]
    end = len(text.tokens)
    visits = [0.0] * (end + 1)
    visits[text.prompt] = 1.0  # the prefill step wrote the first token
    steps = 1.0
    for i in range(text.prompt, end - 1):  # token i is the last known token; at end - 1 the text is complete
        reached = visits[i]  # multiplied below by the probability that all draft tokens so far are accepted
        steps += reached
        most = min(depth, text.limit - i - 2)  # the last token before the limit needs no draft token
        for j in range(most):
            kept = reached * table[i][j]
            visits[min(end, i + 1 + j)] += reached - kept
            reached = kept
        visits[min(end, i + 1 + most)] += reached
    return steps
