"""`Sequence`: one request with its tokens, random stream, stop conditions and statistics.

State is kept here and not in tensors with a row per batch entry, so sequences can join and leave a batch at any step.

Invariant at every step boundary:  kv_len == len(tokens) - len(pending)  and  len(pending) >= 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.rules import Rule
from slipstream.core.stats import SpecStats, TokenLogprob
from slipstream.core.structured import Constraint
from slipstream.core.text_ends import Decode, StopSearch

_ids = itertools.count()


@dataclass(eq=False)
class Sequence:
    """One request in flight.

    tokens    prompt and output so far; they only grow while drafters read them.
    prompt    number of prompt tokens.
    kv_len    how many leading tokens have their KV in the target's cache.
    stop_ids  ids that end the sequence: the model's EOS, unless ignored, and the request's stop ids.
    context   most tokens the target can hold.
    constraint  the form that the output must have, made from `params.structured`; of this sequence alone.
    prediction  tokens that the output is expected to hold, for drafters that look them up. They change the speed, not
              the text. Not changed once the sequence runs.
    rule      how its draft tokens are verified; None: the engine's rule.
    chunk_end  while a long prompt is read in chunks, how many leading tokens the next run reads to; else None.
    cached    prompt tokens whose KV an earlier request had computed. Set by the engine.
    error     the error that ended it if `finish` is "error".
    proposers  one entry per output token: name of the drafter that proposed it (the member, if its drafter has
              several); None for the target's own token.
    stop_search  finds the stop strings, made from decode (token ids -> text); None if there is no tokenizer.
    random    its random numbers, from `stream` or else from the seed.
    """

    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    context: int = 2**31
    decode: InitVar[Decode | None] = None
    constraint: Constraint | None = None
    prediction: Seq[int] = ()
    rule: Rule | None = None
    stream: InitVar[Stream | None] = None
    id: int = field(default_factory=lambda: next(_ids))

    random: Stream = field(init=False)
    prompt: int = field(init=False)
    kv_len: int = field(init=False, default=0)
    cached: int = field(init=False, default=0)
    chunk_end: int | None = field(init=False, default=None)
    proposers: list[str | None] = field(init=False, default_factory=list)
    logprobs: list[TokenLogprob] = field(init=False, default_factory=list)
    finish: str | None = field(init=False, default=None)
    stop_cause: int | str | None = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)
    stats: SpecStats = field(init=False, default_factory=SpecStats)
    stop_search: StopSearch | None = field(init=False, default=None)

    def __post_init__(self, decode: Decode | None, stream: Stream | None) -> None:
        self.tokens = list(self.tokens)
        self.prompt = len(self.tokens)
        self.random = stream or Stream(self.params.seed)
        if decode is not None and self.params.stop:
            self.stop_search = StopSearch(decode, self.tokens, self.params.stop)

    @property
    def end(self) -> int:
        """How many leading tokens have KV after the next run: all of them, or those up to the end of a chunk."""
        return len(self.tokens) if self.chunk_end is None else self.chunk_end

    @property
    def pending(self) -> list[int]:
        """The tokens that the next run reads; never empty."""
        return self.tokens[self.kv_len : self.end]

    @property
    def unread(self) -> int:
        """How many tokens have no KV yet: 1 while it decodes, more while a prompt waits."""
        return len(self.tokens) - self.kv_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def limit(self) -> int:
        """Most tokens that this sequence may hold in the end."""
        return min(self.context, self.prompt + self.params.max_tokens)

    @property
    def room(self) -> int:
        """How many tokens may still be emitted."""
        return self.limit - len(self.tokens)

    def was_drafted(self, first: int = 0) -> list[bool]:
        """Return for each output token from `first` on whether it is an accepted draft token."""
        return [name is not None for name in self.proposers[first:]]

    def copy_for(self, context: int) -> Sequence:
        """Return a new sequence with the same tokens and parameters, for a model of another context."""
        return Sequence(self.tokens, self.params, context=context)

    def read_chunk(self) -> None:
        """Note that a chunk of the prompt was run: it gives no token."""
        self.kv_len, self.chunk_end = self.end, None

    def take(self, run: Seq[int], finish: str | None) -> None:
        """Append tokens that single steps of plain decoding would have emitted, one each, and count them."""
        self.stats.count_plain(len(run))
        self.tokens.extend(run)
        self.kv_len = len(self.tokens) - 1
        self.proposers.extend([None] * len(run))
        self.finish = finish

    def advance(self, verdict: Verdict, draft: Draft, b: int) -> None:
        """Append what sequence `b` of the batch gained from a step, and count it."""
        run = verdict.run(draft, b)
        depths = [draft.depths[i] for i in draft.nodes(b) if draft.acceptable is None or draft.acceptable[i]]
        if verdict.finish[b]:
            depths = [d for d in depths if d <= len(run)]  # draft tokens after a stop do not count
        self.stats.count(depths, verdict.count_accepted(b), len(run))
        self.kv_len = len(self.tokens) + len(verdict.path[b])
        self.tokens.extend(run)
        self.proposers.extend(verdict.proposers(draft, b))
        self.finish = verdict.finish[b]


@dataclass(eq=False)
class SourcedSequence(Sequence):
    """A sequence of an encoder-decoder. Its tokens begin with the target's start tokens.

    source  ids that the encoder reads, once.
    """

    source: Seq[int] = ()

    def copy_for(self, context: int) -> SourcedSequence:
        return SourcedSequence(self.tokens, self.params, context=context, source=self.source)


def source_of(seq: Sequence) -> Seq[int]:
    """Return the source that a sequence answers; empty if it continues a prompt."""
    return seq.source if isinstance(seq, SourcedSequence) else ()


def request_ids(seq: Sequence) -> list[int]:
    """Return the ids of the request: its source, or its prompt."""
    return list(source_of(seq)) or seq.tokens[: seq.prompt]


def is_coupled(seq: Sequence) -> bool:
    """Return whether the rule picks with noise keyed by position, which drafters then share."""
    return seq.rule is not None and seq.rule.coupled
