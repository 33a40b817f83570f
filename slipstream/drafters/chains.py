"""Chains by a causal model: what a draft model, the target's own early exit and an EAGLE head have in common.

Each guess is drawn from the model's law, warped by the request's parameters, and that law goes along as q (Leviathan
et al. 2211.17192, section 2.3); at temperature 0 the guess is the argmax, a point mass.

Where the model can decode several steps in one call, requests that ask for nothing but a temperature are drafted
that way. Our own kernel draws in float64, and hands over the laws that it drew from. A graph picks each token in
float32, by inversion of the cumulated softmax with one uniform a guess (under the rule `coupled` by Gumbel-max with the
shared noise); the same pick is then made again on the host, in float64, from the logits that the call returned and the
same numbers. As long as both agree, and they differ about once in a hundred thousand tokens, the chain is what float64
sampling would have drawn from q = softmax(logits / temperature); where they do not, the host's token is kept and the
chain ends with it, since what follows was computed behind another. So q is exactly the law that each guess was drawn
from, and where a chain ends depends on the numbers of guesses that are kept, never on those behind.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX_INV_TEMPERATURE, DecodedSteps, StepSampling
from slipstream.core.dice import invert, sample_draft_tokens
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence
from slipstream.core.warp import distributions_after, warp
from slipstream.drafters.control import Control


class Source(Protocol):
    """The model behind the chains."""

    device: torch.device
    width: int
    """Of its logits, V'; may be padded beyond the target's vocabulary, or fall short of it."""
    multi_step: bool
    """Whether `decode_steps` drafts several tokens in one call."""

    def room(self, seq: Sequence) -> int:
        """How many tokens more the model can hold behind this sequence."""
        ...

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """Logits [R, V'] behind each sequence and its chain of guesses so far, which are of one length."""
        ...

    def decode_steps(self, seqs: Seq[Sequence], steps: int, draws: StepSampling) -> DecodedSteps:
        """`steps` tokens behind each sequence in one call; see `MultiStep`. Only asked if `multi_step`."""
        ...


@dataclass
class Chain:
    """The guesses for one sequence.

    law    float64 [n, V] that each was drawn from; None: they are point masses.
    worth  float64 [n, V], how likely each guess and its rivals are to stand: the law, or for point masses the one at
           temperature 1. Only where it was asked for.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    worth: Tensor | None = None


class Chains:
    """Drafts chains with `source`.

    vocab_size  width V of the target's logits.
    sampled     False: take the likeliest token above temperature 0, too.
    weighed     whether `draw` returns the `worth` of guesses.
    """

    def __init__(self, source: Source, vocab_size: int, control: Control, sampled: bool = True, weighed: bool = False):
        self.source, self.vocab_size, self.control = source, vocab_size, control
        self.sampled, self.weighed = sampled, weighed
        self._usual = 0  # steps of the last unrolled call
        self._vocab = vocab_size if source.width > vocab_size else None  # what padding lies behind

    def draft(self, seqs: Seq[Sequence], depth: Seq[int]) -> Draft:
        """A chain of at most depth[b] guesses for each sequence."""
        chains = self.draw(seqs, depth)
        tokens = [chain.tokens for chain in chains]
        return Draft.chains(
            tokens, joint(tokens, [chain.probs for chain in chains], self.vocab_size), self.source.device
        )

    def draw(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[Chain]:
        """The chains themselves, for whoever builds on them."""
        chains = [Chain() for _ in seqs]
        # Which way a sequence is drafted may not depend on its company: the two round differently.
        bare, other = list[int](), list[int]()
        for b, seq in enumerate(seqs):
            if depth[b] > 0:
                (bare if self.source.multi_step and self._params(seq).temperature_only else other).append(b)
        for coupled in (False, True):  # numbers of two kinds
            alike = [b for b in bare if seqs[b].coupled == coupled]
            while alike:
                alike = self._in_one_call(seqs, alike, depth, chains)
        if other:
            self._token_by_token(seqs, other, depth, chains)
        return chains

    def _params(self, seq: Sequence) -> SamplingParams:
        """The parameters that its draft tokens are taken by."""
        return seq.params if self.sampled or seq.params.greedy else seq.params.as_greedy

    def _in_one_call(self, seqs: Seq[Sequence], rows: Seq[int], depth: Seq[int], chains: Seq[Chain]) -> list[int]:
        """Draft for the sequences `rows`; returns those whose context is too full for so many steps."""
        steps = self._steps([seqs[b] for b in rows], [depth[b] for b in rows])
        left = [b for b in rows if self.source.room(seqs[b]) < steps]
        rows = [b for b in rows if b not in left]
        own = [seqs[b] for b in rows]
        each = [self._params(seq) for seq in own]
        draws = self._draws(own, each, steps)
        drawn = self.source.decode_steps(own, steps, draws)
        tokens = drawn.tokens.T.tolist()  # [R][K]
        for r, b in enumerate(rows):
            most, chain, probs = depth[b], tokens[r], None
            raw = drawn.logits[:most, r, : self.vocab_size]  # [K, V]
            if not each[r].greedy:
                own_probs = warp(raw, each[r]) if drawn.probs is None else drawn.probs[:most, r, : self.vocab_size]
                probs = widened(own_probs, self.vocab_size)
                if drawn.probs is None:
                    chain = self._again(probs, raw, draws, r, each[r])
                    most = next((n for n in range(1, most) if chain[n - 1] != tokens[r][n - 1]), most)
            worth = probs
            if probs is None and (self.weighed or self.control.kind != "fixed"):
                worth = widened(torch.softmax(raw.double(), -1), self.vocab_size)
            if self.control.kind != "fixed":
                assert worth is not None
                index = torch.tensor(chain[:most], device=worth.device)[:, None]
                stands = worth[:most].gather(1, index)[:, 0].cumprod(0).tolist()
                most = next((n for n in range(1, most) if not self.control.more(stands[:n])), most)
            chains[b].tokens = chain[:most]
            chains[b].probs = None if probs is None else probs[:most]
            chains[b].worth = None if worth is None else worth[:most]
        return left

    def _again(self, probs: Tensor, raw: Tensor, draws: StepSampling, r: int, params: SamplingParams) -> list[int]:
        """The picks of row `r` of an unrolled call, made once more in float64 from its logits and their law [K, V]."""
        if draws.uniforms is not None:
            return invert(probs, draws.uniforms[: len(probs), r].to(probs.device)).tolist()
        assert draws.noise is not None
        noise = draws.noise[: len(probs), r, : self.vocab_size]
        return (raw.double() / _heat(params) + noise).argmax(-1).tolist()

    def _steps(self, seqs: Seq[Sequence], depth: Seq[int]) -> int:
        """Steps of the next call. Near the end of a text the budget shrinks with every round, and each length is a
        graph of its own to compile: then the usual length is drafted instead, and cut."""
        steps = max(depth)
        if all(d == seq.room - 1 for seq, d in zip(seqs, depth, strict=True)):
            steps = max(steps, min(self._usual, *(self.source.room(seq) for seq in seqs)))
        self._usual = steps
        return steps

    def _draws(self, seqs: Seq[Sequence], each: Seq[SamplingParams], steps: int) -> StepSampling:
        """The numbers of a call; a guess's do not depend on how many steps there are, nor on how it is drafted: `guess`
        uses the same. Under the rule `coupled`, the noise that the target will use at the same positions."""
        if all(params.greedy for params in each):
            return StepSampling(vocab=self._vocab)
        coupled = seqs[0].coupled
        cold = 1.0 if coupled else ARGMAX_INV_TEMPERATURE  # for greedy ones among them, whose noise is 0
        heat = torch.tensor([cold if p.greedy else 1 / _heat(p) for p in each], dtype=torch.float64)
        if coupled:
            noise = torch.stack([self._noise(seq, steps, p.greedy) for seq, p in zip(seqs, each, strict=True)], 1)
            return StepSampling(heat, noise=noise, vocab=self._vocab)
        columns = [
            np.zeros(steps) if params.greedy else seq.random.uniforms(DRAFT, len(seq.tokens), steps)
            for seq, params in zip(seqs, each, strict=True)
        ]
        return StepSampling(heat, torch.from_numpy(np.stack(columns, 1)), vocab=self._vocab)

    def _noise(self, seq: Sequence, steps: int, greedy: bool) -> Tensor:
        """Gumbel noise [K, V'] in float64, none for a greedy sequence."""
        noise = np.zeros((steps, max(self.vocab_size, self.source.width)))
        if not greedy:
            for j in range(steps):
                noise[j, : self.vocab_size] = seq.random.gumbel(len(seq.tokens) + j, self.vocab_size)
        return torch.from_numpy(noise[:, : self.source.width]).to(self.source.device)

    def _token_by_token(self, seqs: Seq[Sequence], rows: list[int], depth: Seq[int], chains: Seq[Chain]) -> None:
        """One call of the model for each guess."""
        distributions: list[list[Tensor]] = [[] for _ in seqs]  # per sequence, one [V] per guess
        worths: list[list[Tensor]] = [[] for _ in seqs]
        stands: list[list[float]] = [[] for _ in seqs]  # chance, by the model, that the chain so far stands
        first = rows
        while rows:
            own, so_far = [seqs[b] for b in rows], [chains[b].tokens for b in rows]
            each = [self._params(seq) for seq in own]
            logits = self.source.extend(own, so_far)  # [R, V']
            probs = padded_distributions(logits, own, so_far, self.vocab_size, each)  # [R, V]
            tokens = sample_draft_tokens(probs, own, len(so_far[0])).tolist()
            sure = self._sure(logits, probs, tokens)
            worth = probs
            if self.weighed and any(params.greedy for params in each):
                worth = padded_distributions(
                    logits, own, so_far, self.vocab_size, [uncut(params) for params in each]
                )  # [R, V]
            for r, (b, token) in enumerate(zip(rows, tokens, strict=True)):
                chains[b].tokens.append(token)
                distributions[b].append(probs[r])
                stands[b].append(sure[r] * (stands[b][-1] if stands[b] else 1.0))
                if self.weighed:
                    worths[b].append(worth[r])
            rows = [b for b in rows if len(chains[b].tokens) < depth[b] and self.control.more(stands[b])]
        for b in first:
            chains[b].probs = None if self._params(seqs[b]).greedy else torch.stack(distributions[b])
            chains[b].worth = torch.stack(worths[b]) if self.weighed else None

    def _sure(self, logits: Tensor, probs: Tensor, tokens: Seq[int]) -> list[float]:
        """Probability of each drawn token: of its law, or of the plain softmax where the law is a point mass."""
        if self.control.kind == "fixed":
            return [1.0] * len(tokens)
        x = torch.tensor(tokens, device=probs.device)[:, None]
        drawn = probs.gather(1, x)[:, 0]  # [R]
        plain = torch.softmax(logits.double(), -1).gather(1, x.clamp(max=logits.shape[1] - 1))[:, 0]
        return torch.where(drawn < 1, drawn, plain).tolist()


def padded_distributions(
    logits: Tensor,
    seqs: Seq[Sequence],
    chains: Seq[Seq[int]],
    vocab_size: int,
    params: Seq[SamplingParams] | None = None,
) -> Tensor:
    """`distributions_after` over the target's vocabulary, float64 [R, V]. logits [R, V']: surplus ids are cut before
    warping, missing ids have probability 0."""
    return widened(distributions_after(logits[:, :vocab_size], seqs, chains, params), vocab_size)


def widened(probs: Tensor, vocab_size: int) -> Tensor:
    """[R, V'] -> [R, V]: ids that the drafter does not know have probability 0."""
    missing = vocab_size - probs.shape[1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing else probs


def uncut(params: SamplingParams) -> SamplingParams:
    """For greedy requests, the parameters by which draft tokens are scored: their distribution is a point mass, so how
    likely each token is to be accepted is estimated by the softmax at temperature 1."""
    return params.unfiltered if params.greedy else params


def joint(chains: Seq[Seq[int]], distributions: Seq[Tensor | None], vocab_size: int) -> Tensor | None:
    """q [N, V] of a packed draft from the laws of each sequence, one-hot rows where there are none; None if all guesses
    are point masses."""
    device = next((probs.device for probs in distributions if probs is not None), None)
    if device is None:
        return None
    parts = []
    for chain, probs in zip(chains, distributions, strict=True):
        if probs is None:
            probs = torch.zeros(len(chain), vocab_size, dtype=torch.float64, device=device)
            probs[range(len(chain)), list(chain)] = 1.0
        parts.append(probs)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _heat(params: SamplingParams) -> float:
    return max(params.temperature, 1e-30)  # as `warp` has it
