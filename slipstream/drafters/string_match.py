"""String match: a draft model with a tokenizer of its own writes text, and the target's tokenizer splits it into draft
tokens (string-level exact match: Timor et al. 2502.05202, algorithm 2).

The draft model writes with its whole vocabulary, so the two vocabularies need no common tokens. It always takes its
most likely token, and draft tokens are point masses: above temperature 0, fewer are accepted than if they were drawn
from q, but the output stays exact. Every rule is exact for any draft.

    text  ... def add(a, b     draft model writes  ):  ⏎  ▁▁▁▁  ret  urn     target's tokens  ):⏎  ▁▁▁  ▁return

The last of the target's tokens might change if the draft model continued, so the draft model writes one token more than
is needed. An incomplete character at the end is not drafted. If the text itself ends within a character, the draft
begins with the rest of its bytes.

Other tokenizers are refused unless `draft_tokenizer` allows them, because the acceptance rate is lower than with a
draft model of the target's family. If the tokenizers are equal, this drafter is not used.
"""

import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch

from slipstream.core.decode_steps import StepSampling
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, DrafterTraits, PrefixKeeper
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.core.warp import first_maxima
from slipstream.errors import PairError
from slipstream.tokens.rereading import Reading, Vocabularies, cut_at_end
from slipstream.tokens.token_texts import TokenTexts

log = logging.getLogger("slipstream")

MOST_STEPS = 4
"""Largest number of the draft model's tokens for each of the target's tokens."""
RESERVE = 64
"""Room for draft tokens in the draft model's context. It is the same for every text, so that where reading restarts
does not depend on the batch."""


@dataclass(frozen=True)
class Writer:
    """A draft model and the tokens of both models, from which `StringDrafter` is made."""

    model: Target
    vocabularies: Vocabularies


def with_tokenizer(model: Target, draft_tokenizer: object, target_tokenizer: object, vocab_size: int) -> Writer:
    """Join a loaded draft model with a tokenizer of its own, as `LLM(draft=...)` and `make_drafter` take it.

    draft_tokenizer, target_tokenizer  fast tokenizers of transformers, or of a folder (`tokens.text.load_tokenizer`).
    vocab_size  width of the target's logits.

    Raises PairError if a tokenizer is missing, changes text, or cannot be compared."""
    return Writer(model, vocabularies(target_tokenizer, draft_tokenizer, (vocab_size, model.vocab_size)))


def vocabularies(target: object, draft: object, width: tuple[int, int]) -> Vocabularies:
    """Compare both tokenizers. Raises as `with_tokenizer`. width: widths of both models' logits."""
    for tokenizer, whose in ((target, "the target"), (draft, "the draft model")):
        if tokenizer is None:
            raise PairError(
                f"draft_tokenizer is 'string', but {whose} has no tokenizer",
                why="draft tokens are translated from one tokenizer to the other",
                fix="give a folder or hub id with a tokenizer, or use slipstream.drafters.string_match.with_tokenizer",
            )
    vocabularies = Vocabularies(TokenTexts(target, "the target"), TokenTexts(draft, "the draft model"), width)
    vocabularies.draft.require_faithful()
    vocabularies.target.require_faithful()
    log.info("draft_tokenizer='string': %s", vocabularies)
    return vocabularies


