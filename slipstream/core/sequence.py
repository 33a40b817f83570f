"""`Sequence`: one request with its tokens, random stream, stop conditions and statistics.

State is kept here and not in tensors with a row per batch entry, so sequences can join and leave a batch at any step.

Invariant at every step boundary:  kv_len == len(tokens) - len(pending)  and  len(pending) >= 1.
"""

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.rules import Rule
from slipstream.core.stats import SpecStats, TokenLogprob
from slipstream.core.structured import Constraint
from slipstream.core.text_ends import Decode, StopSearch

_ids = itertools.count()

LEAD = 8
"""Tokens of the prompt's end that a source or a prediction is put behind, for lookup drafters."""


@dataclass(eq=False)
class Sequence:
    """One request in flight.

    tokens    prompt and output so far; they only grow while drafters read them.
    prompt    number of prompt tokens.
    source    what an encoder-decoder reads with its encoder, once; `tokens` then begins with the target's start tokens.
    kv_len    how many leading tokens have their KV in the target's cache.
    stop_ids  ids that end the sequence (EOS of the model, unless ignored, and those of the request).
    context   most tokens the target can hold.
    decode    token ids -> text, for stop strings; None if there is no tokenizer.
    constraint  the form that the output must have, made from `params.structured`; of this sequence alone.
    prediction  tokens that the output is expected to hold, for drafters that look them up (`readable`); they change how
              fast it is decoded, not what is. Not changed once it runs.
    coupled   True if the rule picks with noise keyed by position, which drafters then share. Set by the engine.
    rule      how its draft tokens are verified; None: as the engine says.
    chunk_end  while a long prompt is read in chunks, how many leading tokens the next run reads to; else None.
    cached    prompt tokens whose KV was that of an earlier request. Set by the engine.
    prefix_cache  whether drafters may begin it with what they computed for an earlier request. Set by the engine.
    error     what ended it if `finish` is "error".
    drafted   one entry per output token: True for an accepted draft token, False for a token of the target's own.
    drafter   name of its drafter. Set by the engine.
    proposers  one entry per output token: name of the drafter that proposed it (of a member, if its drafter has
              several); None for a token of the target's own.
    """

    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    context: int = 2**31
    decode: Decode | None = None
    constraint: Constraint | None = None
    prediction: Seq[int] = ()
    source: Seq[int] = ()
    coupled: bool = False
    rule: Rule | None = None
    prefix_cache: bool = False
    drafter: str = ""
    stream: Stream | None = None
    id: int = field(default_factory=lambda: next(_ids))

    prompt: int = field(init=False)
    kv_len: int = field(init=False, default=0)
    cached: int = field(init=False, default=0)
    chunk_end: int | None = field(init=False, default=None)
    drafted: list[bool] = field(init=False, default_factory=list)
    proposers: list[str | None] = field(init=False, default_factory=list)
    logprobs: list[TokenLogprob] = field(init=False, default_factory=list)
    finish: str | None = field(init=False, default=None)
    stop_cause: int | str | None = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)
    stats: SpecStats = field(init=False, default_factory=SpecStats)
    stop_search: StopSearch | None = field(init=False, default=None)  # made by `core.stop` at the first token

    _readable: list[int] | None = field(init=False, default=None)
    _before: int = field(init=False, default=0)  # how many of these come before the tokens

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.prompt = len(self.tokens)
        self.random = self.stream or Stream(self.params.seed)

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
    def asked(self) -> list[int]:
        """The ids of the request: its source, or its prompt."""
        return list(self.source) or self.tokens[: self.prompt]

    @property
    def readable(self) -> list[int]:
        """What lookup drafters copy from, not to be changed: the tokens, after the source and the prediction if there
        are any. Each of these stands behind the end of the prompt, so that an output which begins as it does is found
        from its first token on."""
        if not self.source and not self.prediction:
            return self.tokens
        if self._readable is None:
            lead = self.tokens[max(0, self.prompt - LEAD) : self.prompt]
            self._readable = []
            for text in filter(None, (self.source, self.prediction)):
                self._readable += [*lead, *text]
            self._before = len(self._readable)
        self._readable += self.tokens[len(self._readable) - self._before :]
        return self._readable

    @property
    def limit(self) -> int:
        """Most tokens that this sequence may hold in the end."""
        return min(self.context, self.prompt + self.params.max_tokens)

    @property
    def room(self) -> int:
        """How many tokens may still be emitted."""
        return self.limit - len(self.tokens)

    def read_chunk(self) -> None:
        """Note that a chunk of the prompt was run: it gives no token."""
        self.kv_len, self.chunk_end = self.end, None

    def take(self, run: Seq[int], finish: str | None) -> None:
        """Append tokens that single steps of plain decoding would have emitted, one each, and count them."""
        self.stats.count_plain(len(run))
        self.tokens.extend(run)
        self.kv_len = len(self.tokens) - 1
        self.drafted.extend([False] * len(run))
        self.proposers.extend([None] * len(run))
        self.finish = finish

    def advance(self, verdict: Verdict, draft: Draft, b: int) -> None:
        """Append what sequence `b` of the batch gained from a step, and count it."""
        run, kept, accepted = verdict.run(draft, b), len(verdict.path[b]), verdict.accepted(b)
        depths = [draft.depths[i] for i in draft.nodes(b) if draft.acceptable is None or draft.acceptable[i]]
        if verdict.finish[b]:
            depths = [d for d in depths if d <= len(run)]  # draft tokens after a stop do not count
        self.stats.count(depths, accepted, len(run))
        self.kv_len = len(self.tokens) + kept
        self.tokens.extend(run)
        self.drafted.extend(i < accepted for i in range(len(run)))
        self.proposers.extend(verdict.proposers(draft, b, self.drafter))
        self.finish = verdict.finish[b]
