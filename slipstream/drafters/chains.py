"""Drafts chains with a causal model: shared by draft models, the target's own early exit and EAGLE heads.

Each draft token is sampled from the model's distribution, warped by the request's parameters. That distribution is q
(Leviathan et al. 2211.17192, section 2.3). At temperature 0 the draft token is the argmax, a point mass.

If the model decodes several steps in one call, requests whose only sampling parameter is a temperature are drafted in
such calls. Models that pick tokens in float32 use the random numbers of single steps, and the host repeats each pick in
float64 from the returned logits. Where the two picks differ (once in a hundred thousand tokens), the host's token is
kept and the chain ends there: the tokens after it were computed for another prefix. So q is exactly the distribution
that each draft token was drawn from, and a chain's length depends only on the random numbers of the kept tokens.

A fault after a token was drawn may depend on that token: the model may fail, or no token may be possible after it. The
chain then ends with the drawn token, because dropping it, or the whole draft, would bias the output.
"""

import logging
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX_INV_TEMPERATURE, DecodedSteps, StepSampling
from slipstream.core.dice import invert
from slipstream.core.draft import Draft, index_rows
from slipstream.core.drafter import Budget
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence, is_coupled
from slipstream.core.warp import distributions_after, warp
from slipstream.drafters.confidence import ConfidentDrafts
from slipstream.errors import TargetError

log = logging.getLogger("slipstream")


class ChainModel(Protocol):
    """The model that drafts the chains."""

    device: torch.device
    width: int
    """Width V' of the logits; may be larger (padding) or smaller than the target's vocabulary."""
    multi_step: bool
    """Whether `decode_steps` drafts several tokens in one call."""

    def room(self, seq: Sequence) -> int:
        """Return how many tokens fit into the model's context after this sequence."""
        ...

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """Return the logits [R, V'] after each sequence and its draft tokens; all chains are equally long."""
        ...

    def decode_steps(self, seqs: Seq[Sequence], steps: int, draws: StepSampling) -> DecodedSteps:
        """Draw `steps` tokens after each sequence in one call; see `MultiStep`. Called only if `multi_step`. The
        returned logits are not read if `draws` take maxima."""
        ...


