"""N-gram lookup: draft tokens are copied from earlier in the text.

If the last few tokens have occurred before, the tokens that followed them then are drafted. No model runs, so a draft
token costs microseconds. Drafts are accepted where text repeats itself: editing, summaries, code, quotations.

The drafter counts which token followed which context, for all k-grams of the sequence with k in 2..N (the n-gram store
of n-gram assisted decoding). The counts come from the prompt and from the accepted output. The longest known context
gives the first draft token: its most frequent follower, and among equals the most recent. From there the earlier text
is copied (prompt lookup decoding, Saxena 2023; copying from references in LLMA, Yang et al. 2304.04487, section 3):

    ... the cat sat . the cat ran . the cat     longest match "the cat" -> {sat: once, ran: once and later}

         ran ── . ── the                        at most 3 deep

Every draft token is deterministic given the sequence's own text (a point mass), so q is None. Drafts do not depend on
the rest of the batch.
"""

import itertools
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from slipstream.core.params import Strict, integer, number, option
from slipstream.core.target import Target
from slipstream.drafters.lookups import ROW_COST, LookupDrafter, LookupState
from slipstream.errors import ParameterError

Context = tuple[int, ...]


class Follower(NamedTuple):
    """A token that followed a context of `match` tokens, with its latest position and its share of all followers."""

    token: int
    position: int
    match: int
    share: float


# A follower's score is count * ONCE + its latest position, so that scores sort by count, then by recency.
ONCE = 1 << 40
FOLLOWERS = 16  # most followers kept for one context; beyond that, the lowest score is dropped


@dataclass(frozen=True)
class NgramConfig(Strict):
    """max_ngram, min_ngram  longest and shortest context to look up, in tokens (N of the k-grams is max_ngram + 1).
                 Short contexts match more often, and their draft tokens are accepted less often.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens with a lower acceptance
                 probability are left out. 0: no limit. If the engine chooses draft lengths, the measured cost is used
                 instead.
    max_entries  largest number of contexts kept for one sequence, about 0.2 kB each, in two generations.
                 When the younger is full (half of max_entries), the older is dropped. A context that
                 occurs again moves to the younger, so the dropped contexts are those unseen for the
                 longest time.
    """

    max_ngram: int = option(5, check=integer(1))
    min_ngram: int = option(1, check=integer(1))
    row_cost: float = option(ROW_COST, check=number(0.0, 0.7))
    max_entries: int = option(1 << 18, check=integer(2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_ngram > self.max_ngram:
            raise ParameterError(
                f"min_ngram is {self.min_ngram}, which is larger than max_ngram, {self.max_ngram}",
                why="no n-gram can satisfy both",
                fix="give min_ngram <= max_ngram",
            )


class NgramStore:
    """Followers of every context in one sequence.

    A context that has occurred once (the usual case) maps to the position of its follower; later it maps to {follower:
    score}. Plain integers cost about 0.2 kB a context, and the garbage collector need not track them."""

    def __init__(self, config: NgramConfig):
        self.config = config
        self.indexed = 1  # tokens[:indexed] are counted as followers; the first token has no context
        self._young: dict[Context, int | dict[int, int]] = {}
        self._old: dict[Context, int | dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def index(self, tokens: Seq[int]) -> None:
        """Count the tokens added since the last call. `tokens` is the whole sequence, but only the new tokens and the
        context of the first of them are read."""
        shortest, longest = self.config.min_ngram, self.config.max_ngram
        base = max(0, self.indexed - longest)
        recent = tuple(tokens[base:])
        for i in range(self.indexed - base, len(recent)):
            follower, position = recent[i], base + i
            for k in range(shortest, min(longest, i) + 1):
                self.count(recent[i - k : i], follower, position, tokens)
        self.indexed = max(self.indexed, len(tokens))

    def count(self, context: Context, follower: int, position: int, tokens: Seq[int]) -> None:
        """Count `follower` as the token after `context`, at `position` of the sequence."""
        entry = self._young.get(context)
        if entry is None:
            if len(self._young) >= self.config.max_entries // 2:
                self._young, self._old = {}, self._young
            entry = self._old.pop(context, None)
            self._young[context] = position if entry is None else entry
            if entry is None:
                return
        if not isinstance(entry, dict):
            entry = self._young[context] = {tokens[entry]: ONCE + entry}
        score = entry.get(follower)
        if score is None:
            if len(entry) >= FOLLOWERS:
                del entry[min(entry, key=entry.__getitem__)]
            score = 0
        entry[follower] = (score // ONCE + 1) * ONCE + position

    def follower(self, tokens: Seq[int], drafted: Seq[int] = ()) -> Follower | None:
        """Return the most frequent follower of the longest known context ending `tokens` + `drafted`, or None."""
        longest = self.config.max_ngram
        tail = (*tokens[-longest:], *drafted)[-longest:]
        for k in range(len(tail), self.config.min_ngram - 1, -1):
            context = tail[-k:]
            entry = self._young.get(context) or self._old.get(context)
            if isinstance(entry, dict):
                best = max(entry, key=entry.__getitem__)
                times = sum(score // ONCE for score in entry.values())
                return Follower(best, entry[best] % ONCE, k, entry[best] // ONCE / times)
            if entry is not None:
                return Follower(tokens[entry], entry, k, 1.0)
        return None


def copy(tokens: Seq[int], drafted: Seq[int], first: Follower) -> Iterator[tuple[int, float]]:
    """Yield `first`, which follows `tokens` + `drafted`, then the text after it; each token with its share."""
    path = [*drafted, first.token]
    yield first.token, first.share
    for position in itertools.count(first.position + 1):
        # where the copy reaches the end of the text, the drafted path is copied: a loop
        token = tokens[position] if position < len(tokens) else path[position - len(tokens)]
        path.append(token)
        yield token, 1.0


class NgramDrafter(LookupDrafter[NgramStore]):
    """Drafts by n-gram lookup. device: the device of the draft tokens."""

    name = "ngram"

    def __init__(self, config: NgramConfig | None = None, device: torch.device | str = "cpu"):
        self.config = config or NgramConfig()
        super().__init__(self.config.row_cost, device)

    def _store(self) -> NgramStore:
        return NgramStore(self.config)

    def _matches(
        self, state: LookupState[NgramStore], drafted: Seq[int]
    ) -> Iterator[tuple[int, Iterator[tuple[int, float]]]]:
        text = state.text.ids
        follower = state.store.follower(text, drafted)
        if follower is not None:
            yield follower.match, copy(text, drafted, follower)


def make(target: Target, **options: Any) -> NgramDrafter:
    """Make the drafter `ngram`, as `registry` requires. options: as in `NgramConfig`."""
    return NgramDrafter(NgramConfig(**options), target.device)
