"""Draft model: a smaller model with the same vocabulary drafts a chain. If it was trained by PARD (An et al.
2504.18583), it drafts all of the chain in one pass.

`chains` draws the drafts; `string_match` serves draft models with another tokenizer. A PARD model names a `pard_token`
in its config.json: the mask that stands in the place of each draft token but the last.

The draft model decodes a copy of each sequence (its shadow) with its own KV cache. After verification the shadow is
rolled back to the accepted tokens.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits, PrefixKeeper
from slipstream.core.sequence import Sequence, count_common, source_of
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.chains import Chains, MaskedPass
from slipstream.drafters.confidence import ConfidentDrafts
from slipstream.drafters.none import NoOptionsConfig
from slipstream.drafters.string_match import StringDrafter, Writer
from slipstream.errors import PairError, ParameterError
from slipstream.targets.pair_check import kind_fault

log = logging.getLogger("slipstream")


class ModelDrafter(PrefixKeeper):
    """Drafts chains with `model`, of the same vocabulary but for padding. vocab_size: width of the target's logits."""

    name = "model"

    def __init__(self, model: Target, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        self.context, self.device, self.width = model.context, model.device, model.vocab_size
        self._multi_step, self._memory = model.capabilities.multi_step, model.capabilities.memory
        self._encoder = model.capabilities.encoder
        self.multi_step = self._multi_step is not None
        parallel = model.capabilities.mask_token is not None
        self._pass = MaskedPass(self, self._run_masked) if parallel else None
        self._confident = None if parallel else ConfidentDrafts()
        self._chains = Chains(self._pass or self, vocab_size, self._confident)
        runtime = model.capabilities.runtime
        self.traits = DrafterTraits(
            chains_only=True, reads_prompts=True, keeps_prefixes=True,
            longest=None if runtime is None else runtime.rollback,
            prices_rows=not parallel,  # one pass draws the whole chain
        )  # fmt: skip
        self._shadows: dict[int, Sequence] = {}
        self._warned: set[str] = set()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        most = [
            replace(each, depth=self._begin_shadow(seq, each.depth)) for seq, each in zip(seqs, budgets, strict=True)
        ]
        if self._pass is not None:  # after such a pass the model's cache holds only the text
            self._pass.plan(seqs, most)
            return self._chains.draft(seqs, most)
        draft = self._chains.draft(seqs, most)
        for b, seq in enumerate(seqs):
            if most[b].depth > 0:
                shadow = self._follow(seq, draft.ids[draft.splits[b] : draft.splits[b + 1]])
                shadow.kv_len = len(shadow.tokens) - 1
        return draft

    def _begin_shadow(self, seq: Sequence, most: int) -> int:
        """Return how deep this sequence can be drafted, at most `most`; 0 if its source is too long for the draft
        model's encoder. Creates its shadow when it is first needed."""
        if most <= 0:
            return 0
        if self._encoder is not None and len(source_of(seq)) > self._encoder.context:
            limit = f"the draft model's encoder reads at most {self._encoder.context} tokens,"
            self._warn(limit, f"but a source has {len(source_of(seq))}: decoding continues without drafting")
            return 0
        if seq.id not in self._shadows:
            self._shadows[seq.id] = seq.copy_for(self.context)
        if self.room(seq) < most:
            limit = f"the draft model's context of {self.context} tokens is full"
            self._warn(limit, f"at a sequence of {len(seq.tokens)} tokens: decoding continues without drafting")
        return max(0, min(most, self.room(seq)))

    def room(self, seq: Sequence) -> int:
        return self.context - len(seq.tokens)

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        shadows = [self._follow(seq, chain) for seq, chain in zip(seqs, chains, strict=True)]
        logits = self.model.run(shadows, Draft.empty(len(shadows), self.device)).logits
        self.model.commit(shadows, [[]] * len(shadows))
        for shadow in shadows:
            shadow.kv_len = len(shadow.tokens)
        return logits

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        assert self._multi_step is not None
        shadows = [self._follow(seq, ()) for seq in seqs]
        for seq, shadow in zip(seqs, shadows, strict=True):
            if shadow.unread > self.model.capabilities.max_pending:  # prefill a long prompt in chunks first
                self.extend([seq], [[]])
                shadow.kv_len -= 1
        return self._multi_step.decode_steps(shadows, steps, sampling)

    def _run_masked(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[Tensor]:
        mask, shadows = self.model.capabilities.mask_token, [self._follow(seq, ()) for seq in seqs]
        assert mask is not None
        for shadow in shadows:
            shadow.kv_len = min(shadow.kv_len, len(shadow.tokens) - 1)  # needed if the step after the last draft failed
        masks = Draft.chains([[mask] * (d - 1) for d in depth], device=self.device)
        logits = self.model.run(shadows, masks).logits  # [sum of depths, V']
        self.model.commit(shadows, [[]] * len(shadows))
        for shadow in shadows:
            shadow.kv_len = len(shadow.tokens)
        return list(logits.split(list(depth)))

    def _follow(self, seq: Sequence, drafted: Seq[int]) -> Sequence:
        """Return the shadow of a sequence, updated to hold its text and these draft tokens."""
        shadow = self._shadows[seq.id]
        shadow.tokens += seq.tokens[len(shadow.tokens) :]  # tokens of steps without the drafter
        shadow.tokens[len(seq.tokens) :] = drafted
        return shadow

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Roll each shadow back to the accepted tokens. Its cache has every draft token except the last of each path,
        because the model did not run that token."""
        for b, seq in enumerate(seqs):
            shadow = self._shadows.get(seq.id)
            if shadow is not None:
                new = seq.tokens[-len(verdict.path[b]) - 1 :]
                known = len(seq.tokens) - len(new)
                shadow.tokens += seq.tokens[len(shadow.tokens) : known]  # tokens of steps without the drafter
                right = count_common(shadow.tokens[known:], new)
                # The last token stays pending, even if the target emitted a draft token that is not in the verified
                # draft.
                shadow.kv_len = min(shadow.kv_len, known + right, known + len(new) - 1)
                shadow.tokens[known:] = new
        if self._confident is not None and self._confident.drawn:
            self._confident.learn(seqs, draft, verdict)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        reading: list[Sequence] = []
        for seq in seqs:
            if seq.params.draft_tokens != 0 and self._begin_shadow(seq, 1):
                shadow = self._shadows[seq.id]
                if seq.kv_len > shadow.kv_len:
                    shadow.chunk_end = seq.kv_len
                    reading.append(shadow)
        if reading:
            self.model.run(reading, Draft.empty(len(reading), self.device))
            self.model.commit(reading, [[]] * len(reading))
            for shadow in reading:
                shadow.read_chunk()

    def begin(self, seq: Sequence, length: int) -> None:
        if self._memory is not None:
            shadow = self._shadows[seq.id] = seq.copy_for(self.context)
            shadow.kv_len = self._memory.begin(shadow.id, shadow.tokens, len(shadow.tokens) - 1)

    def keep(self, seq: Sequence) -> None:
        shadow = self._shadows.get(seq.id)
        if shadow is not None and self._memory is not None:
            self._memory.keep(shadow.id, shadow.tokens[: shadow.kv_len])

    def release(self, seq_id: int) -> None:
        shadow = self._shadows.pop(seq_id, None)
        if shadow is not None:
            self.model.release(shadow.id)

    def _warn(self, limit: str, reached: str) -> None:
        if limit not in self._warned:
            self._warned.add(limit)
            log.warning(f"{limit} {reached}")


def make(
    target: Target, *, model: Target | Writer, quantize: str | None = None, **options: object
) -> ModelDrafter | StringDrafter:
    """Make the draft-model drafter, as `registry` requires. This drafter has no options of its own. quantize: see
    `DraftPlan`. Raises PairError if only one of target and draft model reads sources, or if their texts begin with
    different tokens."""
    if quantize is not None:
        raise ParameterError(f"quantize={quantize!r} does not work with a loaded draft model", fix="give its folder")
    NoOptionsConfig(**options)
    if isinstance(model, Writer):
        return StringDrafter(model, target.device)
    encoder, of_draft = target.capabilities.encoder, model.capabilities.encoder
    if (fault := kind_fault(encoder is not None, of_draft is not None)) is not None:
        raise fault
    runtime = model.capabilities.runtime
    if runtime is not None and runtime.rollback == 0:
        raise PairError(
            "the draft model was loaded as a target, and has recurrent layers",
            why="loaded as a target, it cannot roll its recurrent state back when draft tokens are rejected",
            fix="give its folder or hub id, so that it is loaded as a draft model",
        )
    if encoder is not None and of_draft is not None and encoder.start != of_draft.start:
        raise PairError(
            f"texts of the target begin with the ids {encoder.start}, those of the draft model with {of_draft.start}",
            why="a draft model is seldom right after a beginning that it was not trained on",
            fix="use a draft model of the target's family, or correct decoder_start_token_id in its generation_config",
        )
    return ModelDrafter(model, target.vocab_size)
