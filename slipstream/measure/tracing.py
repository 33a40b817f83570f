"""`slipstream trace`: records, for each token of one generation, its proposer, whether it was accepted, and its
probabilities.

A `Recorder` wraps the drafter. A drafter's `observe` gets the draft, the target's logits and the verdict of each step
anyway, so decoding is unchanged and has no overhead without tracing. Tracing slows decoding down, so no timings are
recorded.
"""

from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence, request_ids
from slipstream.core.target import TargetOut
from slipstream.core.warp import distributions
from slipstream.llm import LLM
from slipstream.measure.configs import Contender
from slipstream.measure.measured_steps import WrappedDrafter
from slipstream.measure.measurements import RollingRate, TraceData, TracedStep, TracedToken, TriedToken
from slipstream.measure.provenance import note_drafts, note_provenance
from slipstream.measure.results import Result, record
from slipstream.tokens.text import TextStream, decoder_of, token_text_of

WINDOW = 10
"""Number of steps of the rolling acceptance rate."""


class Recorder(WrappedDrafter):
    """Records the tokens and the steps of one sequence."""

    def __init__(self, drafter: Drafter):
        super().__init__(drafter)
        self.tokens: list[TracedToken] = []
        self.steps: list[TracedStep] = []

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self._note(seqs[0], draft, out.logits[: len(draft.nodes(0)) + 1], verdict)
        super().observe(seqs, draft, out, verdict)

    def _note(self, seq: Sequence, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        run, path, accepted = verdict.run(draft, 0), verdict.path[0], verdict.count_accepted(0)
        probs = compute_target_probs(seq, draft, logits, len(run))  # [1 + N, V]
        children = draft.children(0)
        who = [name or self.name for name in draft.by or [""] * len(draft)]  # the proposer of each node
        nodes = [*path, -2]  # -2: not a node of the draft
        if verdict.cut[0]:  # the last token is an accepted draft token: find its node
            parent = path[-1] if path else -1
            nodes[-1] = next(n for n in children[parent] if draft.ids[n] == run[-1])
        at = -1
        for place, (token, node) in enumerate(zip(run, nodes, strict=True)):
            row = probs[at + 1]
            tried = children.get(at, [])  # siblings after the accepted node were not tried
            lost = [_describe_token(draft, n, row, who) for n in tried if n < node or node < 0]
            own = TriedToken(token, "target", float(row[token]), None)
            head = _describe_token(draft, node, row, who) if node >= 0 else own
            self.tokens.append(TracedToken(**vars(head), drafted=place < accepted, step=len(self.steps), place=place,
                                           rejected=lost))  # fmt: skip
            at = node
        depths = draft.depths
        if seq.finish:
            depths = [d for d in depths if d <= len(run)]  # like the counters, without tokens after the end of the text
        self.steps.append(TracedStep(len(depths), accepted, len(run)))


def compute_target_probs(seq: Sequence, draft: Draft, logits: Tensor, emitted: int) -> Tensor:
    """Return float64 [1 + N, V]: the distributions that verification used, or, at temperature 0, the softmax of the
    logits. `seq` already contains the `emitted` tokens of this step."""
    if seq.params.greedy:
        return torch.softmax(logits.double(), -1).cpu()
    before = copy(seq)
    before.tokens = seq.tokens[: len(seq.tokens) - emitted]
    return distributions(logits, [before], draft).cpu()


def _describe_token(draft: Draft, node: int, row: Tensor, who: Seq[str]) -> TriedToken:
    token = draft.ids[node]
    return TriedToken(token, who[node], float(row[token]), None if draft.q is None else float(draft.q[node, token]))


def compute_rolling(steps: Seq[TracedStep], window: int = WINDOW) -> list[RollingRate]:
    """Compute the acceptance rate after each step that drafted."""
    points, drafting, done = [], list[TracedStep](), 0
    for each in steps:
        done += each.tokens
        if each.drafted:
            drafting.append(each)
            points.append(RollingRate(done, _rate(drafting[-window:]), _rate(drafting)))
    return points


def _rate(steps: Seq[TracedStep]) -> float:
    return sum(each.accepted for each in steps) / sum(each.drafted for each in steps)


def trace(
    llm: LLM,
    contender: Contender,
    prompt: str | Seq[int],
    params: SamplingParams,
    out: str | Path | None = None,
    name: str = "prompt",
) -> Result:
    """Generate one text, and record its tokens and steps."""
    settings = {
        "contender": contender.label,
        "draft_tokens": contender.draft_tokens,
        "window": WINDOW,
        "distribution": "softmax" if params.greedy else "warped",
        "params": asdict(params),
    }
    result = Result("trace", settings, note_provenance(llm, params.seed, drafts=note_drafts([contender])))
    llm.use(contender.drafter, **contender.options)
    llm.draft_tokens = contender.draft_tokens
    recorder = Recorder(llm.drafter)
    llm.use(recorder)
    seq = llm.sequence(prompt, params)
    show = token_text_of(llm.tokenizer) if llm.tokenizer is not None else str

    def collect() -> TraceData:
        text = [show(token) for token in request_ids(seq)]
        used = sorted({each.token for token in recorder.tokens for each in (token, *token.rejected)})
        return TraceData(
            prompt={"name": name, "text": "".join(text), "tokens": len(text)},
            tokens=recorder.tokens,
            pieces=split_text(llm, seq),
            vocabulary={str(token): show(token) for token in used},
            steps=recorder.steps,
            rolling=compute_rolling(recorder.steps),
            stats={k: v for k, v in seq.stats.as_dict().items() if "second" not in k},
            finish=seq.finish,
        )

    with record(result, out, collect):
        for _ in llm.decode([seq]):
            pass
    if seq.stats.drafter_faults:
        result.warnings.append(f"the drafter failed {seq.stats.drafter_faults} times; plain decoding continued instead")
    return result


def split_text(llm: LLM, seq: Sequence) -> list[str]:
    """Return the text that each output token adds; joined, these are the output text."""
    if llm.tokenizer is None:
        return [f" {token}" for token in seq.output]
    stream = TextStream(decoder_of(llm.tokenizer), prompt=seq.tokens[: seq.prompt])
    return [piece.text for piece in stream.add(seq.output, seq.was_drafted(), last=True)]
