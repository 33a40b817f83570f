"""`Sequence`: one request with its tokens, random stream, stop conditions and statistics.

A sequence keeps its own state, not a row of tensors for the batch. So sequences can join and leave a batch at any step.

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

    tokens    token ids of prompt and output so far. The list only grows while drafters read it.
    prompt    number of prompt tokens.
    kv_len    how many leading tokens have their KV in the target's cache.
    stop_ids  ids that end the sequence: the model's EOS, unless ignored, and the request's stop ids.
    context   largest number of tokens that the target can hold for a sequence.
    constraint  makes structured output follow `params.structured`. Sequences do not share it.
    prediction  tokens that the output is expected to contain, from which some drafters copy draft tokens. They change
              the speed, not the text. They do not change once the sequence runs.
    rule      the rule that verifies its draft tokens; None: the engine's rule.
    chunk_end  while a prompt is read in chunks: number of leading tokens that have KV after the next run, else None.
    cached    number of prompt tokens whose KV came from the prefix cache. Set by the engine.
    error     the error that ended it if `finish` is "error".
    proposers  for each output token, the name of the drafter that proposed it (of the member, if the drafter is
              composite), or None if the target chose it.
    stop_search  finds the stop strings in the text from `decode` (token ids -> text); None if there is no tokenizer.
    random    its random numbers: `stream` if given, else made from the seed.
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
        """The tokens that the next run processes; never empty."""
        return self.tokens[self.kv_len : self.end]

    @property
    def unread(self) -> int:
        """How many tokens have no KV yet: 1 while it decodes, more while a prompt is pending."""
        return len(self.tokens) - self.kv_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def limit(self) -> int:
        """Largest number of tokens that this sequence may ever have, prompt included."""
        return min(self.context, self.prompt + self.params.max_tokens)

    @property
    def room(self) -> int:
        """How many tokens this sequence may still emit."""
        return self.limit - len(self.tokens)

    def was_drafted(self, first: int = 0) -> list[bool]:
        """Return for each output token from `first` on whether it is an accepted draft token."""
        return [name is not None for name in self.proposers[first:]]

    def copy_for(self, context: int) -> Sequence:
        """Return a new sequence with the same tokens and parameters, for a model with another context length."""
        return Sequence(self.tokens, self.params, context=context)

    def read_chunk(self) -> None:
        """Record that a chunk of the prompt was run. This emits no token."""
        self.kv_len, self.chunk_end = self.end, None

    def take(self, run: Seq[int], finish: str | None) -> None:
        """Append tokens that single steps of plain decoding would have emitted, one per step, and count them."""
        self.stats.count_plain(len(run))
        self.tokens.extend(run)
        self.kv_len = len(self.tokens) - 1
        self.proposers.extend([None] * len(run))
        self.finish = finish

    def advance(self, verdict: Verdict, draft: Draft, b: int) -> None:
        """Append the tokens that sequence `b` of the batch gained in a step, and count them."""
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

    source  token ids that the encoder reads, once.
    """

    source: Seq[int] = ()

    def copy_for(self, context: int) -> SourcedSequence:
        return SourcedSequence(self.tokens, self.params, context=context, source=self.source)


def source_of(seq: Sequence) -> Seq[int]:
    """Return the source of a sequence; empty if the sequence continues a prompt."""
    return seq.source if isinstance(seq, SourcedSequence) else ()


def request_ids(seq: Sequence) -> list[int]:
    """Return the token ids of the request: its source, or else its prompt."""
    return list(source_of(seq)) or seq.tokens[: seq.prompt]


def is_coupled(seq: Sequence) -> bool:
    """Return whether the sequence's rule picks tokens with noise keyed by position, which drafters then share."""
    return seq.rule is not None and seq.rule.coupled
