"""Tests every sampled token against the target's distribution at its position, over whole texts.

Whatever was drafted, an exact rule emits token x_t with the target's probability p_t(x_t | x_<t). Two statistics
follow, each a sum over positions of terms whose distribution is known before the token is drawn:

    ranks     u_t, the mass of all tokens that are more likely than x_t, plus a uniform share of the mass of x_t itself,
              is uniform on [0, 1) and independent from position to position (Rosenblatt 1952, with a random share
              because tokens are discrete: Smith 1985). A chi-squared test over equal bins.
    favoured  how often x_t is a token that the draft makes more likely than the target does (q > p; without q, one of
              the proposed tokens), against the sum of the target's mass of those tokens. A normal test. An acceptance
              that is too generous shows here first.

Both are pooled over texts, prompts and draft lengths, and kept apart by the place in the step: a fault of the bonus
token must not drown in correct draft tokens. That is valid if a token has the target's distribution *given that its
position was reached*, which holds for `rejection` and `coupled` but not for `block`, whose verdict on the beginning of
a chain depends on its end. For such a rule all positions are one place, and only ranks are tested.

The target's distribution is that of `verify_reference`, not that of the code under test.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.core.target import TargetOut
from slipstream.lab.verify_reference import distribution, impossible, logits_of

if TYPE_CHECKING:
    from slipstream.llm import LLM

DRAFTED, DEEPER, BONUS, UNDRAFTED, ALL = (
    "draft token {}", "draft token 3 or deeper", "bonus token", "without a draft", "all positions"
)  # fmt: skip
PLACES = (DRAFTED.format(1), DRAFTED.format(2), DEEPER, BONUS, UNDRAFTED, ALL)
BINS = 16
FEWEST = 5 * BINS
"""Fewest positions of a place for the test of ranks: an expected count of five in each bin."""
SMALLEST_VARIANCE = 20.0
"""Smallest variance of the number of favoured tokens for a normal approximation."""
KEPT = 256
"""Most tokens of q that are kept for each position: the most likely ones."""


@dataclass(frozen=True)
class Proposal:
    """What the drafter proposed at one position.

    drafted  whether the position has a draft token.
    ids, q   tokens that it may propose with their probabilities, or the proposed tokens and None if they were chosen
             deterministically. No ids if they depend on the random numbers of verification, as under `coupled`.
    """

    place: str
    drafted: bool = False
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    q: np.ndarray | None = None


class Witness:
    """Wraps a drafter and notes, for each output token after the first, what was proposed at its position."""

    def __init__(self, drafter: Drafter, by_place: bool):
        self.drafter, self.by_place = drafter, by_place
        self.name, self.taps = drafter.name, drafter.taps
        self.seen: dict[int, list[Proposal]] = defaultdict(list)

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        return self.drafter.propose(seqs, budget)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            self.seen[seq.id] += self._proposals(seq, draft, b, verdict)
        self.drafter.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
        self.drafter.release(seq_id)

    def _proposals(self, seq: Sequence, draft: Draft, b: int, verdict: Verdict) -> list[Proposal]:
        run, children, start = verdict.run(draft, b), draft.children(b), draft.splits[b]
        found = []
        for depth, parent in enumerate((-1, *verdict.path[b])[: len(run)], 1):
            nodes = [start + node for node in children.get(parent, [])]
            place = self._place(depth, bool(nodes), bool(children))
            ids = q = None
            if nodes and not seq.coupled:
                ids = np.array([draft.ids[node] for node in nodes])
                if draft.q is not None:
                    row = draft.q[nodes[0]].cpu().numpy()  # [V]
                    ids = np.argpartition(-row, min(KEPT, len(row) - 1))[:KEPT]
                    q = row[ids]
            found.append(Proposal(place, bool(nodes)) if ids is None else Proposal(place, True, ids, q))
        return found

    def _place(self, depth: int, proposed: bool, drafted: bool) -> str:
        if not self.by_place:
            return ALL
        if proposed:
            return DRAFTED.format(depth) if depth < 3 else DEEPER
        return BONUS if drafted else UNDRAFTED


@dataclass
class Evidence:
    """The sums over the positions of one place.

    ranks      counts of u_t in equal bins.
    favoured   sum over positions with a draft of (is x_t favoured?) - (mass of the favoured tokens); variance: of it.
    proposed   number of positions with a draft.
    forbidden  tokens that the target cannot emit.
    """

    ranks: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    favoured: float = 0.0
    variance: float = 0.0
    proposed: int = 0
    forbidden: int = 0

    @property
    def positions(self) -> int:
        return int(self.ranks.sum()) + self.forbidden


@dataclass
class Positions:
    """Collects the evidence of a run.

    noise  largest change of a logit by rounding.
    seed   of the random shares of the ranks.
    """

    llm: LLM
    drafter: Drafter
    noise: float = 0.0
    seed: int = 0
    found: dict[str, Evidence] = field(default_factory=dict)
    stats: SpecStats = field(default_factory=SpecStats)

    def __post_init__(self) -> None:
        self._shares = np.random.default_rng(self.seed)

    def decode(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], seeds: Seq[int], draft_tokens: int) -> None:
        """Samples one text for each prompt, all in one batch, and adds their positions."""
        llm = self.llm
        witness = Witness(self.drafter, llm.rule.tokenwise)
        before = llm.max_batch, llm.draft_tokens
        llm.use(witness)
        llm.max_batch, llm.draft_tokens = len(prompts), draft_tokens
        try:
            seqs = [llm.sequence(list(prompt), each) for prompt, each in zip(prompts, params, strict=True)]
            for seq, seed in zip(seqs, seeds, strict=True):
                seq.random = Stream(seed)
            for _ in llm.decode(seqs):
                pass
        finally:
            llm.max_batch, llm.draft_tokens = before
            llm.use(self.drafter)
        for seq in seqs:
            self.stats += seq.stats
            self._text(seq, witness.seen[seq.id])

    def _text(self, seq: Sequence, proposals: Seq[Proposal]) -> None:
        text = seq.output
        for t, logits in enumerate(logits_of(self.llm.target, seq.asked, text, seq.params)):
            self._token(seq, logits, text[:t], text[t], proposals[t])

    def _token(self, seq: Sequence, logits: np.ndarray, output: Seq[int], token: int, proposal: Proposal) -> None:
        context = (seq.params, seq.tokens[: seq.prompt], output, seq.stop_ids)
        p = distribution(logits, *context)
        row = self.found.setdefault(proposal.place, Evidence())
        if p[token] == 0:
            # Where rounding decides at the border of a filter, a token may be kept that is dropped here.
            row.forbidden += bool(impossible(p, logits, *context, self.noise)[token])
            return
        u = p[p > p[token]].sum() + self._shares.random() * p[p == p[token]].sum()
        row.ranks[min(BINS - 1, int(u * BINS))] += 1
        row.proposed += proposal.drafted
        if len(proposal.ids):
            favoured = proposal.ids if proposal.q is None else proposal.ids[proposal.q > p[proposal.ids]]
            mass = min(1.0, float(p[np.unique(favoured)].sum()))
            row.favoured += float(token in favoured) - mass
            row.variance += mass * (1 - mass)


@dataclass(frozen=True)
class PlaceTest:
    """The tests of one place. ranks, favoured: p-values, None if there is too little to test. shift: by how much
    favoured tokens are more frequent than they should be, as a share of the positions with a draft."""

    place: str
    positions: int
    proposed: int
    forbidden: int
    ranks: float | None
    favoured: float | None
    shift: float | None

    @property
    def p(self) -> list[float]:
        """The p-values there are; 0 alone if an impossible token was emitted."""
        return [0.0] if self.forbidden else [p for p in (self.ranks, self.favoured) if p is not None]

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def tested(place: str, row: Evidence) -> PlaceTest:
    from slipstream.lab.verify_distribution import chi2_sf

    n = int(row.ranks.sum())
    ranks = favoured = None
    if n >= FEWEST:
        ranks = chi2_sf(float(((row.ranks - n / BINS) ** 2).sum() / (n / BINS)), BINS - 1)
    if row.variance >= SMALLEST_VARIANCE and place != ALL:
        favoured = math.erfc(abs(row.favoured) / math.sqrt(2 * row.variance))
    shift = row.favoured / row.proposed if favoured is not None else None
    return PlaceTest(place, row.positions, row.proposed, row.forbidden, ranks, favoured, shift)
