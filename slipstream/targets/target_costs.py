"""Measures costs on this machine: of a target, of drafting for it, and of its early exits, with the share of tokens on
which an exit agrees with the whole model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import torch

from slipstream.checkpoints.module_shape import ModelShape
from slipstream.core.draft import Draft
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams, check_integer
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.core.step import step
from slipstream.core.target import EARLY_EXIT, EarlyExit, Target, release_after, require
from slipstream.errors import ParameterError
from slipstream.host.torch_threads import host_threads
from slipstream.theory.closed_forms import best_gamma, speedup
from slipstream.theory.cost_curve import CostCurve

ROWS = (1, 2, 4, 8, 16, 32)
PRIOR_ROWS, KEPT = 16.0, 0.98
"""Weight of the prior of `ExpertReads`, in rows; and the weight that older passes keep after each pass."""


class ExpertReads:
    """Estimates the cost of a pass over n rows of a mixture of experts, divided by the cost of a pass over one row.

    A pass reads the union of the experts that its rows choose. If rows chose independently, n rows would choose E * (1
    - (1 - k / E)^n) of E experts, k per row. Rows of a text choose similar experts, so n rows count as 1 + `apart` * (n
    - 1). `apart` starts at 1, and is learned from the number of experts that passes read. Requires E > k."""

    def __init__(self, always: float, each: float, layers: int, experts: tuple[int, int]):
        """always: number of weights outside of experts. each: number of weights of one expert, over all layers. layers:
        number of layers with experts. experts: see `Capabilities`."""
        self._always, self._each, self._layers, (self._picked, self._count) = always, each, layers, experts
        self._rows = self._apart = PRIOR_ROWS

    @staticmethod
    def of(config: ModelShape) -> ExpertReads | None:
        """Return None if every pass reads the same weights, or if it is unknown which layers have experts."""
        experts = config.experts
        if experts is None or experts.per_token >= experts.count or not any(experts.layers):
            return None
        each = config.mixed_parameters / experts.count
        always = config.step_parameters - experts.per_token * each
        return ExpertReads(always, each, sum(experts.layers), (experts.per_token, experts.count))

    def __call__(self, rows: float) -> float:
        apart = self._apart / self._rows
        union = self._count * (1 - (1 - self._picked / self._count) ** (1 + apart * max(0, rows - 1)))
        return (self._always + self._each * union) / (self._always + self._each * self._picked)

    def learn(self, rows: int, experts_read: int) -> None:
        """Learn from a pass. experts_read: sum over all layers. Passes over more rows read nearly all experts, and
        teach nothing."""
        if not 1 < rows <= ROWS[-1]:
            return
        union = min(experts_read / self._layers, self._count - 0.5)
        counted = math.log1p(-union / self._count) / math.log1p(-self._picked / self._count)
        self._rows = KEPT * self._rows + rows - 1
        self._apart = KEPT * self._apart + min(rows, max(1.0, counted)) - 1


def measure_costs(
    target: Target, rows: Seq[int] = ROWS, past: int = 64, repeats: int = 7, plain: bool = False
) -> CostCurve:
    """Measure the median seconds of one forward pass over `rows` rows of a sequence that holds `past` tokens; row
    counts are interleaved.

    A runtime may prepare its kernels again whenever the number of rows changes. In plain decoding the number never
    changes, so a pass over one row is timed after another pass over one row. With speculation the number changes
    sometimes; passes over more rows are timed after a pass over one row, too.

    Takes 2 * len(rows) * (repeats + 1) forward passes, a fifth of a second for a small model. It creates and releases
    its own sequence; running sequences are not touched. Row counts that the target's context cannot hold are left out.

    rows   increasing, beginning with 1. Raises ParameterError otherwise.
    plain  True: one row costs as much as a step of plain decoding, of which several may run in one call (see
           `core.plain`). False: one row costs as much as a single step without a draft."""
    if not rows or rows[0] != 1 or list(rows) != sorted(set(rows)):
        raise ParameterError(f"rows is {tuple(rows)}", fix="give increasing numbers that begin with 1")
    check_integer("past", past, 1)
    check_integer("repeats", repeats, 1)
    rows = [n for n in rows if n == 1 or n + 1 <= target.context]
    past = max(1, min(past, target.context - max(rows)))
    with release_after(target, neutral_text(target, past + 1)) as seq:
        pending = seq.tokens.pop()  # read in each pass: recurrent layers cannot roll back a prompt
        target.run([seq], Draft.empty(1, target.device))
        target.commit([seq], [[]])
        seq.kv_len = past
        seq.tokens.append(pending)
        times: dict[int, list[float]] = {n: [] for n in rows}
        for index in range(repeats + 1):
            for n in rows:
                _forward(target, seq, 1)
                seconds = _plain(target, seq) if plain and n == 1 else _forward(target, seq, n)
                if index:  # the first repetition binds buffers and packs weights
                    times[n].append(seconds)
        return CostCurve.monotone(rows, [statistics.median(times[n]) for n in rows])


def measure_draft_costs(
    target: Target, drafter: Drafter, lengths: Seq[int], past: int = 64, repeats: int = 5
) -> CostCurve:
    """Measure the median seconds of drafting in a greedy step with n draft tokens, after another step of that length.
    Includes proposing and observing, and the time of verification above a plain decode step. `rows` of the curve are
    draft tokens, or levels of trees. lengths: increasing, from 1; lengths beyond the target's context are left out.

    Decodes a made-up text for 2 * (len(lengths) + 1) * (repeats + 1) steps (fewer if the target's context is too short)
    and releases the text; running sequences are not affected."""
    lengths = list(lengths)
    while len(lengths) > 1 and 2 * _pass_tokens(lengths) + 3 > target.context:
        lengths.pop()
    pass_tokens = _pass_tokens(lengths)
    passes = max(2, min(repeats + 1, (target.context - 3) // pass_tokens))
    past = max(1, min(past, target.context - passes * pass_tokens - 2))
    seq = neutral_text(target, past, SamplingParams(max_tokens=passes * pass_tokens + 2, seed=0))
    times: dict[int, list[float]] = {n: [] for n in lengths}

    def time_step(draft_tokens: int) -> dict[str, float]:
        """Return the seconds of a step by phase."""
        before = dict(seq.stats.seconds)
        step([seq], target, drafter, RULES["rejection"], draft_tokens)
        return {phase: seconds - before[phase] for phase, seconds in seq.stats.seconds.items()}

    try:
        time_step(0)
        for i in range(passes):
            time_step(0)  # a runtime may prepare kernels when the number of rows changes
            plain = time_step(0)
            for n in lengths:
                time_step(n)
                seconds = time_step(n)
                if i:  # the first pass compiles and binds
                    above = seconds["verify"] + seconds["host"] - plain["verify"] - plain["host"]
                    times[n].append(seconds["draft"] + above)
        return CostCurve.monotone(lengths, [max(statistics.median(times[n]), 1e-9) for n in lengths])
    finally:
        target.release(seq.id)
        drafter.release(seq.id)


def _pass_tokens(lengths: Seq[int]) -> int:
    """Return the largest number of tokens that a pass over these lengths adds: two steps of each, two plain ones."""
    return 2 * (sum(lengths) + len(lengths) + 1)


def neutral_text(target: Target, length: int, params: SamplingParams | None = None) -> Sequence:
    """Make a meaningless text of `length` tokens; with a source of equal length if the target has an encoder."""
    ids, encoder = [i % target.vocab_size for i in range(length)], target.capabilities.encoder
    params = params or SamplingParams()
    if encoder is None:
        return Sequence(ids, params)
    return SourcedSequence([*encoder.start, *ids][:length], params, source=ids[: encoder.context])


def _plain(target: Target, seq: Sequence) -> float:
    """Return the seconds of a step of plain decoding; nothing is committed."""
    multi_step = target.capabilities.multi_step
    steps = 1 if multi_step is None else min(multi_step.steps_per_call, target.context - len(seq.tokens))
    runtime = target.capabilities.runtime
    if runtime is not None and runtime.rollback is not None:  # the next pass rolls back to the same token
        steps = min(steps, runtime.rollback)
    if multi_step is None or steps < 2:
        return _forward(target, seq, 1)
    began = perf_counter()
    with host_threads(target.capabilities.torch_threads):
        multi_step.decode_steps([seq], steps)
    return (perf_counter() - began) / steps


def _forward(target: Target, seq: Sequence, rows: int) -> float:
    """Return the seconds of a forward pass over `rows` rows; no draft token is committed."""
    draft = Draft.chains([[i % target.vocab_size for i in range(rows - 1)]], device=target.device)
    began = perf_counter()
    with host_threads(target.capabilities.torch_threads):
        target.run([seq], draft)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    spent = perf_counter() - began
    target.commit([seq], [[]])
    return spent


STARTS, TOKENS, REPEATS = 4, 32, 9


@dataclass(frozen=True)
class Exit:
    """layers     number of layers that run before the exit.
    agreement  share of positions of a greedy text at which the exit's argmax is the whole model's: alpha.
    cost       cost of one draft token in decode steps: drafting it through this exit, plus one more row in the later
               layers to verify it. This is c in the closed forms.
    """

    layers: int
    agreement: float
    cost: float

    @property
    def gamma(self) -> int:
        """Draft length with the greatest expected speed-up, at least 1."""
        return max(1, best_gamma(self.agreement, self.cost))

    @property
    def speedup(self) -> float:
        """Expected speed-up at the draft length `gamma` (Leviathan et al. 2211.17192, theorem 3.8). The formula counts
        a whole pass for verification, although the first layers do not run again. That is right: they run once for each
        draft token, also for the last, so their weights are read as often as with a separate verification."""
        return speedup(self.agreement, self.gamma, self.cost)


def measure_exits(target: Target, text: Seq[int] | None = None) -> list[Exit]:
    """Measure every exit of `target`, 1..layers-1.

    text  token ids to measure agreement on, at least 2; None: greedy texts that the target writes after single tokens.

    Takes a few dozen steps and one pass per layer; running sequences are not touched. Costs are interpolated linearly
    between one layer and all, but are at least the share of the layers: a layer that is timed alone may stay in the
    processor's cache, from which decoding evicts it between steps. Raises the errors of running the target."""
    exits = require(target.capabilities.early_exit, target, EARLY_EXIT, "measure_exits")
    texts = [list(text)[: target.capabilities.max_pending]] if text is not None else _greedy_texts(target)
    layers = exits.layers
    agree, count = [0] * (layers + 1), 0
    for tokens in texts:
        seq, rest = Sequence(tokens[:1]), Draft.chains([tokens[1:]], device=target.device)
        hidden, picks = None, []
        with release_after(target, seq):
            for i in range(layers):
                out = exits.run_layers([seq], rest, (i, i + 1), hidden)
                picks.append(out.logits.argmax(-1))  # [n]
                hidden = out.hidden[i + 1].clone()  # [n, d]
        for i in range(layers):
            agree[i + 1] += int((picks[i] == picks[-1]).sum())
        count += len(tokens)
    first, whole, row = _seconds(target, exits)
    each = max(0.0, whole - first) / (layers - 1) if layers > 1 else 0.0

    def cost(e: int) -> float:
        draft = max((first + (e - 1) * each) / whole, e / layers)
        return min(1.0, draft + row / whole * (1 - e / layers))

    return [Exit(e, agree[e] / count, cost(e)) for e in range(1, layers)]


def _greedy_texts(target: Target) -> list[list[int]]:
    length = max(2, min(TOKENS, target.capabilities.max_pending, target.context))
    seqs = [Sequence([(2 * i + 1) * target.vocab_size // (2 * STARTS)]) for i in range(STARTS)]
    with release_after(target, *seqs):
        while len(seqs[0].tokens) < length:
            logits = target.run(seqs, Draft.empty(STARTS, target.device)).logits
            target.commit(seqs, [[]] * STARTS)
            for seq, token in zip(seqs, logits.argmax(-1).tolist(), strict=True):
                seq.kv_len = len(seq.tokens)
                seq.tokens.append(token)
        return [seq.tokens for seq in seqs]


def _seconds(target: Target, exits: EarlyExit) -> tuple[float, float, float]:
    """Return the minimum seconds of one token through the first layer and through all layers, and of each further row;
    interleaved. The minimum of several repetitions is least affected by other load on the machine."""
    seq, more = Sequence([0]), 4
    one, several = Draft.empty(1, target.device), Draft.chains([[0] * more], device=target.device)
    kinds: list[tuple[tuple[int, int] | None, Draft]] = [((0, 1), one), (None, one), (None, several)]
    times: list[list[float]] = [[] for _ in kinds]
    with release_after(target, seq):
        for index in range(REPEATS + 1):
            for (layers, draft), spent in zip(kinds, times, strict=True):
                began = perf_counter()
                if layers is None:
                    target.run([seq], draft)
                else:
                    exits.run_layers([seq], draft, layers)
                if target.device.type == "cuda":
                    torch.cuda.synchronize(target.device)
                if index:  # the first repetition binds buffers and packs weights
                    spent.append(perf_counter() - began)
    first, whole, wide = map(min, times)
    return min(first, whole), whole, max(0.0, wide - whole) / more