@dataclass
class Chain:
    """The draft tokens for one sequence.

    probs  float64 [n, V], the distribution that each draft token was sampled from; None: point masses.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Chains:
    """Drafts chains with `model`. vocab_size: width V of the target's logits. confident: ends chains by confidence;
    None: chains are as long as the budget allows."""

    def __init__(self, model: ChainModel, vocab_size: int, confident: ConfidentDrafts | None = None):
        self.model, self.vocab_size, self.confident = model, vocab_size, confident
        self._vocab = vocab_size if model.width > vocab_size else None  # ids from here on are padding
        self._maxima = StepSampling(vocab=self._vocab)

    def draft(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        """Draft a chain for each sequence, within its budget."""
        chains = [Chain() for _ in seqs]
        if self.confident is not None:
            self.confident.drawn.clear()  # entries left by a step that failed
        # Whether one call drafts a sequence must not depend on the rest of the batch: one call rounds differently from
        # single calls.
        multi_step, other = list[int](), list[int]()
        for b, seq in enumerate(seqs):
            if budgets[b].depth > 0:
                (multi_step if self.model.multi_step and seq.params.temperature_only else other).append(b)
        for rows in part_by_numbers(multi_step, seqs):
            try:
                while rows:
                    rows = self._in_one_call(seqs, rows, budgets, chains)
            except Exception:  # draft single tokens with the same random numbers, up to the fault
                for b in rows:
                    chains[b] = Chain()
                other = sorted({*other, *rows})
        if other:
            self._token_by_token(seqs, other, budgets, chains)
        draft = Draft.chains([chain.tokens for chain in chains], join_probs(chains, self.vocab_size), self.model.device)
        if self.confident is None or not self.confident.drawn:
            return draft
        return draft.with_drawn([len(self.confident.drawn.get(seq.id, ((),))[0]) for seq in seqs])

    def _in_one_call(self, seqs: Seq[Sequence], rows: Seq[int], budgets: Seq[Budget], chains: list[Chain]) -> list[int]:
        """Draft for the sequences `rows`. Returns the rows without room in the context for as many steps."""
        steps = max(budgets[b].depth for b in rows)
        left, drafting = list[int](), list[int]()
        for b in rows:
            (left if self.model.room(seqs[b]) < steps else drafting).append(b)
        members = [seqs[b] for b in drafting]
        draws = self._draws(members, steps)
        if self.confident is not None and any(budget.row_costs for budget in budgets):
            draws = replace(draws, worth=self.confident.worth(members, [budgets[b] for b in drafting]))
        drawn = self.model.decode_steps(members, steps, draws)
        tokens = drawn.tokens.T.tolist()  # [R][K]
        for r, b in enumerate(drafting):
            params, chain, probs = seqs[b].params, tokens[r], None
            most = min(budgets[b].depth, len(drawn.tokens))
            if not params.greedy:
                raw = drawn.logits[:most, r, : self.vocab_size]  # [K, V]
                row_probs = (
                    _warp_chain(raw, params) if drawn.probs is None else drawn.probs[:most, r, : self.vocab_size]
                )
                probs, most = widen(row_probs, self.vocab_size), len(row_probs)
                if not most:
                    continue
                if drawn.probs is None:
                    chain = self._again(probs, raw, draws, r, params)
                    most = next((n for n in range(1, most) if chain[n - 1] != tokens[r][n - 1]), most)
            if self.confident is not None and budgets[b].row_costs:
                confidence = drawn.confidence
                each_top = self._tops(drawn.logits[:, r], params) if confidence is None else confidence[:, r].tolist()
                most = self.confident.count_worth(seqs[b], chain[:most], each_top[:most], budgets[b])
            chains[b] = Chain(chain[:most], None if probs is None else probs[:most])
        return left

    def _tops(self, logits: Tensor, params: SamplingParams) -> list[float]:
        """Return the confidence (see `Worth`) of the tokens drawn from logits [n, V']."""
        temperature = 1.0 if params.greedy else params.divisor
        return torch.softmax(logits[:, : self.vocab_size].double() / temperature, -1).amax(-1).tolist()

    def _again(self, probs: Tensor, raw: Tensor, draws: StepSampling, r: int, params: SamplingParams) -> list[int]:
        """Pick the tokens of row `r` of a multi-step call again, in float64, from its raw logits and `probs` [K, V]."""
        if draws.uniforms is not None:
            return invert(probs, draws.uniforms[: len(probs), r].to(probs.device)).tolist()
        assert draws.noise is not None
        noise = draws.noise[: len(probs), r, : self.vocab_size]
        return (raw[: len(probs)].double() / params.divisor + noise).argmax(-1).tolist()

    def _draws(self, seqs: Seq[Sequence], steps: int) -> StepSampling:
        """Return the random numbers of a call. The random number of a draft token depends neither on the number of
        steps nor on the way of drafting: `sample_draft_tokens` uses the same number. Under the rule `coupled`, it is
        the noise that the target will use at the same position."""
        if all(seq.params.greedy for seq in seqs):
            return self._maxima
        coupled = is_coupled(seqs[0])
        greedy = 1.0 if coupled else ARGMAX_INV_TEMPERATURE  # greedy sequences in the batch have noise 0
        inverse = torch.tensor(
            [greedy if seq.params.greedy else 1 / seq.params.divisor for seq in seqs], dtype=torch.float64
        )
        if coupled:
            noise = torch.stack([self._noise(seq, steps) for seq in seqs], 1)
            return StepSampling(inverse, noise=noise, vocab=self._vocab)
        columns = [
            np.zeros(steps) if seq.params.greedy else seq.random.uniforms(DRAFT, len(seq.tokens), steps) for seq in seqs
        ]
        return StepSampling(inverse, torch.from_numpy(np.stack(columns, 1)), vocab=self._vocab)

    def _noise(self, seq: Sequence, steps: int) -> Tensor:
        """Gumbel noise [K, V'] in float64; zeros for a greedy sequence."""
        noise = np.zeros((steps, max(self.vocab_size, self.model.width)))
        if not seq.params.greedy:
            for j in range(steps):
                noise[j, : self.vocab_size] = seq.random.gumbel(len(seq.tokens) + j, self.vocab_size)
        return torch.from_numpy(noise[:, : self.model.width]).to(self.model.device)

    def _token_by_token(self, seqs: Seq[Sequence], rows: list[int], budgets: Seq[Budget], chains: Seq[Chain]) -> None:
        """Draft for the sequences `rows` with one call of the model per draft token."""
        distributions: list[list[Tensor]] = [[] for _ in seqs]  # per sequence, one [V] per draft token
        tops: list[list[float]] = [[] for _ in seqs]
        first = rows
        while rows:
            members, so_far = [seqs[b] for b in rows], [chains[b].tokens for b in rows]
            try:
                logits = self.model.extend(members, so_far)  # [R, V']
            except Exception as fault:
                if not so_far[0]:
                    raise  # nothing was drawn yet: the step may go on without a draft
                end_early(members, len(so_far[0]), fault)
                break
            probs, dead = find_possible(logits, members, so_far, self.vocab_size)  # [R, V]
            if dead:
                alive = [r for r in range(len(rows)) if r not in dead]
                rows, members, so_far = (
                    [rows[r] for r in alive],
                    [members[r] for r in alive],
                    [so_far[r] for r in alive],
                )
                probs, logits = probs[alive], logits[alive]
                if not rows:
                    break
            tokens = sample_draft_tokens(probs, members, len(so_far[0])).tolist()
            ended = set[int]()
            for r, (b, token) in enumerate(zip(rows, tokens, strict=True)):
                chain = chains[b].tokens
                chain.append(token)
                distributions[b].append(probs[r])
                if self.confident is not None and budgets[b].row_costs:
                    tops[b] += self._tops(logits[r : r + 1], seqs[b].params)
                    if self.confident.count_worth(seqs[b], tuple(chain), tops[b], budgets[b]) < len(chain):
                        del chain[-1], distributions[b][-1]
                        ended.add(b)
            rows = [b for b in rows if len(chains[b].tokens) < budgets[b].depth and b not in ended]
        for b in first:
            if chains[b].tokens:
                chains[b].probs = None if seqs[b].params.greedy else torch.stack(distributions[b])


def part_by_numbers(rows: Seq[int], seqs: Seq[Sequence]) -> list[list[int]]:
    """Split sequences by the random numbers that they draft with: their own, or the target's (rule `coupled`)."""
    parts: list[list[int]] = [[], []]
    for b in rows:
        parts[is_coupled(seqs[b])].append(b)
    return parts


class MaskedPass:
    """A `ChainModel` whose draft tokens all come from one pass over mask tokens: P-EAGLE (2602.01469), PARD
    (2504.18583), DFlash (2602.06036).

    The pass runs the text and K - 1 mask tokens after it. The last token of the text predicts draft token 1, mask j
    predicts draft token j + 1. No distribution depends on a drawn token, so each draft token is sampled from the
    distribution at its place, which is its q. Penalties and structured output do depend on the tokens before: `Chains`
    applies them token by token, to logits that the pass has computed already.

    drafter  an object with the device, width and room of a `ChainModel`.
    run      (sequences, number of draft tokens of each) -> logits [number, V'] for each sequence. Afterwards the
             drafter's cache holds only the text.
    after    (logits [R, ...] of a draft token, the tokens before it [R]) -> the logits [R, V'] given these tokens. This
             is DSpark's Markov head (2607.05147), by which a draft token depends on the one before it. None: no change.
    """

    multi_step = True

    def __init__(
        self,
        drafter: Any,
        run: Callable[[Seq[Sequence], Seq[int]], list[Tensor]],
        after: Callable[[Tensor, Tensor], Tensor] | None = None,
    ):
        self.device, self.width, self.room, self._run = drafter.device, drafter.width, drafter.room, run
        self._after = after
        self._depth: dict[int, int] = {}
        self._logits: dict[int, Tensor] = {}

    def plan(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> None:
        """Set how many tokens the next pass drafts for each sequence."""
        self._depth, self._logits = {seq.id: budget.depth for seq, budget in zip(seqs, budgets, strict=True)}, {}

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """Return logits as in `ChainModel`. The pass runs at the first draft token; later calls read its logits."""
        if not chains[0]:
            each = self._run(seqs, [self._depth[seq.id] for seq in seqs])
            self._logits = {seq.id: logits for seq, logits in zip(seqs, each, strict=True)}
        rows = torch.stack([self._logits[seq.id][len(chains[0])] for seq in seqs])
        if self._after is None:
            return rows
        before = [(chain or seq.tokens)[-1] for seq, chain in zip(seqs, chains, strict=True)]
        return self._after(rows, torch.tensor(before, device=self.device))

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        logits = torch.stack(self._run(seqs, [steps] * len(seqs)), 1)  # [K, R, V']
        tokens, each = [torch.tensor([seq.tokens[-1] for seq in seqs], device=self.device)], list(logits)
        for j in range(steps):
            if self._after is not None:
                each[j] = self._after(each[j], tokens[-1])
            tokens.append(sampling.pick(each[j] if sampling.kind == "maximum" else each[j].double(), j))
        return DecodedSteps(torch.stack(tokens[1:]), logits if self._after is None else torch.stack(each))


def sample_draft_tokens(probs: Tensor, seqs: Seq[Sequence], depth: int) -> Tensor:
    """Sample draft tokens, int64 [B]. probs [B, V]: distributions of the token `depth` places after each sequence's
    next token (0: the next token itself).

    Under the rule `coupled` the token is picked with the noise that the target will use at that position, so that
    similar distributions give equal tokens. Otherwise the draw is independent of everything that verification draws."""
    tokens = torch.empty(len(seqs), dtype=torch.int64, device=probs.device)
    drawn = [b for b, seq in enumerate(seqs) if not is_coupled(seq)]
    for b, seq in enumerate(seqs):
        if is_coupled(seq):
            noise = torch.from_numpy(seq.random.gumbel(len(seq.tokens) + depth, probs.shape[-1])).to(probs.device)
            tokens[b] = (probs[b].log() + noise).argmax()
    if drawn:
        rows = index_rows(drawn)
        u = [seqs[b].random.uniforms(DRAFT, len(seqs[b].tokens), depth + 1)[depth] for b in drawn]
        tokens[rows] = invert(probs[rows], torch.tensor(u, dtype=torch.float64, device=probs.device))
    return tokens


def find_possible(
    logits: Tensor,
    seqs: Seq[Sequence],
    chains: Seq[Seq[int]],
    vocab_size: int,
    params: Seq[SamplingParams] | None = None,
) -> tuple[Tensor, list[int]]:
    """Return `distributions_after` over the target's vocabulary, float64 [R, V], and the rows without a distribution:
    their logits are NaN, or every token that the drafter knows is forbidden. These rows are zeros.

    logits [R, V']: ids that the target does not have are cut before warping, missing ids have probability 0."""
    cut = logits[:, :vocab_size]
    try:
        return widen(distributions_after(cut, seqs, chains, params), vocab_size), []
    except TargetError:
        rows, dead = list[Tensor](), list[int]()
    for r, (seq, chain) in enumerate(zip(seqs, chains, strict=True)):
        try:
            rows.append(distributions_after(cut[r : r + 1], [seq], [chain], params and [params[r]]))
        except TargetError:
            dead.append(r)
            rows.append(cut.new_zeros(1, cut.shape[1], dtype=torch.float64))
    return widen(torch.cat(rows), vocab_size), dead


def end_early(seqs: Seq[Sequence], drawn: int, fault: Exception) -> None:
    """Count and log a fault of a drafter that has already drawn tokens; the draft ends with the drawn tokens."""
    for seq in seqs:
        seq.stats.drafter_faults += 1
    log.info("a draft ends after %d tokens (%s: %s); the text is not affected", drawn, type(fault).__name__, fault)


def _warp_chain(raw: Tensor, params: SamplingParams) -> Tensor:
    """Warp the logits [K, V'] after each token of a chain, up to the first row that has no distribution."""
    try:
        return warp(raw, params)
    except TargetError:
        finite = raw.isfinite().any(-1) & ~(raw.isnan() | raw.isposinf()).any(-1)  # [K]
        return warp(raw[: finite.tolist().index(False)], params)


def widen(probs: Tensor, vocab_size: int) -> Tensor:
    """Pad probabilities [R, V'] to [R, V]: ids that the drafter does not know have probability 0."""
    missing = vocab_size - probs.shape[1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing else probs


def join_probs(chains: Seq[Chain], vocab_size: int) -> Tensor | None:
    """Return q [N, V] of a packed draft. Point masses get one-hot rows; None if all draft tokens are point masses."""
    device = next((chain.probs.device for chain in chains if chain.probs is not None), None)
    if device is None:
        return None
    parts = []
    for chain in chains:
        probs = chain.probs
        if probs is None:
            probs = torch.zeros(len(chain.tokens), vocab_size, dtype=torch.float64, device=device)
            probs[range(len(chain.tokens)), chain.tokens] = 1.0
        parts.append(probs)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