class StringDrafter(PrefixKeeper):
    """Drafts with a draft model that has another tokenizer. device: the device of the draft tokens."""

    name = "model"
    traits = DrafterTraits(chains_only=True, reads_prompts=True, keeps_prefixes=True)

    def __init__(self, writer: Writer, device: torch.device):
        self.model, self.vocabularies, self.device = writer.model, writer.vocabularies, device
        self._steps = self.model.capabilities.multi_step
        self._reader = Rereader(self.model, self.vocabularies)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        copies, steps, members = list[Sequence](), list[int](), list[int]()
        for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if budget.depth > 0:
                copies.append(self._reader.follow(seq, len(seq.tokens)))
                steps.append(self._count_wanted(len(copies[-1].tokens), len(seq.tokens), budget.depth))
                members.append(b)
        chains: list[list[int]] = [[] for _ in seqs]
        if members:
            written = self._write(copies, max(steps))
            for b, ids, most in zip(members, written, steps, strict=True):
                chains[b] = self._split(seqs[b], ids[:most])[: budgets[b].depth]
        return Draft.chains(chains, device=self.device)

    def _count_wanted(self, draft_length: int, target_length: int, budget: int) -> int:
        """Return how many tokens the draft model writes for `budget` target tokens, from the text's length in both
        kinds of tokens."""
        ratio = min(max(draft_length / target_length, 1 / MOST_STEPS), MOST_STEPS)
        return min(math.ceil(budget * ratio) + 1, self._reader.reserve)

    def _write(self, copies: Seq[Sequence], steps: int) -> list[list[int]]:
        """Decode the draft model's next tokens greedily, for each of its sequences."""
        if self._steps is not None:
            for seq in copies:
                if len(seq.pending) > self.model.capabilities.max_pending:
                    self._run([seq])
                    seq.kv_len -= 1
            written = self._steps.decode_steps(copies, steps, StepSampling()).tokens.T.tolist()  # [R][K]
            for seq, ids in zip(copies, written, strict=True):
                seq.tokens += ids
                seq.kv_len = len(seq.tokens) - 1
            return written  # type: ignore[no-any-return]
        written = [[] for _ in copies]
        for _ in range(steps):
            for seq, ids, id_ in zip(copies, written, self._run(copies), strict=True):
                ids.append(id_)
                seq.tokens.append(id_)
        return written

    def _run(self, copies: Seq[Sequence]) -> list[int]:
        """Return the most likely token after each of the draft model's sequences, whose KV is complete afterwards."""
        logits = self.model.run(copies, Draft.empty(len(copies), self.model.device)).logits  # [R, V']
        self.model.commit(copies, [[]] * len(copies))
        for seq in copies:
            seq.kv_len = len(seq.tokens)
        return first_maxima(logits)

    def _split(self, seq: Sequence, written: Seq[int]) -> list[int]:
        """Return the target's tokens for the text that the draft model wrote, up to a special token. The special token
        is drafted if the target has it."""
        target_texts = self.vocabularies.target
        texts = [self.vocabularies.draft.text_of(id_) for id_ in written]
        ends = next((n for n, text in enumerate(texts) if text is None), len(texts))
        word = target_texts.bytes_of(seq.tokens[self._reader.open_word(seq.id) :])
        data = b"".join(text for text in texts[:ends] if text is not None)
        begun = word[len(word) - cut_at_end(word) :]  # first bytes of an incomplete character
        if begun and data.startswith(begun):  # the draft model writes that character from its beginning
            data = data[len(begun) :]
        text = complete(begun + data)[len(begun) :]
        missing = next((n for n in range(len(text)) if not cut_at_end(begun + text[:n])), len(text))
        pieces = list(target_texts.pieces(text[:missing]))
        pieces += self._tokens(b"" if missing else last_text(word), text[missing:])
        special = self.vocabularies.to_target.get(written[ends]) if ends < len(written) else None
        return pieces if special is None or target_texts.bytes_of(pieces) != data else [*pieces, special]

    def _tokens(self, word: bytes, text: bytes) -> list[int]:
        """Return the target's tokens for `text`, which comes after `word`, the last word of the text so far. Ends
        before the first token that the target's tokenizer changes."""
        texts = self.vocabularies.target
        ids = _after(texts.ids((word + text).decode()), texts, len(word))
        if ids is None:  # the tokenizer would join word and text in one token
            ids = texts.ids(text.decode())
        tokens, at = list[int](), 0
        for id_ in ids:
            written = texts.text_of(id_)
            if not written or not text.startswith(written, at):
                break
            tokens.append(id_)
            at += len(written)
        return tokens

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        reading = [seq for seq in seqs if seq.params.draft_tokens != 0]
        if reading:
            self._run([self._reader.follow(seq, seq.kv_len) for seq in reading])

    def begin(self, seq: Sequence, length: int) -> None:
        self._reader.begin(seq.id)

    def keep(self, seq: Sequence) -> None:
        self._reader.keep(seq.id)

    def release(self, seq_id: int) -> None:
        self._reader.release(seq_id)


