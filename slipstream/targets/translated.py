"""`TranslatedModel`: a draft model with a tokenizer of its own, as a `Target` with the vocabulary of another model.

Token-level intersection (Timor et al. 2502.05202, algorithm 4): of the draft model's logits, those of tokens that both
vocabularies have go to the target's ids; all other ids have probability 0. They are warped and normalised as always, so
q is the distribution that each draft token was drawn from. Without the normalisation the output would be biased: with
p = (.5, .3, .2) and q = (.4, .4) on the shared tokens, by a total variation of .117.

Whoever drafts with a draft model, chains or trees, uses it as any other. Texts are read by a `Rereader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Memory, MultiStep, Target, TargetOut, Usage
from slipstream.errors import TargetError
from slipstream.models.rereading import Vocabularies
from slipstream.targets.rereader import Rereader


class TranslatedModel:
    """model: the draft model. both: its tokens and the target's."""

    def __init__(self, model: Target, both: Vocabularies):
        self.model, self.both = model, both
        self.vocab_size, self.context, self.device = both.shared.width[0], model.context, model.device
        self.reader = Rereader(model, both)
        self.ours = torch.from_numpy(both.shared.ours).to(self.device)  # [S]
        self.theirs = torch.from_numpy(both.shared.theirs).to(self.device)  # [S]
        self._nodes: dict[int, list[int]] = {}  # of the last run of each text: the draft model's ids

    @property
    def capabilities(self) -> Capabilities:
        own = self.model.capabilities
        return Capabilities(
            trees=own.trees,
            multi_step=None if own.multi_step is None else TranslatedSteps(self, own.multi_step),
            runtime=None if own.runtime is None else replace(own.runtime, source=None),  # its ids are others
            memory=None if own.memory is None else TranslatedMemory(self.reader, own.memory),
            torch_threads=own.torch_threads,
            experts=own.experts,
        )

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target`; draft: of tokens that both models have. It offers no hidden states."""
        own = [self.follow(seq) for seq in seqs]
        ids = [self.both.shared.to_theirs[id_] for id_ in draft.ids]
        for b, seq in enumerate(seqs):
            self._nodes[seq.id] = ids[draft.splits[b] : draft.splits[b + 1]]
        mine = Draft.of(ids, draft.parents, draft.splits, acceptable=draft.acceptable, device=self.device)
        return TargetOut(self.translated(self.model.run(own, mine).logits))

    def follow(self, seq: Sequence) -> Sequence:
        """The model's own sequence for one of the target's tokens."""
        return self.reader.follow(seq.id, seq.tokens[: seq.end], seq.kv_len)

    def translated(self, logits: Tensor) -> Tensor:
        """[..., V'] -> [..., V]: tokens that the model does not have are impossible."""
        out = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return out.index_copy_(-1, self.ours, logits.index_select(-1, self.theirs))

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        own = [self.reader.held(seq.id) for seq in seqs]
        self.model.commit(own, path)
        for seq, mine, nodes in zip(seqs, own, path, strict=True):
            mine.tokens += [self._nodes[seq.id][node] for node in nodes]
            mine.kv_len = len(mine.tokens)

    def release(self, seq_id: int) -> None:
        self._nodes.pop(seq_id, None)
        self.reader.release(seq_id)


class TranslatedSteps:
    """Several steps of the draft model in one call; see `core.target.MultiStep`."""

    def __init__(self, translated: TranslatedModel, steps: MultiStep):
        self._translated, self._steps = translated, steps
        self.steps_per_call, self.max_pending = steps.steps_per_call, steps.max_pending

    def decode_steps(
        self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None
    ) -> DecodedSteps:
        """See `MultiStep`. Picks with uniforms, which go through the target's vocabulary in its order, take a call for
        each step."""
        own = [self._caught_up(seq) for seq in seqs]
        if sampling.uniforms is not None:
            return self._drawn(own, steps, sampling)
        model = self._translated
        drawn = self._steps.decode_steps(own, steps, self._among_shared(sampling))
        theirs = drawn.tokens.T.tolist()  # [B][K]
        for seq, new in zip(own, theirs, strict=True):
            seq.tokens += new
            seq.kv_len = len(seq.tokens) - 1
        to_ours = model.both.shared.to_ours
        if any(token not in to_ours for new in theirs for token in new):
            raise TargetError("the draft model has no distribution over the shared tokens", why="its logits are NaN")
        tokens = torch.tensor([[to_ours[token] for token in new] for new in theirs], device=model.device).T  # [K, B]
        return DecodedSteps(tokens, model.translated(drawn.logits))

    def _caught_up(self, seq: Sequence) -> Sequence:
        """The model's own sequence, with no more pending tokens than a call takes."""
        own = self._translated.follow(seq)
        if len(own.pending) > self.max_pending:
            self._translated.model.run([own], Draft.empty(1, self._translated.device))
            self._translated.model.commit([own], [[]])
            own.kv_len = len(own.tokens) - 1
        return own

    def _among_shared(self, sampling: StepSampling) -> StepSampling:
        """The same picks in the draft model's ids: noise of -inf for tokens that the target does not have."""
        model = self._translated
        given = sampling.noise
        if given is None:
            given = torch.zeros(1, 1, model.vocab_size, dtype=torch.float64)
        given = given.to(model.device)  # [K, B, V]
        noise = given.new_full((*given.shape[:2], model.both.shared.width[1]), float("-inf"))  # [K, B, V']
        noise[..., model.theirs] = given[..., model.ours]
        return StepSampling(sampling.inv_temperature, noise=noise)

    def _drawn(self, own: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        """Step by step, each token drawn in float64 from the distribution over the target's ids."""
        model, tokens, logits, probs = self._translated, list[Tensor](), list[Tensor](), list[Tensor]()
        for j in range(steps):
            ran = model.model.run(own, Draft.empty(len(own), model.device)).logits  # [B, V']
            model.model.commit(own, [[]] * len(own))
            logits.append(model.translated(ran))  # [B, V]
            drawn, q = sampling.draw(logits[-1], j)
            tokens.append(drawn)
            probs.append(q)
            for seq, token in zip(own, tokens[-1].tolist(), strict=True):
                if token not in model.both.shared.to_theirs:
                    raise TargetError("the draft model's logits are NaN", why="no token can be drawn from them")
                seq.kv_len = len(seq.tokens)
                seq.tokens.append(model.both.shared.to_theirs[token])
        return DecodedSteps(torch.stack(tokens), torch.stack(logits), torch.stack(probs))


class TranslatedMemory:
    """The draft model's KV cache; see `core.target.Memory`. Positions are those of its own tokens."""

    def __init__(self, reader: Rereader, own: Memory):
        self._reader, self._own = reader, own

    @property
    def block(self) -> int:
        """See `Memory`."""
        return self._own.block

    @property
    def capacity(self) -> int | None:
        """See `Memory`."""
        return self._own.capacity

    @property
    def usage(self) -> Usage:
        """See `Memory`."""
        return self._own.usage

    def missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """See `Memory`; as if each of the target's tokens were one of the draft model's."""
        own = [(self._reader.held(seq_id).id, start, stop) for seq_id, start, stop in writes]
        return self._own.missing(own)

    def match(self, tokens: Seq[int]) -> int:
        """See `Memory`: of no token, because positions differ."""
        return 0

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        """See `Memory`. Returns 0: the next run reads the whole text, and computes only what is not kept."""
        self._reader.follow(seq_id, tokens[:most], 0, cached=True)
        return 0

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """See `Memory`."""
        self._reader.keep(seq_id)
