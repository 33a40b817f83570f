"""Drafters whose draft tokens are known beforehand, and a second, simple implementation of plain decoding to compare
with."""

import random
from collections.abc import Callable, Iterator, Sequence as Seq

import torch
from torch import Tensor

from slipstream.core import warp as warping  # imported as a module, because `hurry` may replace its `warp`
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits, NoDrafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.drafters.chains import sample_draft_tokens
from tests.targets.toy import ToyTarget

LETTERS = "abcdefghijklmnop"


def decode(ids: Seq[int]) -> str:
    return "".join(LETTERS[t] for t in ids)


def sequence(target: ToyTarget, prompt: Seq[int] = (1, 2, 3), seed: int | None = 0, **params: object) -> Sequence:
    """Make a sequence as `LLM` would make it for a request."""
    return Sequence(
        list(prompt),
        SamplingParams(seed=seed, **params),
        stop_ids=target.capabilities.eos_ids | frozenset(params.get("stop_token_ids", ())),  # type: ignore[arg-type]
        context=target.context,
        decode=decode,
    )


def run_steps(
    seqs: Seq[Sequence], target: Target, drafter: Drafter | None = None, rule: str = "rejection", draft_tokens: int = 4
) -> Iterator[Verdict]:
    """Step until every sequence has ended, and check the invariant of the KV length between steps."""
    for seq in seqs:
        seq.rule = RULES[rule]
    while active := [seq for seq in seqs if not seq.finish]:
        before = [len(seq.tokens) for seq in active]
        yield step(active, target, drafter or NoDrafter(), RULES[rule], draft_tokens)[1]
        for seq, length in zip(active, before, strict=True):
            assert seq.kv_len == len(seq.tokens) - len(seq.pending)
            assert len(seq.pending) == 1
            assert 1 <= len(seq.tokens) - length <= draft_tokens + 1
            assert len(seq.tokens) <= seq.limit
            assert len(seq.proposers) == len(seq.output)


def finish(seqs: Seq[Sequence], target: Target, drafter: Drafter | None = None, **how: object) -> list[list[int]]:
    """Run all sequences to their end, and return the outputs."""
    list(run_steps(seqs, target, drafter, **how))  # type: ignore[arg-type]
    return [seq.output for seq in seqs]


def depths(budgets: Seq[Budget]) -> list[int]:
    return [budget.depth for budget in budgets]


def continuation(target: ToyTarget, tokens: Seq[int], n: int) -> list[int]:
    """Return the n tokens that follow greedily, computed one at a time by argmax."""
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(int(target.logits(tokens).argmax()))
    return tokens[-n:]


class Scripted(NoDrafter):
    """Drafts the target's greedy continuation. In each step, draft tokens from index `wrong_at(step)` on are wrong
    (None: all are right)."""

    name = "scripted"
    traits = DrafterTraits()

    def __init__(self, target: ToyTarget, wrong_at: Callable[[int], int | None] = lambda _: None):
        self.target, self.wrong_at, self.steps = target, wrong_at, 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        at = self.wrong_at(self.steps)
        self.steps += 1
        chains = [
            self.spoil(continuation(self.target, seq.tokens, depth) if depth else [], at)
            for seq, depth in zip(seqs, depths(budgets), strict=True)
        ]
        return Draft.chains(chains)

    def spoil(self, chain: list[int], at: int | None) -> list[int]:
        if at is not None and at < len(chain):
            chain[at] = (chain[at] + 1) % self.target.vocab_size
        return chain


class Sampling(Scripted):
    """Samples a chain from the target's distribution, disturbed by `noise` and warped by the request's parameters."""

    name = "sampling"

    def __init__(self, target: ToyTarget, noise: float = 1.0):
        super().__init__(target)
        self.noise = noise

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        chains: list[list[int]] = []
        distributions: list[Tensor] = []
        for seq, depth in zip(seqs, depths(budgets), strict=True):
            chain: list[int] = []
            for i in range(depth):
                text = [*seq.tokens, *chain]
                rng = torch.Generator().manual_seed(random.Random(str(text[-2:])).randrange(2**31))
                logits = self.target.logits(text) + self.noise * torch.randn(self.target.vocab_size, generator=rng)
                before = seq.tokens[: seq.prompt], [[*seq.output, *chain]]
                probs = warping.warp(logits[None], seq.params, *before, seq.stop_ids)
                distributions.append(probs[0])
                chain.append(int(sample_draft_tokens(probs, [seq], i)[0]))
            chains.append(chain)
        return Draft.chains(chains, torch.stack(distributions) if distributions else None)


class Bushy(Scripted):
    """Drafts deterministic trees of random tokens, with duplicates. Half of the trees contain the right path, too."""

    name = "bushy"

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.trees(self.tree(seq, depth) for seq, depth in zip(seqs, depths(budgets), strict=True))

    def tree(self, seq: Sequence, depth: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the nodes: a few random nodes, perhaps the right path, then more random
        nodes."""
        ids, parents, heights, rng = list[int](), list[int](), list[int](), random.Random(f"{seq.tokens}")

        def add(parent: int, token: int) -> int:
            ids.append(token)
            parents.append(parent)
            heights.append(1 if parent < 0 else heights[parent] + 1)
            return len(ids) - 1

        def strays() -> None:
            for _ in range(rng.randint(0, 4) if depth else 0):
                parent = rng.choice([-1, *(i for i, height in enumerate(heights) if height < depth)])
                add(parent, rng.randrange(self.target.vocab_size))

        strays()
        if rng.random() < 0.5:
            parent = -1
            for token in continuation(self.target, seq.tokens, depth) if depth else []:
                parent = add(parent, token)
        strays()
        return ids, parents
