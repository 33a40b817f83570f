"""Samples whole texts, and collects the evidence that `outcomes` tests: each token against the target's distribution,
which `reference` computes, not the code under test."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.core.draft import Draft, Verdict
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence, is_coupled, request_ids
from slipstream.core.stats import SpecStats
from slipstream.core.target import TargetOut
from slipstream.llm import LLM
from slipstream.verify import outcomes
from slipstream.verify.outcomes import Evidence
from slipstream.verify.panel_requests import PanelRequest, together
from slipstream.verify.reference import Context, distribution, impossible, logits_of, wrong_end, wrong_logprob
from slipstream.verify.replay import EndStream, Probe, wrong_step
from slipstream.verify.report_verify import Control

Ranks = tuple[float, float]
"""u_t and v_t of a token (see `outcomes`)."""
KEPT = 256
"""Number of most likely tokens of q that are stored for each position."""


@dataclass(frozen=True)
class Proposal:
    """Describes the drafter's proposal at one position.

    behind   True if an accepted draft token precedes this position in its step.
    ids, q   tokens that the drafter may propose, and their probabilities; or the proposed tokens and None, if they were
             chosen deterministically. Both None without a draft token, or if draft tokens depend on the random numbers
             of verification, as under `coupled`.
    probe    logits of the pass that decided the token; None if several tokens were decoded in one call.
    """

    place: str
    behind: bool = False
    ids: np.ndarray | None = None
    q: np.ndarray | None = None
    probe: Probe | None = None

    def find_favoured(self, p: np.ndarray) -> np.ndarray | None:
        """Return the tokens that are more likely in the draft than in the target (without q: all proposed tokens)."""
        if self.ids is None:
            return None
        return np.unique(self.ids) if self.q is None else self.ids[self.q > p[self.ids]]


@dataclass
class Positions:
    """Collects the evidence of a run.

    control   how much rounding changes logits.
    seed      seed of the random shares of the ranks.
    proposed  the proposal at each output position of each sequence.
    faults    errors in single texts that chance cannot explain.
    further   additional places to which all later positions are added.

    Places in the step are separate if the rule decides token by token (see `outcomes`).
    """

    llm: LLM
    drafter: Any
    control: Control
    seed: int = 0
    evidence: dict[str, Evidence] = field(default_factory=lambda: defaultdict(Evidence))
    proposed: dict[int, dict[int, Proposal]] = field(default_factory=lambda: defaultdict(dict))
    stats: SpecStats = field(default_factory=SpecStats)
    faults: list[str] = field(default_factory=list)
    further: Seq[str] = ()

    def __post_init__(self) -> None:
        self._shares = np.random.default_rng(self.seed)
        self._by_place = self.llm.rule.tokenwise

    @contextmanager
    def _note_proposals(self) -> Iterator[None]:
        observe = self.drafter.observe

        def note(seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
            for b, seq in enumerate(seqs):
                self._note(seq, draft, b, out, verdict)
            observe(seqs, draft, out, verdict)

        self.drafter.observe = note
        try:
            yield
        finally:
            del self.drafter.observe

    def _note(self, seq: Sequence, draft: Draft, b: int, out: TargetOut, verdict: Verdict) -> None:
        run, children, start = verdict.run(draft, b), draft.children(b), draft.splits[b]

        def row_of(node: int) -> np.ndarray:
            return out.logits[start + b + 1 + node, : self.llm.target.vocab_size].double().cpu().numpy()  # [V]

        wrong = wrong_step(seq, draft, b, verdict, row_of, (seq.rule or self.llm.rule).name == "rejection")
        self.faults += [wrong] if wrong else []
        first = len(seq.output) - len(run)
        for depth, parent in enumerate((-1, *verdict.path[b])[: len(run)], 1):
            nodes = [start + node for node in children.get(parent, [])]
            place = self._place(depth, bool(nodes), bool(children))
            ids = q = None
            if nodes and self._by_place and not is_coupled(seq):
                ids = np.array([draft.ids[node] for node in nodes])
                if draft.q is not None:
                    row = draft.q[nodes[0]].cpu().numpy()  # [V]
                    ids = np.argpartition(-row, min(KEPT, len(row) - 1))[:KEPT]
                    q = row[ids]
            probe = Probe.of(row_of(parent), run[depth - 1])
            self.proposed[seq.id][first + depth - 1] = Proposal(place, depth > 1 and self._by_place, ids, q, probe)

    def _place(self, depth: int, proposed: bool, drafted: bool) -> str:
        if not self._by_place:
            return outcomes.ALL
        if proposed:
            return outcomes.DRAFTED.format(depth) if depth < 3 else outcomes.DEEPER
        return outcomes.BONUS if drafted else outcomes.UNDRAFTED

    def decode(
        self, requests: Seq[PanelRequest], seeds: Iterator[int], batch: int, advance: Callable[[], None]
    ) -> list[list[int]]:
        """Sample a text for each request with the drafter, and add the positions of the texts. Returns the outputs."""
        with self._note_proposals():
            seqs = together(self.llm, self.drafter, requests, map(Stream, seeds), batch)
        beside: list[float] = []  # v_t of the previous request
        for request, seq in zip(requests, seqs, strict=True):
            self.stats += seq.stats
            wrong = wrong_end(seq)
            self.faults += [f"{request.name}: {wrong}"] if wrong else []
            placed = self._text(request, seq)
            for (u, _), (after, _) in zip(placed[::2], placed[1::2], strict=False):
                self.evidence[outcomes.ALL].neighbours(u, after)
            second = [v for _, v in placed]
            for v, other in zip(second, beside, strict=False):
                self.evidence[outcomes.BY_REQUEST].pair(v, other)
            beside = second
            advance()
        return [seq.output for seq in seqs]

    def decode_at_ends(self, requests: Seq[PanelRequest], seeds: Iterator[int], batch: int) -> None:
        """Decode with extreme random numbers (see `EndStream`), and replay each step. These tokens are not samples."""
        with self._note_proposals():
            together(self.llm, self.drafter, requests, map(EndStream, seeds), batch)
        self.proposed.clear()

    def _text(self, request: PanelRequest, seq: Sequence) -> list[Ranks]:
        text, placed = seq.output, list[Ranks]()
        proposed, undrafted = self.proposed.pop(seq.id, {}), Proposal(self._place(1, False, False))
        for t, logits in enumerate(logits_of(self.llm.target, request_ids(seq), text, seq.params)):
            if seq.params.logprobs is not None:
                wrong = wrong_logprob(logits, text[t], seq.logprobs[t], self.control.noise)
                self.faults += [f"{request.name}: token {t}: {wrong}"] if wrong else []
            context = (seq.params, seq.tokens[: seq.prompt], text[:t], seq.stop_ids)
            proposal = proposed.get(t, undrafted)
            moved = 0.0 if proposal.probe is None else proposal.probe.measure_move(logits)
            if moved > self.control.limit:
                self.faults.append(f"{request.name}: logits before token {t} are off by {moved:.2g}")
            placed += self._token(logits, context, text[t], proposal, placed[-1:])
        return placed

    def _token(
        self, logits: np.ndarray, context: Context, token: int, proposal: Proposal, last: Seq[Ranks]
    ) -> list[Ranks]:
        """Compute the ranks of the token; [] if the target forbids it. last: ranks of the previous token, if any."""
        p = distribution(logits, context)
        params, prompt, output, _ = context
        never = None
        if p[token] == 0 or params.top_k or params.top_p < 1 or params.min_p:
            never = impossible(p, logits, context, self.control.noise)
        if p[token] == 0:
            # By rounding, a filter may keep a token that this reference drops. Such a token is not in `never`.
            self.evidence[proposal.place].forbidden += bool(never[token])  # type: ignore[index]
            return []
        edge = never is not None and bool((never == (p == 0)).all())
        tested = outcomes.sets(p, proposal.find_favoured(p), context, edge)
        inside = [(name, bool((ids == token).any()), float(p[ids].sum())) for name, ids in tested if len(ids)]
        u, v = outcomes.ranks(p, token, self._shares.random())
        late = len(prompt) + len(output) >= outcomes.LATE_FROM
        pooled = [outcomes.ALL, *[outcomes.BEHIND] * proposal.behind, *[outcomes.LATE] * late, *self.further]
        for place in {proposal.place, *pooled}:
            self.evidence[place].token(u, v, inside)
            for _, before in last:
                self.evidence[place].pair(v, before)
        return [(u, v)]
