"""Measures several arms on the same prompts (`line_up`, then `race`). An arm is one way of decoding; a pass decodes
every prompt once with every arm. The arms take turns, so that disturbances of the machine affect all of them equally.
An arm is compared with plain decoding in the same passes, never with numbers of another run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np

from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.core.strict import JsonObject
from slipstream.drafters.registry import DRAFTERS
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.llm import LLM, Completion
from slipstream.measure import estimates
from slipstream.measure.estimates import FEWEST_PASSES, Estimate
from slipstream.measure.identity import Divergence, find_divergence

if TYPE_CHECKING:
    from slipstream.drafters.draft_plan import DraftArgument

ArmDrafter: TypeAlias = "str | Drafter | list[str | Drafter] | None"
"""Name of a drafter (a list for a stack), which is created again for every pass; or a drafter, which is kept."""


@dataclass(frozen=True, eq=False)
class Arm:
    """One way of decoding.

    llm           the engine; arms may share one or have their own.
    drafter       argument of `LLM.use`. A drafter given by name (or a list) is created again for every pass, so that a
                  drafter that learns from texts cannot reuse in pass 2 what it learned in pass 1. An instance is kept.
                  See `load_weights_once`.
    draft_tokens  largest number of draft tokens per step.
    options       options of a drafter that is given by name.
    params        sampling; each prompt and pass gets its own seed, the same for all arms.
    batch         prompts that are decoded at once.
    lengths       chooses the draft lengths, up to `draft_tokens`, and learns from pass to pass; None: fixed lengths.
    against       the arm of plain decoding under the same conditions; None for plain decoding itself.
    """

    name: str
    llm: LLM
    drafter: ArmDrafter = None
    draft_tokens: int = 0
    options: JsonObject = field(default_factory=dict)
    params: SamplingParams = field(default_factory=SamplingParams)
    batch: int = 1
    lengths: DraftLengths | None = None
    against: Arm | None = None

    def prepare(self) -> Drafter | None:
        if not isinstance(self.drafter, (str, list)):
            return self.drafter
        self.llm.use(self.drafter, **self.options)
        return self.llm.drafter


def is_recreated(drafter: object) -> TypeGuard[str]:
    """Return whether `drafter` is the name of a drafter without weights, which is created again for every pass."""
    return isinstance(drafter, str) and drafter in DRAFTERS and DRAFTERS[drafter].weightless


def load_weights_once(
    llm: LLM, drafter: DraftArgument, options: JsonObject | None = None
) -> tuple[ArmDrafter, JsonObject]:
    """Return (drafter, options) for an `Arm`. A drafter with weights is loaded here, once; a drafter without weights
    stays a name and is created again for every pass. This function creates each drafter once, so that bad options raise
    an error before anything is measured."""
    given = dict(options or {})
    loaded = _load(llm, drafter, given)
    if isinstance(drafter, list):
        return [each if is_recreated(each) else _load(llm, each, {}) for each in drafter], given
    return (drafter, given) if is_recreated(drafter) else (loaded, {})


def _load(llm: LLM, drafter: DraftArgument, options: JsonObject) -> Drafter:
    llm.use(drafter, **options)
    loaded = llm.drafter
    llm.use(None)
    return loaded


@dataclass(frozen=True)
class Cell:
    """One measurement of a batch: wall seconds, output tokens, mean seconds to the first token, counters."""

    seconds: float
    tokens: int
    first: float
    stats: SpecStats


@dataclass
class Run:
    """The measurements of one arm so far.

    groups       for each batch, the indices of its prompts.
    cells        [groups][passes].
    texts        prompt -> output ids of the untimed first pass.
    context      earlier text was put before each prompt, up to this number of tokens; None: no text was added.
    divergences  (prompt, where its text differs from plain decoding's); only for greedy decoding.
    """

    arm: Arm
    prompts: Seq[Seq[int]]
    groups: list[list[int]]
    plain: Run | None = None
    cells: list[list[Cell]] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    divergences: list[tuple[int, Divergence]] = field(default_factory=list)
    drafter: Drafter | None = None
    context: int | None = None

    @property
    def exact(self) -> bool:
        """True if every text is identical to plain decoding's, except for near-ties."""
        return all(d.near_tie for _, d in self.divergences)

    @property
    def rounds(self) -> int:
        """Number of passes that all groups have completed."""
        return min((len(row) for row in self.cells), default=0)

    @property
    def measured(self) -> bool:
        """Return True if this arm and its plain decoding have each completed a pass."""
        return self.rounds > 0 and (self.plain is None or self.plain.rounds > 0)

    def stats(self, groups: Seq[int] | None = None) -> SpecStats:
        """Sum of the counters of all passes, over all groups or some."""
        return sum((c.stats for row in self._rows(groups) for c in row), SpecStats())

    def seconds_per_token(self, groups: Seq[int] | None = None) -> np.ndarray:
        """Return seconds per output token, [groups, passes], prefill included."""
        return np.array([[c.seconds / c.tokens for c in row] for row in self._rows(groups)])

    def weights(self, groups: Seq[int] | None = None) -> np.ndarray:
        """Return the mean output tokens of each group, [groups]."""
        return np.array([np.mean([c.tokens for c in row]) for row in self._rows(groups)])

    def tokens_per_second(self, groups: Seq[int] | None = None) -> Estimate:
        """Estimate the output tokens per second, prefill included."""
        return estimates.estimate_mean(self.seconds_per_token(groups), self.weights(groups)).inverse()

    def speedup(self, groups: Seq[int] | None = None) -> Estimate:
        """Estimate the time per token of plain decoding divided by that of this arm, in pairs of the same prompt and
        pass. Prompts are weighted by their tokens in plain decoding. Returns 1 for plain decoding itself. The estimate
        has no interval if drafts cannot be the cause: no token was drafted, or none accepted in a faster arm."""
        if self.plain is None:
            return Estimate(1.0, 1.0, 1.0)
        rounds = min(self.rounds, self.plain.rounds)
        top, bottom = (run.seconds_per_token(groups)[:, :rounds] for run in (self.plain, self))
        estimate = estimates.estimate_ratio(top, bottom, self.plain.weights(groups))
        stats = self.stats(groups)
        if stats.accepted or (stats.proposed and estimate.value <= 1):
            return estimate
        note = estimates.REJECTED if stats.proposed else estimates.NO_DRAFTS
        return replace(estimate, low=None, high=None, note=note)

    def first_token_seconds(self, groups: Seq[int] | None = None) -> float:
        """Return the seconds to the first token: median over prompts and passes."""
        return float(np.median([c.first for row in self._rows(groups) for c in row]))

    def seconds_per_later_token(self, groups: Seq[int] | None = None) -> float | None:
        """Return the median seconds per output token after the first; None if no text has a second token."""
        chosen = self.groups if groups is None else [self.groups[g] for g in groups]
        times = [
            (c.seconds - c.first) / (c.tokens / len(group) - 1)
            for group, row in zip(chosen, self._rows(groups), strict=True)
            for c in row
            if c.tokens > len(group)
        ]
        return float(np.median(times)) if times else None

    def _rows(self, groups: Seq[int] | None) -> list[list[Cell]]:
        chosen = self.cells if groups is None else [self.cells[g] for g in groups]
        return [row[: self.rounds] for row in chosen]


def line_up(arms: Seq[Arm], prompts: Seq[Seq[int]], kinds: Seq[str] | None = None) -> list[Run]:
    """Make a run for each arm, with the prompts in batches of the arm's size (see `group_prompts`). `arms` must list
    `against` of an arm before the arm itself."""
    runs: dict[int, Run] = {}
    for arm in arms:
        groups = group_prompts(kinds or [""] * len(prompts), arm.batch)
        plain = None if arm.against is None else runs[id(arm.against)]
        runs[id(arm)] = Run(arm, prompts, groups, plain, [[] for _ in groups])
    return list(runs.values())


def group_prompts(kinds: Seq[str], batch: int) -> list[list[int]]:
    """Return the indices of the prompts in each batch. kinds: a label for each prompt. All prompts of a batch have the
    same label, so the last batch of a label may be smaller."""
    groups = []
    for kind in dict.fromkeys(kinds):
        same = [i for i, k in enumerate(kinds) if k == kind]
        groups += [same[at : at + batch] for at in range(0, len(same), batch)]
    return groups


def count_passes(runs: Seq[Run], rounds: int) -> int:
    """Return how often `race` calls `advance`, for the length of a progress bar."""
    return sum(len(run.groups) for run in runs) * (rounds + 1)


def race(
    runs: Seq[Run],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    seconds: float = float("inf"),
    each_pass: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> None:
    """Decode all prompts in one untimed pass (warm-up, texts), then in `rounds` timed passes. The arms take turns.

    seconds     time limit. At least `FEWEST_PASSES` passes are run, because fewer passes give no interval.
    advance     called after each batch.
    each_pass   called after each timed pass.

    The runs are updated during the measurement, so they keep all measurements if it is interrupted.
    """
    for run in runs:
        warm_up(run, seed, advance)
    began = perf_counter()
    order = list(runs)
    for number in range(rounds):
        if number >= FEWEST_PASSES and perf_counter() - began > seconds:
            break
        for run in order:
            run.drafter = run.arm.prepare()
        for g in range(max(len(run.groups) for run in order)):
            for run in order:
                if g < len(run.groups):
                    _time(run, g, seed + 1 + number)
                    advance()
        order = [*order[1:], order[0]]
        each_pass()


def warm_up(run: Run, seed: int, advance: Callable[[], None] = lambda: None) -> None:
    """Run one untimed pass, which triggers lazy compilation, and store the texts."""
    run.drafter = run.arm.prepare()
    for group in run.groups:
        done, _ = decode(run.arm, run.drafter, [run.prompts[i] for i in group], [_seed(seed, i) for i in group])
        for i, completion in zip(group, done, strict=True):
            run.texts[i] = completion.token_ids
            _compare(run, i, completion)
        advance()


def decode(
    arm: Arm, drafter: Drafter | None, prompts: Seq[Seq[int]], seeds: Seq[int]
) -> tuple[list[Completion], float]:
    """Decode one batch. Returns (completions, wall seconds)."""
    llm = arm.llm
    llm.use(drafter)
    llm.draft_tokens = arm.draft_tokens if arm.lengths is None else arm.lengths
    before, llm.max_batch = llm.max_batch, len(prompts)
    params = [replace(arm.params, seed=seed) for seed in seeds]
    try:
        began = perf_counter()
        done = llm.generate([list(p) for p in prompts], params)
        return done, perf_counter() - began
    finally:
        llm.max_batch = before


def _time(run: Run, g: int, seed: int) -> None:
    group = run.groups[g]
    done, spent = decode(run.arm, run.drafter, [run.prompts[i] for i in group], [_seed(seed, i) for i in group])
    stats = sum((c.stats for c in done), SpecStats())
    first = float(np.mean([c.stats.first_token_seconds or 0.0 for c in done]))
    run.cells[g].append(Cell(spent, stats.tokens, first, stats))
    for i, completion in zip(group, done, strict=True):
        _compare(run, i, completion)


def _compare(run: Run, i: int, completion: Completion) -> None:
    if run.plain is None or not run.arm.params.greedy or any(i == seen for seen, _ in run.divergences):
        return
    stats, batch = completion.stats, run.arm.batch
    widest = max(run.arm.draft_tokens, -(-stats.proposed // max(1, stats.steps)))  # a tree has more nodes than levels
    difference = find_divergence(
        run.arm.llm.target, run.prompts[i], run.plain.texts[i], completion.token_ids, (widest + 1) * batch
    )
    if difference is not None:
        run.divergences.append((i, difference))


def _seed(round_seed: int, prompt: int) -> int:
    return round_seed * 100_003 + prompt
