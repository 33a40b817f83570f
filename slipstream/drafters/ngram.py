"""N-gram lookup: draft tokens are copied from earlier in the text.

If the last few tokens have occurred before, the tokens that followed them then are drafted. No model runs, so a draft
token costs microseconds. This saves time for text that repeats itself: editing, summaries, code, quotations.

The drafter counts which token followed which context, for all k-grams of the sequence with k in 2..N (the n-gram store
of n-gram assisted decoding). The counts come from the prompt and from the accepted output. The longest known context is
used; of its followers the most frequent one, and among equals the most recent. From there the earlier text is copied
(prompt lookup decoding, Saxena 2023; copying from references in LLMA, Yang et al. 2304.04487, section 3):

    ... the cat sat . the cat ran . the cat     longest match "the cat" -> {sat: once, ran: once and later}

         ran ── . ── the                        at most 3 deep

Every draft token is deterministic given the sequence's own text (a point mass), so q is None. Nothing depends on the
rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.acceptance_stats import MatchLengthStats
from slipstream.drafters.lookups import LookupDrafter
from slipstream.errors import ParameterError

Context = tuple[int, ...]
Follower = tuple[int, int, int]  # token, its latest position, length of the context that it followed

# A follower's score is count * ONCE + its latest position, so that scores sort by count, then by recency.
ONCE = 1 << 40
FOLLOWERS = 16  # most followers kept for one context; beyond that, the one with the lowest score is dropped


@dataclass(frozen=True)
class NgramConfig(Strict):
    """max_ngram, min_ngram  longest and shortest context to look up, in tokens (N of the k-grams is max_ngram + 1).
                 Short contexts match more often, and their draft tokens are accepted less often.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens with a lower acceptance probability
                 are left out. 0: no limit; above 0.7 nothing would ever be tried.
    max_entries  most contexts kept for one sequence, about 0.2 kB each. Contexts are held in two generations. When the
                 younger one is full (half of max_entries), the older one is dropped. A context that occurs again moves
                 to the younger one, so the contexts dropped are those not seen for the longest time.
    """

    max_ngram: int = 5
    min_ngram: int = 1
    row_cost: float = 0.05
    max_entries: int = 1 << 18

    def __post_init__(self) -> None:
        for name, low in (("max_ngram", 1), ("min_ngram", 1), ("max_entries", 2)):
            check_integer(name, getattr(self, name), low)
        check_number("row_cost", self.row_cost, 0.0, 0.7)
        if self.min_ngram > self.max_ngram:
            raise ParameterError(
                f"min_ngram is {self.min_ngram}, max_ngram is {self.max_ngram}",
                why="no context can satisfy both",
                fix="choose min_ngram <= max_ngram",
            )


class NgramStore:
    """Followers of every context in one sequence.

    A context that has occurred once (the usual case) maps to the position of its follower; later it maps to {follower:
    score}. Plain integers cost about 0.2 kB a context, and the garbage collector need not track them.
    """

    def __init__(self, config: NgramConfig):
        self.config = config
        self.indexed = 1  # tokens[:indexed] have been counted as followers; the first has no context
        self._young: dict[Context, int | dict[int, int]] = {}
        self._old: dict[Context, int | dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def index(self, tokens: Seq[int]) -> None:
        """Count the tokens added since the last call. `tokens` is the whole sequence; of the old ones, only the context
        of the first new token is read again."""
        shortest, longest = self.config.min_ngram, self.config.max_ngram
        base = max(0, self.indexed - longest)
        recent = tuple(tokens[base:])
        for i in range(self.indexed - base, len(recent)):
            follower, position = recent[i], base + i
            for k in range(shortest, min(longest, i) + 1):
                self.count(recent[i - k : i], follower, position, tokens)
        self.indexed = max(self.indexed, len(tokens))

    def count(self, context: Context, follower: int, position: int, tokens: Seq[int]) -> None:
        """Count `follower` after `context`, at `position` of the sequence."""
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
        """What most often followed the longest known context at the end of `tokens` + `drafted`; None if none is
        known."""
        longest = self.config.max_ngram
        tail = (*tokens[-longest:], *drafted)[-longest:]
        for k in range(len(tail), self.config.min_ngram - 1, -1):
            context = tail[-k:]
            entry = self._young.get(context) or self._old.get(context)
            if isinstance(entry, dict):
                best = max(entry, key=entry.__getitem__)
                return best, entry[best] % ONCE, k
            if entry is not None:
                return tokens[entry], entry, k
        return None


def extend(tokens: Seq[int], path: list[int], position: int, depth: int) -> None:
    """Extend `path`, draft tokens after `tokens`, to `depth` draft tokens by copying the text after `position`, an
    earlier occurrence of the path's last token."""
    path += tokens[position + 1 : position + 1 + depth - len(path)]
    overrun = 0
    while len(path) < depth:  # the copy has reached the end of the text, where the path itself continues: a loop
        path.append(path[overrun])
        overrun += 1


class NgramDrafter(LookupDrafter[NgramStore]):
    """device: where the target wants its draft tokens."""

    name = "ngram"

    def __init__(self, config: NgramConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.config = config or NgramConfig()

    def _new(self) -> tuple[NgramStore, MatchLengthStats]:
        return NgramStore(self.config), MatchLengthStats(self.config.row_cost, self.config.max_ngram)

    def continue_from(self, seq: Sequence, drafted: Seq[int], depth: int) -> tuple[list[int], int]:
        state, text = self._states[seq.id], seq.readable
        follower = state.store.follower(text, drafted)
        if follower is None:
            return [], 0
        token, position, match = follower
        depth = min(depth, state.match_stats.depth(match))
        if not depth:
            return [], match
        path = [*drafted, token]
        extend(text, path, position, len(drafted) + depth)
        return path[len(drafted) :], match


def make(target: Target, **options: Any) -> NgramDrafter:
    """See `registry`; options as in `NgramConfig`."""
    return NgramDrafter(NgramConfig(**options), target.device)
