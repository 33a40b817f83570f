"""`slipstream trace`: one generation, token by token: who proposed what, what stood, and how sure everybody was.

A `Recorder` wraps the drafter and looks on: `observe` already shows a drafter everything that happened in a round (the
draft, the target's logits, the verdict), so the step itself is the same as ever and costs nothing extra when nobody
traces. While tracing, timings mean nothing and none are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import CompositeDrafter, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.core.warp import distributions
from slipstream.drafters.hybrid import Lookup
from slipstream.lab.benchmark import Contender, checkpoints, kept
from slipstream.lab.provenance import provenance
from slipstream.lab.results import Result, recording

if TYPE_CHECKING:
    from slipstream.llm import LLM

WINDOW = 10
"""Rounds over which the rolling acceptance rate is taken."""
ALTERNATIVES = 3
"""Likeliest tokens of the target that are kept for each position."""


@dataclass(frozen=True)
class RejectedToken:
    """A guess that was verified. p, q: its probability under the target and under the drafter's law; q is None where
    the guess was chosen deterministically (a point mass)."""

    token: int
    by: str
    p: float
    q: float | None


@dataclass(frozen=True)
class TokenRecord:
    """One output token.

    by        who proposed it: "target", or the drafter (of a stack, the member).
    round     number of the round, from 0 (prefill); place: its place in the round's tokens, from 0.
    p, q      as in `RejectedToken`; q is None for the target's own tokens too.
    entropy   of the target's law there, in bits.
    rejected  guesses for this place that did not stand.
    top       the likeliest tokens of the target with their probabilities.
    """

    token: int
    drafted: bool
    by: str
    round: int
    place: int
    p: float
    q: float | None
    entropy: float
    rejected: list[RejectedToken]
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class StepRecord:
    """drafted: guesses verified; depth: of the deepest; accepted: how many stood; tokens: output tokens, all in all."""

    drafted: int
    depth: int
    accepted: int
    tokens: int


@dataclass
class Recorder:
    """A drafter that passes everything on to another one and takes notes of one sequence.

    p and entropy are of the law that verification used; where that is a point mass (temperature 0), of the softmax of
    the target's logits.
    """

    drafter: Drafter
    tokens: list[TokenRecord] = field(default_factory=list)
    rounds: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.taps = self.drafter.name, self.drafter.taps

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        return self.drafter.propose(seqs, budget)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self._note(seqs[0], draft, out.logits[: len(draft.nodes(0)) + 1], verdict)
        self.drafter.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
        self.drafter.release(seq_id)

    def _note(self, seq: Sequence, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        run, path, accepted = verdict.run(draft, 0), verdict.path[0], verdict.accepted(0)
        law = target_probs(seq, draft, logits, len(run))  # [1 + N, V]
        who, children = proposers(self.drafter, draft), draft.children(0)
        nodes = [*path, -2]  # -2: no node of its own
        if verdict.cut[0]:  # the last token is a guess that stood: find it
            parent = path[-1] if path else -1
            nodes[-1] = next(n for n in children[parent] if draft.ids[n] == run[-1])
        at = -1
        for place, (token, node) in enumerate(zip(run, nodes, strict=True)):
            row = law[at + 1]
            guesses = [n for n in children.get(at, []) if n != node]
            if node >= 0:  # siblings behind it were never tried
                guesses = [n for n in guesses if n < node]
            values, ids = row.topk(min(ALTERNATIVES, len(row)))
            self.tokens.append(
                TokenRecord(
                    token=token,
                    drafted=place < accepted,
                    by=who[node] if node >= 0 else "target",
                    round=len(self.rounds),
                    place=place,
                    p=float(row[token]),
                    q=_q(draft, node, token) if node >= 0 else None,
                    entropy=float(-(row * row.clamp(min=1e-300).log2()).sum()),
                    rejected=[
                        RejectedToken(draft.ids[n], who[n], float(row[draft.ids[n]]), _q(draft, n, draft.ids[n]))
                        for n in guesses
                    ],
                    top=list(zip(ids.tolist(), values.tolist(), strict=True)),
                )
            )
            at = node
        depths = draft.depths
        if seq.finish:
            depths = [d for d in depths if d <= len(run)]  # as in the counters: nobody would have used them
        self.rounds.append(StepRecord(len(depths), max(depths, default=0), accepted, len(run)))


def target_probs(seq: Sequence, draft: Draft, logits: Tensor, emitted: int) -> Tensor:
    """float64 [1 + N, V]: the laws that verification used, or at temperature 0 the softmax. The sequence has already
    moved on by `emitted` tokens."""
    if seq.params.greedy:
        return torch.softmax(logits.double(), -1).cpu()
    before = copy(seq)
    before.tokens = seq.tokens[: len(seq.tokens) - emitted]
    return distributions(logits, [before], draft).cpu()


class RecordedMember:
    """A member of a stack that is passed on to, and remembers what it proposed for the traced sequence."""

    def __init__(self, member: Drafter):
        self.member, self.name, self.taps = member, member.name, member.taps
        self.paths: set[tuple[int, ...]] = set()

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        draft = self.member.propose(seqs, budget)
        self.paths = {tuple(path) for path in paths(draft)}
        return draft

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self.member.observe(seqs, draft, out, verdict)
        self.paths = set()  # whoever is not asked in the next round proposes nothing in it

    def release(self, seq_id: int) -> None:
        self.member.release(seq_id)


class RecordedLookup(RecordedMember):
    """The same of a lookup, which stacks also ask how long its match was, and how it goes on behind foreign guesses."""

    member: Lookup

    def match_length(self, seq_id: int) -> int:
        return self.member.match_length(seq_id)

    def continue_from(self, seq: Sequence, guesses: Seq[int], depth: int) -> tuple[list[int], int]:
        more, match = self.member.continue_from(seq, guesses, depth)
        self.paths |= {(*guesses, *more[: i + 1]) for i in range(len(more))}
        return more, match


def with_recorded_members(drafter: Drafter) -> Drafter:
    """The drafter; the members of a stack, if it is one, each behind a witness."""
    if isinstance(drafter, CompositeDrafter):
        drafter.members = tuple(
            RecordedLookup(m) if isinstance(m, Lookup) else RecordedMember(m) for m in drafter.members
        )
    return drafter


def paths(draft: Draft) -> list[list[int]]:
    """The tokens from the root down to each node of the first sequence."""
    return [[draft.ids[n] for n in draft.ancestors(0, node)] for node in range(len(draft.nodes(0)))]


def proposers(drafter: Drafter, draft: Draft) -> list[str]:
    """Who proposed each node: the drafter, or the first member of a stack that had this very path in its draft."""
    members = drafter.members if isinstance(drafter, CompositeDrafter) else ()
    witnesses = [m for m in members if isinstance(m, RecordedMember)]
    return [next((w.name for w in witnesses if path in w.paths), drafter.name) for path in map(tuple, paths(draft))]


def _q(draft: Draft, node: int, token: int) -> float | None:
    return None if draft.q is None else float(draft.q[node, token])


def rolling(rounds: Seq[StepRecord], window: int = WINDOW) -> list[dict[str, Any]]:
    """The acceptance rate after each round that drafted: over the last `window` such rounds, and since the beginning.
    token: number of output tokens by then."""
    points, seen, done = [], [], 0
    for each in rounds:
        done += each.tokens
        if each.drafted:
            seen.append(each)
            recent = seen[-window:]
            points.append(
                {
                    "token": done,
                    "rate": sum(r.accepted for r in recent) / sum(r.drafted for r in recent),
                    "overall": sum(r.accepted for r in seen) / sum(r.drafted for r in seen),
                }
            )
    return points


def trace(
    llm: LLM,
    contender: Contender,
    prompt: str | Seq[int],
    params: SamplingParams,
    out: str | Path | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    name: str = "prompt",
) -> Result:
    """Generate once and record everything. advance: called after each round with the tokens so far."""
    settings = {
        "contender": contender.label,
        "draft_tokens": contender.draft_tokens,
        "window": WINDOW,
        "law": "softmax" if params.greedy else "law",
        "params": asdict(params),
    }
    result = Result("trace", settings, provenance(llm, params.seed, drafts=checkpoints([contender])))
    llm.use(contender.drafter, **contender.options)
    llm.draft_tokens = contender.draft_tokens
    recorder = Recorder(with_recorded_members(llm.drafter))  # type: ignore[attr-defined]
    llm.use(recorder)
    seq = llm.sequence(prompt, params)
    show = llm.tokenizer.decode if llm.tokenizer is not None else str

    def collect() -> dict[str, Any]:
        text = [show([token]) for token in seq.tokens[: seq.prompt]]
        used = sorted({i for t in recorder.tokens for i in (t.token, *(g.token for g in t.rejected), *dict(t.top))})
        return {
            "prompt": {"name": name, "text": "".join(text), "tokens": seq.prompt},
            "tokens": [asdict(token) for token in recorder.tokens],
            "pieces": pieces(llm, seq),
            "vocabulary": {token: show([token]) for token in used},
            "rounds": [asdict(each) for each in recorder.rounds],
            "rolling": rolling(recorder.rounds),
            "stats": {k: v for k, v in seq.stats.as_dict().items() if "second" not in k},
            "finish": seq.finish,
        }

    with kept(result), recording(result, out, collect):
        for _ in llm.decode([seq]):
            advance(len(recorder.tokens))
    if seq.stats.drafter_faults:
        result.warnings.append(f"the drafter failed {seq.stats.drafter_faults} times, plain decoding went on instead")
    return result


def pieces(llm: LLM, seq: Sequence) -> list[str]:
    """The text that each output token added; joined, they are the text."""
    from slipstream.models.text import TextStream, decoder_of

    if llm.tokenizer is None:
        return [f" {token}" for token in seq.output]
    stream = TextStream(decoder_of(llm.tokenizer))
    for token, drafted in zip(seq.output, seq.drafted, strict=True):
        stream.push(token, drafted)
    return [piece.text for piece in stream.finish(None)] if seq.output else []
