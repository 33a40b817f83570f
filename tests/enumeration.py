"""Computes the exact distribution of the complete program's output, by enumeration of its random numbers.

At first, a random number of a request may be anywhere in the interval [0, 1). When the program compares the number with
a probability, or searches for it in a cumulated distribution, these bounds cut the interval into parts. The run
continues with one part; for each other part there is another run, which repeats the answers so far. The weight of a run
is the product of the widths of its intervals. All runs together give the probability of every output. This is a proof
for one case, while a G-test gives only a p-value. Drafter, guard, step, rule and engine run as in production, and the
runs in a batch have different drafts.

A number is identified by its address and keeps its interval, so it is found if verification uses the number of a draft
token. Enumeration does not show that numbers of different addresses are independent. This is tested by G-tests with
real random numbers, one for each way of drawing, and by `core/test_random.py`. The noise of the rule `coupled` is not
enumerated; its outputs are compared with outputs of plain decoding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import slipstream.core.dice
import slipstream.drafters.chains
import slipstream.drafters.tree_growth
from slipstream.core.decode_steps import StepSampling
from slipstream.core.dice import Dice
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.llm import LLM
from tests.end_to_end.sampling import hurry, many_prompts_a_step, sequences
from tests.oracle import Distribution, Oracle, joint_distribution
from tests.targets.toy import ToyTarget

Address = tuple[int, int, int, int]
"""Nonce, purpose, position and index of a random number."""

ROUNDING = 1e-11
"""Largest change of a float64 bound by rounding, which may depend on the other sequences of the batch."""


class Branch(Stream):
    """The random numbers of one run.

    tape      the part to take at each cut; after the end of the tape, the first part.
    start     numbers of earlier positions are not enumerated, but come from `seed` and are the same in all runs.
    fixed     purposes whose numbers also come from `seed`, for drafters that compute with them and draw no draft
              tokens.
    rounding  parts narrower than this do not become runs.
    """

    def __init__(self, tape: tuple[int, ...] = (), **how: Any):
        super().__init__(how.get("seed", 0))
        self.tape, self.how = tape, how
        self.start, self.fixed = how.get("start", 0), how.get("fixed", ())
        self.rounding = how.get("rounding", ROUNDING)
        self.taken, self.others = list[int](), list[tuple[int, ...]]()
        self.intervals: dict[Address, tuple[float, float]] = {}
        self.began: int | None = None  # position of the first number that did not come from `seed`

    def uniforms(self, purpose: int, position: int, n: int) -> np.ndarray:
        """Return numbers above 1 as placeholders for random numbers, until the program compares them."""
        if position < self.start or purpose in self.fixed:
            return super().uniforms(purpose, position, n)
        self.began = position if self.began is None else self.began
        first = 2.0 + len(_asked)
        _asked.extend((self, (self.nonce, purpose, position, index)) for index in range(n))
        return np.arange(first, first + n)

    @property
    def weight(self) -> float:
        return math.prod(high - low for low, high in self.intervals.values())

    def cut(self, address: Address, bounds: Seq[float]) -> float:
        """Cut the interval of a number at increasing bounds. Returns the middle of the part that is taken."""
        low, high = self.intervals.get(address, (0.0, 1.0))
        ends = [low]
        for x in bounds:
            if ends[-1] + self.rounding < x < high - self.rounding:
                ends.append(x)
        parts, choice = list(pairwise([*ends, high])), 0
        if len(parts) > 1:
            if len(self.taken) < len(self.tape):
                choice = self.tape[len(self.taken)]
            else:
                self.others += [(*self.taken, other) for other in range(1, len(parts))]
            self.taken.append(choice)
        self.intervals[address] = parts[choice]
        return sum(parts[choice]) / 2


_asked: list[tuple[Branch, Address]] = []
"""Random numbers requested in this batch of runs; `2.0 + i` is the placeholder of number i."""


def cut(number: float, bounds: Seq[float]) -> float:
    """Replace a placeholder by a number with which comparisons with these bounds can be answered. Other numbers are
    returned unchanged."""
    if number < 1:
        return number
    branch, address = _asked[int(number) - 2]
    return branch.cut(address, bounds)


def cut_each(numbers: Tensor, bounds: Tensor) -> Tensor:
    """Call `cut` for each row: numbers [B], bounds [B, n] -> [B]."""
    return torch.tensor(list(map(cut, numbers.tolist(), bounds.tolist())), dtype=torch.float64)


@contextmanager
def branching() -> Iterator[None]:
    """Cut random numbers when the program compares them. The production code then compares the middle of the part,
    which has the same result as every other number of the part."""
    invert, accept, pick = slipstream.core.dice.invert, Dice.accept, StepSampling.pick

    def cut_invert(probs: Tensor, u: Tensor) -> Tensor:
        total = probs.cumsum(-1)
        return invert(probs, cut_each(u, total / total[:, -1:]))

    def cut_accept(dice: Dice, probability: Seq[float]) -> list[bool]:
        column = dice._uniforms(dice._column + 1)
        column[:] = [cut(u, (p,)) for u, p in zip(column.tolist(), probability, strict=True)]
        return accept(dice, probability)

    def cut_pick(sampling: StepSampling, logits: Tensor, j: int) -> Tensor:
        if sampling.uniforms is not None:
            x, heat, uniforms = logits[:, : sampling.vocab], sampling.inv_temperature, sampling.uniforms.clone()
            x = x if heat is None else x * heat.to(x)[:, None]
            uniforms[j] = cut_each(uniforms[j], torch.softmax(x, -1).cumsum(-1).double())
            sampling = replace(sampling, uniforms=uniforms)
        return pick(sampling, logits, j)

    with pytest.MonkeyPatch.context() as patch, hurry():
        for module in (slipstream.core.dice, slipstream.drafters.chains, slipstream.drafters.tree_growth):
            patch.setattr(module, "invert", cut_invert)
        patch.setattr(Dice, "accept", cut_accept)
        patch.setattr(StepSampling, "pick", cut_pick)
        yield


class Branched(SourcedSequence):
    """A sequence that ends after `steps` steps with enumerated numbers of a `Branch`."""

    steps = 1

    def advance(self, *step: Any) -> None:
        super().advance(*step)
        assert isinstance(self.random, Branch)
        self.steps -= self.random.began is not None
        if self.finish is None and not self.steps:
            self.finish = "length"


@dataclass
class Texts:
    """The outputs of all runs of one request.

    before    the beginning of every output, from the numbers of the seed. probs: probabilities of the outputs.
    accepted, proposed  mean numbers of accepted and proposed draft tokens. runs: number of runs.
    """

    rounding: float
    before: tuple[int, ...] = ()
    probs: Distribution = field(default_factory=lambda: defaultdict(float))
    accepted: float = 0.0
    proposed: float = 0.0
    runs: int = 0

    def error(
        self, oracle: Oracle, prompt: Seq[int], params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> float:
        """Return the largest difference between the probability of an output and its probability in plain decoding.
        Shorter outputs are continued by plain decoding to the same length."""
        length = max(map(len, self.probs))
        each = [
            joint_distribution(oracle, prompt, params, stop_ids, length, begun)
            for begun in ({self.before: 1.0}, self.probs)
        ]
        return max(abs(each[0].get(text, 0.0) - each[1].get(text, 0.0)) for text in each[0] | each[1])

    def check(self, *plain: Any) -> None:
        """Assert that the outputs have the distribution of plain decoding. Arguments are as in `error`."""
        error = self.error(*plain)
        assert error < 100 * self.rounding, f"a text is too probable, or not enough, by {error:.1e}"


def enumerate_runs(run: Callable[[list[Branch]], Seq[Sequence]], *requests: Branch) -> list[Texts]:
    """Return all outputs of each request. run: function that decodes one sequence for each of these streams, and
    returns the sequences."""
    texts = [Texts(branch.rounding) for branch in requests]
    todo = list(enumerate(requests))
    with branching():
        while todo:
            seqs = run([branch for _, branch in todo])
            now, todo = todo, []
            for (i, branch), seq in zip(now, seqs, strict=True):
                assert branch.began is not None
                assert branch.tape == tuple(branch.taken[: len(branch.tape)]), "a run does not repeat what it should"
                texts[i].before = tuple(seq.output[: branch.began - seq.prompt])
                texts[i].probs[tuple(seq.output)] += branch.weight
                texts[i].accepted += branch.weight * seq.stats.accepted
                texts[i].proposed += branch.weight * seq.stats.proposed
                texts[i].runs += 1
                todo += [(i, Branch(tape, **branch.how)) for tape in branch.others]
            _asked.clear()
    for each in texts:
        assert math.isclose(sum(each.probs.values()), 1, abs_tol=100 * each.rounding)
    return texts


def enumerate_texts(
    make: Callable[[], LLM], prompt: Seq[int], params: SamplingParams, seeds: Collection[int] = (0,), after: int = 0,
    steps: int = 2, share_form: bool = True, **how: Any,
) -> list[Texts]:  # fmt: skip
    """Return all outputs of a request to an `LLM`, for each seed. `make` makes the `LLM` for each batch of runs. The
    first `after` tokens use the numbers of the seed; then follow `steps` steps whose numbers are enumerated.
    share_form: as in `sample`. how: arguments of `Branch`."""

    def run(branches: list[Branch]) -> list[Sequence]:
        llm = make()
        llm.max_batch = len(branches)  # all runs in one batch, so that no run learns from another run
        seqs = sequences(Branched, llm, prompt, params, branches, share_form)
        for seq in seqs:
            seq.steps = steps
        with many_prompts_a_step(isinstance(llm.target, ToyTarget)):
            for _ in llm.decode(seqs):
                pass
        assert not any(seq.stats.drafter_faults for seq in seqs)
        return seqs

    return enumerate_runs(run, *(Branch(seed=seed, start=len(prompt) + after, **how) for seed in seeds))