@dataclass
class _Text:
    """A text of the target, and the draft model's sequence for it. known: number of the target's tokens that were
    read. begin: index in `reading.ids` of the first token of `sequence`, without the tokens that begin every text."""

    reading: Reading
    sequence: Sequence
    known: int = 0
    begin: int = 0


class Rereader:
    """Keeps, for each text in the target's tokens, a sequence of the draft model's tokens. When a text grows, or its
    last words are split differently, the KV cache is kept up to the first id that differs.

    reserve  number of the draft model's tokens that must fit into its context after every text.
    """

    def __init__(self, model: Target, vocabularies: Vocabularies):
        self.model, self.vocabularies = model, vocabularies
        self.memory = model.capabilities.memory
        self.reserve = min(RESERVE, model.context // 2)
        self._texts: dict[int, _Text] = {}
        self._from_cache = set[int]()  # ids of texts that may begin with a cached prefix
        roles = vocabularies.draft.roles
        self._filler = next((id_ for role in ("bos", "eos") if (id_ := roles[role]) is not None), 0)

    def follow(self, seq: Sequence, length: int) -> Sequence:
        """Return the draft model's sequence for the first `length` tokens of a text, brought up to date; at least its
        last token is pending. If a text fills the draft model's context, reading restarts at a later token."""
        text = self._texts.get(seq.id)
        cached = text is None and seq.id in self._from_cache
        if text is None:
            text = self._texts[seq.id] = _Text(Reading(self.vocabularies), Sequence([], context=self.model.context))
        kept = text.reading.update(seq.tokens[:length], text.known)
        text.known = length
        ids = text.reading.ids
        half = max(1, self.model.context // 2)  # when the context is full, reading restarts half a context later
        begin = -(-max(0, len(ids) + self.reserve - self.model.context) // half) * half
        if begin != text.begin:
            self.model.release(text.sequence.id)
            text.sequence, text.begin, kept = Sequence([], context=self.model.context), begin, 0
        sequence = text.sequence
        if begin:
            ids = [*self.vocabularies.draft.begin, *ids[begin + len(self.vocabularies.draft.begin) :]]
            kept = max(0, kept - begin)
        ids = ids or [self._filler]
        if cached:
            assert self.memory is not None
            sequence.kv_len = self.memory.begin(sequence.id, ids, len(ids) - 1)
            sequence.tokens[:] = ids
            return sequence
        k, most = min(kept, sequence.kv_len), min(sequence.kv_len, len(ids), len(sequence.tokens))
        while k < most and ids[k] == sequence.tokens[k]:
            k += 1
        sequence.tokens[k:] = ids[k:]
        sequence.kv_len = min(k, len(ids) - 1)
        return sequence

    def begin(self, seq_id: int) -> None:
        """Let a new text reuse the KV cache of an earlier one."""
        if self.memory is not None:
            self._from_cache.add(seq_id)

    def open_word(self, seq_id: int) -> int:
        return self._texts[seq_id].reading.open_word

    def keep(self, seq_id: int) -> None:
        text = self._texts.get(seq_id)
        if text is not None and self.memory is not None and not text.begin:
            self.memory.keep(text.sequence.id, text.sequence.tokens[: text.sequence.kv_len])

    def release(self, seq_id: int) -> None:
        self._from_cache.discard(seq_id)
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self.model.release(text.sequence.id)


def complete(data: bytes) -> bytes:
    """Return the longest beginning of `data` that is UTF-8: up to a cut character or a wrong byte."""
    try:
        data.decode()
        return data
    except UnicodeDecodeError as fault:
        return data[: fault.start]


def last_text(data: bytes) -> bytes:
    """Return the text after the last byte that is no UTF-8."""
    chars = data.decode("utf-8", "surrogateescape")
    stray = max((n for n, char in enumerate(chars) if 0xDC80 <= ord(char) <= 0xDCFF), default=-1)
    return chars[stray + 1 :].encode()


def _after(ids: Seq[int], texts: TokenTexts, length: int) -> list[int] | None:
    """Return the ids after the first `length` bytes; None if no id ends there."""
    ends = accumulate((len(texts.text_of(id_) or b"") for id_ in ids), initial=0)
    return next((list(ids[n:]) for n, end in enumerate(ends) if end == length), None)
