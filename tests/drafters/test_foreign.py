"""Every drafter of the registry as a member of a stack: the step verifies another drafter's draft, or a merged one. The
drafter must update its state from the tokens of the text."""

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter, DrafterTraits, NoDrafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.drafters.registry import DRAFTERS
from tests.drafters.conformance import Case, Recorder
from tests.drafters.makers import V, maker, target
from tests.oracle import Oracle

LENGTH = 40


class RandomTrees(NoDrafter):
    """Drafts a random tree: chains, branches, sampled distributions or none, window nodes that are not acceptable.
    Half of the draft tokens are the target's own, so that paths of every length are accepted."""

    name = "random trees"
    traits = DrafterTraits()

    def __init__(self, seed: int):
        self.rng, self.oracle = random.Random(seed), Oracle(target())

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        tokens, parents, acceptable, splits = list[int](), list[int](), list[bool](), [0]
        for seq, depth in zip(seqs, (budget.depth for budget in budgets), strict=True):
            start, depths, texts = len(tokens), list[int](), list[list[int]]()
            for _ in range(self.rng.randrange(6) if depth else 0):
                above = [-1, *(i for i, d in enumerate(depths) if d < depth)]
                parent = self.rng.choice(above[-2:])
                text = seq.tokens if parent < 0 else texts[parent]
                right = self.rng.random() < 0.5
                token = self.oracle.greedy(text, 1)[0] if right else self.rng.randrange(V)
                tokens.append(token)
                parents.append(parent)
                acceptable.append(self.rng.random() < 0.9)
                depths.append(1 if parent < 0 else depths[parent] + 1)
                texts.append([*text, token])
            splits.append(start + len(depths))
        # Distributions of all draft tokens, or none: the greedy text does not depend on them, but members may read
        # them.
        distributions = torch.full((len(tokens), V), 1 / V, dtype=torch.float64) if self.rng.random() < 0.5 else None
        some = acceptable if self.rng.random() < 0.5 else None
        return Draft(torch.tensor(tokens, dtype=torch.int64), parents, splits, distributions, some)


class Replacing(Recorder):
    """Asks a drafter, then uses another drafter's draft instead (sometimes it does not even ask)."""

    def __init__(self, drafter: Drafter, other: Drafter, own: float):
        super().__init__(drafter, V)
        self.other, self.own, self.rng, self.used = other, own, random.Random(1), 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        draft = super().propose(seqs, budgets) if self.rng.random() < 0.8 else None
        if draft is not None and self.rng.random() < self.own:
            self.used += 1
            return draft
        return self.other.propose(seqs, budgets)


@pytest.mark.parametrize("own", [0.0, 0.3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_handles_drafts_of_another_drafter(name: str, own: float) -> None:
    """No exception, well-formed drafts, and the target's own text, at temperature 0 and above it."""
    toy = target()
    drafter = Replacing(maker(name)(toy), RandomTrees(7), own)
    prompts = Case(target, maker(name)).prompts(4)
    params = [SamplingParams(temperature=float(b == 3), max_tokens=LENGTH, seed=b) for b in range(4)]
    seqs = [Sequence(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    active = list(seqs)
    while active:
        step(active, toy, drafter, RULES["rejection"], 4)
        active = [seq for seq in active if not seq.finish]
    truth = Oracle(target())
    assert [seq.output for seq in seqs[:3]] == [truth.greedy(prompt, LENGTH) for prompt in prompts[:3]]
    assert sum(seq.stats.accepted for seq in seqs) > 10, "paths of the other drafter were accepted"
    if own:
        assert drafter.used


@pytest.mark.parametrize(
    "name", [name for name in ("model", "layerskip", "medusa", "eagle", "eagle3") if name in DRAFTERS]
)
def test_its_state_does_not_depend_on_who_drafted_the_text(name: str) -> None:
    """After steps with other drafters' drafts it proposes the same tokens as after plain decoding of the same text. A
    head that kept the features of a wrong node, or lost a token of its KV, would not."""
    prompt, drafted = Case(target, maker(name)).prompts(3)[2], []
    for replaced in (True, False):
        toy = target()
        drafter = maker(name)(toy)
        seq = Sequence(prompt, SamplingParams(max_tokens=200))
        driver = Replacing(drafter, RandomTrees(7), own=0.2) if replaced else None
        while len(seq.output) < LENGTH:
            most = min(4, LENGTH - 1 - len(seq.output))  # both end at the same text
            step([seq], toy, driver or drafter, RULES["rejection"], most if replaced else 0)
        draft = drafter.propose([seq], [Budget(4)])
        drafted.append((seq.output, draft.ids, list(draft.parents)))
    assert drafted[0] == drafted[1]
    assert drafted[0][1], "it proposed something"
