"""Draft model: a smaller model of the same vocabulary guesses a chain, token by token.

The draft model decodes a shadow of each sequence with its own KV cache. Its guesses are sampled from its own law,
warped by the request's parameters, and that law goes along as q (Leviathan et al. 2211.17192, section 2.3); at
temperature 0 the guess is the argmax, a point mass. After verification the shadow is rolled back to what stands.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.dice import guess
from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import Strict
from slipstream.core.sequence import Sequence
from slipstream.core.warp import warp
from slipstream.errors import ParameterError
from slipstream.targets.base import Target, TargetOut

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class ModelDraftConfig(Strict):
    """confidence: draft no further once the product of the draft model's probabilities of its own guesses has
    fallen below this, in [0, 1); 0 always drafts the full length. The guess that made it fall is kept: whether to
    draw *another* one may depend on it, whether to show *it* may not."""

    confidence: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.confidence < 1:
            raise ParameterError(f"confidence is {self.confidence!r}, must be in [0, 1)")


class ModelDrafter:
    """model: any `Target` of the same vocabulary (padding aside). vocab_size: width of the target's logits."""

    name = "model"
    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, vocab_size: int, config: ModelDraftConfig | None = None):
        self.model, self.vocab_size = model, vocab_size
        self.config = config or ModelDraftConfig()
        self._shadows: dict[int, Sequence] = {}
        self._usual = 0  # steps of the last unrolled call
        self._warned = False

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        depth = [self._within_context(seq, d) for seq, d in zip(seqs, budget, strict=True)]
        drafting = [b for b in range(len(seqs)) if depth[b] > 0]
        for b in drafting:
            self._shadow(seqs[b])
        if not drafting:
            return Draft.empty(len(seqs), self.model.device)
        if all(seqs[b].params.argmax_only for b in drafting):
            chains = self._in_one_call(seqs, drafting, depth)
            if chains is not None:
                return Draft.chains(chains, None, self.model.device)
        return self._token_by_token(seqs, drafting, depth)

    def _in_one_call(self, seqs: Seq[Sequence], drafting: list[int], depth: Seq[int]) -> list[list[int]] | None:
        """Greedy chains from one unrolled call of the draft model, or None if it has none."""
        greedy_chains = getattr(self.model, "greedy_chains", None)
        shadows = [self._shadows[seqs[b].id] for b in drafting]
        steps = max(depth[b] for b in drafting)
        # Near the end of a text the budget shrinks with every round, and each length is a graph of its own to
        # compile: draft the usual length instead, and cut.
        if all(depth[b] == seqs[b].room - 1 for b in drafting):
            room = self.model.context - max(len(shadow.tokens) for shadow in shadows)
            steps = max(steps, min(self._usual, room))
        self._usual = steps
        made = greedy_chains(shadows, steps) if greedy_chains else None
        if made is None:
            return None
        tokens = made[0].T.tolist()  # [R][K]
        if max(map(max, tokens)) >= self.vocab_size:  # a padded id, which the target does not have
            return None
        if self.config.confidence:
            sure = torch.softmax(made[1], -1).gather(-1, made[0][..., None])[..., 0].cumprod(0).T.tolist()  # [R][K]
        chains: list[list[int]] = [[] for _ in seqs]
        for r, b in enumerate(drafting):
            length = depth[b]
            if self.config.confidence:
                length = min(length, 1 + sum(p >= self.config.confidence for p in sure[r][:-1]))
            chains[b] = tokens[r][:length]
            shadows[r].kv_len = len(shadows[r].tokens) + length - 1
            shadows[r].tokens += chains[b]
        return chains

    def _token_by_token(self, seqs: Seq[Sequence], drafting: list[int], depth: Seq[int]) -> Draft:
        """One call of the draft model for each guess; each is drawn from its warped law, which becomes its q."""
        chains: list[list[int]] = [[] for _ in seqs]
        laws: list[list[Tensor]] = [[] for _ in seqs]  # per sequence, one [V] per guess
        sure = [1.0] * len(seqs)  # probability, by the draft model, of the chain so far
        rows = drafting
        while rows:
            step = len(chains[rows[0]])
            shadows = [self._shadows[seqs[b].id] for b in rows]
            logits = self.model.run(shadows, Draft.empty(len(rows), self.model.device)).logits  # [R, V_draft]
            law = self._laws(logits, [seqs[b] for b in rows], [chains[b] for b in rows])  # [R, V]
            tokens = guess(law, [seqs[b] for b in rows], step).tolist()
            self.model.commit(shadows, [[]] * len(rows))
            confidence = self._confidence(logits, law, tokens)
            for r, (b, token) in enumerate(zip(rows, tokens, strict=True)):
                shadows[r].kv_len = len(shadows[r].tokens)
                shadows[r].tokens.append(token)
                chains[b].append(token)
                laws[b].append(law[r])
                sure[b] *= confidence[r]
            rows = [b for b in rows if len(chains[b]) < depth[b] and sure[b] >= self.config.confidence]
        q = None
        if not all(seq.params.greedy for seq in seqs):
            q = torch.stack([law for own in laws for law in own])  # [N, V]
        return Draft.chains(chains, q, self.model.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Roll each shadow back to what stands. Its cache holds every guess but the last, which was never run."""
        for b, seq in enumerate(seqs):
            shadow = self._shadows.get(seq.id)
            if shadow is not None:
                known = len(seq.tokens) - len(verdict.path[b]) - 1
                right = 0
                for mine, true in zip(shadow.tokens[known:], seq.tokens[known:], strict=False):
                    if mine != true:
                        break
                    right += 1
                # The last token stays pending, even where the target itself came to say what a lost draft had guessed.
                shadow.kv_len = min(shadow.kv_len, known + right, len(seq.tokens) - 1)
                shadow.tokens[known:] = seq.tokens[known:]

    def release(self, seq_id: int) -> None:
        shadow = self._shadows.pop(seq_id, None)
        if shadow is not None:
            self.model.release(shadow.id)

    def _shadow(self, seq: Sequence) -> None:
        if seq.id not in self._shadows:
            self._shadows[seq.id] = Sequence(seq.tokens, seq.params, context=self.model.context)

    def _within_context(self, seq: Sequence, depth: int) -> int:
        """Past the draft model's own context it guesses nothing: its positions were never trained."""
        room = self.model.context - len(seq.tokens)
        if room < depth and not self._warned:
            self._warned = True
            log.warning(
                "the draft model's context of %d tokens is full at a sequence of %d tokens: it stops drafting there, "
                "plain decoding goes on",
                self.model.context,
                len(seq.tokens),
            )
        return max(0, min(depth, room))

    def _laws(self, logits: Tensor, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """The draft model's laws over the target's vocabulary, float64 [R, V]: surplus ids are cut off before
        warping, missing ids have probability 0."""
        logits = logits[:, : self.vocab_size]
        first = seqs[0].params
        if not first.needs_history and all(seq.params.law == first.law for seq in seqs[1:]):
            law = warp(logits, first)
        else:
            law = torch.cat(
                [
                    warp(row[None], seq.params, seq.tokens[: seq.prompt], [[*seq.output, *chain]], seq.stop_ids)
                    for row, seq, chain in zip(logits, seqs, chains, strict=True)
                ]
            )
        return torch.nn.functional.pad(law, (0, self.vocab_size - law.shape[1]))

    def _confidence(self, logits: Tensor, law: Tensor, tokens: Seq[int]) -> list[float]:
        """Probability of each drawn token: of its law, or of the plain softmax where the law is a point mass."""
        if not self.config.confidence:
            return [1.0] * len(tokens)
        x = torch.tensor(tokens, device=law.device)[:, None]
        drawn = law.gather(1, x)[:, 0]  # [R]
        plain = torch.softmax(logits.double(), -1).gather(1, x.clamp(max=logits.shape[1] - 1))[:, 0]
        return torch.where(drawn < 1, drawn, plain).tolist()


def make(target: Target, *, model: Target, **options: Any) -> ModelDrafter:
    """See `registry`; options as in `ModelDraftConfig`."""
    return ModelDrafter(model, target.vocab_size, ModelDraftConfig(**options))
