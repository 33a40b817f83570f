"""Lookahead decoding (Fu et al. 2402.02057): each verification pass also runs Jacobi iteration, which yields n-grams.

A causal model can predict many positions at once, given assumed tokens for the positions before them (Jacobi
iteration). Such predictions are seldom correct at their own position, but short runs of them are likely text of this
model. The runs are collected in a pool of n-grams. When the first token of an n-gram occurs in the text, the rest of
the n-gram is drafted. This needs neither another model nor training.

The window has `window` columns (W) and `ngram` - 1 levels (N - 1). Cell (l, i) is an assumed token l + i + 1 positions
after the pending token, computed from level l - 1 one step earlier. The window is a tree whose nodes are not
acceptable: level 0 is a chain below the pending token, and the rest of each column is a chain below its cell of level
0. So each cell attends to the same cells as in 2402.02057 (section 3.1, figure 2): level 0 up to its column, then its
own column. W = 3, N = 4:

    pending ─┬─ (0,0) ─┬─ (0,1) ─┬─ (0,2) ── (1,2) ── (2,2) -> new        each "new" is the target's argmax there
             │         │         └─ (1,1) ── (2,1) -> new
             │         └─ (1,0) ── (2,0) -> new
             └─ draft tokens from the pool: acceptable chains of N - 1, common prefixes merged

Every step, (0,i) .. (N-2,i) and "new" form one n-gram for the pool, level 0 is dropped and "new" becomes the last
level. If the text gained one token, the window stays aligned with the text. For every accepted draft token, one more
column is dropped on the left and one added on the right. The cells of the first window, and of added columns, are drawn
from the text.

Differences from the paper's code: columns are added at all levels at once, so their first n-grams are poor (in the
paper's code the window shrinks and grows again); n-grams of the text itself enter the pool as well (`from_text`); and
cells stay within the step's budget: below window + ngram - 2 draft tokens there are fewer columns, below ngram - 1
there is no window.

New cells are argmaxes at any temperature (section 3.2). So every draft token is deterministic, or drawn independently
of the random numbers of verification: a point mass, with q None. Drafts do not depend on the rest of the batch. The
rule `block` takes chains only and refuses this drafter.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits
from slipstream.core.params import Strict, integer, number, option
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.lookups import ReadableText
from slipstream.errors import ParameterError

TRIAL = 16  # steps after which to decide whether drafting saves time
FADE = 31 / 32  # weight that the record keeps with each step
PAUSE, LONGEST = 16, 256  # steps of a pause if drafting saves no time, doubled each time up to LONGEST


@dataclass(frozen=True)
class LookaheadConfig(Strict):
    """window     number of columns (W): how many n-grams a step yields.
    ngram      length of an n-gram (N), at least 2; its last N - 1 tokens are drafted.
    guesses    largest number of n-grams to verify in a step (G), and to keep for one first token.
    from_text  whether n-grams of the prompt and of the output enter the pool, too.
    row_cost   cost of verifying one more row, as a share of a step. Only half of the window runs until accepted draft
               tokens save more than all rows cost. If they do not, the drafter pauses, each time for longer. 0: always
               run the whole window.
    pool       largest number of first tokens in the pool; the least recently used go first. An n-gram takes 0.15 kB.
    """

    window: int = option(5, check=integer(1))
    ngram: int = option(4, check=integer(2))
    guesses: int = option(5, check=integer(1))
    from_text: bool = True
    row_cost: float = option(0.05, check=number(0.0, 1.0))
    pool: int = option(1 << 14, check=integer(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = (self.window + self.guesses) * (self.ngram - 1)  # number of nodes of the largest tree
        if nodes > MAX_NODES:
            raise ParameterError(
                f"window={self.window}, ngram={self.ngram} and guesses={self.guesses} make trees of {nodes} "
                f"nodes, but at most {MAX_NODES} can be verified in one step",
                fix="lower one of the three",
            )


class Pool:
    """Stores n-grams by their first token, the latest `guesses` for each."""

    def __init__(self, tokens: int, guesses: int):
        self.tokens, self.guesses = tokens, guesses
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # dictionaries keep the order: the oldest first

    def add(self, gram: Seq[int]) -> None:
        first, tail = gram[0], tuple(gram[1:])
        tails = self._tails[first] = self._tails.pop(first, {})
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.guesses:
            del tails[next(iter(tails))]
        if len(self._tails) > self.tokens:
            del self._tails[next(iter(self._tails))]

    def tails(self, first: int) -> list[tuple[int, ...]]:
        """Return the n-grams that begin with `first`, without this token; the latest first."""
        return list(self._tails.get(first, ()))[::-1]


class BackOff:
    """Decides whether to draft. One row costs `row_cost` of a step, one accepted draft token saves a step. Only earlier
    steps are used. If draft lengths are fixed, nothing else stops drafts that cost more than they save."""

    def __init__(self, row_cost: float):
        self.row_cost = row_cost
        self.steps, self.rows, self.accepted = 0, 0.0, 0.0
        self.remaining, self.pause = 0, PAUSE  # steps left in this pause; length of the next pause
        self.saves_time = row_cost == 0  # whether drafting saved time in the steps so far

    def is_pausing(self) -> bool:
        self.remaining -= self.remaining > 0
        return self.remaining > 0

    def learn(self, rows: int, accepted: int) -> None:
        """Record a step with `rows` draft tokens and window cells, and `accepted` accepted draft tokens."""
        self.steps += 1
        self.rows = self.rows * FADE + rows
        self.accepted = self.accepted * FADE + accepted
        if self.steps < TRIAL:
            return
        self.saves_time = self.accepted >= self.row_cost * self.rows
        if self.saves_time:
            self.pause = PAUSE
        else:
            self.remaining, self.pause = self.pause + 1, min(2 * self.pause, LONGEST)
            self.steps, self.rows, self.accepted = 0, 0.0, 0.0


@dataclass
class _State:
    pool: Pool
    back_off: BackOff
    text: ReadableText
    levels: list[list[int]]  # [level][column] of the window; fewer than N - 1 levels at first
    indexed: int = 0  # tokens of the sequence whose n-grams are in the pool
    drafted: list[int] | None = None  # tokens of the last draft
    columns: int = 0  # columns of the window in the last draft
    gained: int = 0  # tokens added to the text since the window was moved


class LookaheadDrafter:
    """Drafts n-grams that Jacobi iteration found. device: the device of the draft tokens."""

    name = "lookahead"
    traits = DrafterTraits()

    def __init__(self, config: LookaheadConfig | None = None, device: torch.device | str = "cpu"):
        self.config = config or LookaheadConfig()
        self.device = device
        self._states: dict[int, _State] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        tokens, parents, acceptable, splits = list[int](), list[int](), list[bool](), [0]
        for seq, depth in zip(seqs, (each.depth for each in budgets), strict=True):
            if depth > 0:
                state = self._state(seq)
                if not state.back_off.is_pausing():
                    pending: tuple[list[int], list[int]] = ([], [])
                    self._add_ngrams(state, seq.tokens[-1], depth, *pending)
                    acceptable += [True] * len(pending[0])
                    self._add_window(state, depth, *pending)
                    acceptable += [False] * (len(pending[0]) + len(tokens) - len(acceptable))
                    state.drafted = pending[0]
                    tokens += pending[0]
                    parents += pending[1]
            splits.append(len(tokens))
        return Draft.of(tokens, parents, splits, acceptable=None if all(acceptable) else acceptable, device=self.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        windows: list[tuple[Sequence, _State, int]] = []  # sequence, state and window columns
        rows: list[int] = []
        for b, seq in enumerate(seqs):
            state = self._states.get(seq.id)
            if state is not None:
                ran = len(draft.nodes(b)) > 0 and draft.ids[draft.splits[b] : draft.splits[b + 1]] == state.drafted
                columns = state.columns if ran else 0
                if ran:
                    state.back_off.learn(len(draft.nodes(b)), verdict.count_accepted(b))
                state.drafted, state.columns = None, 0
                state.gained += len(verdict.path[b]) + 1
                if columns:
                    end = draft.splits[b + 1] + b + 1  # end of the rows of this sequence
                    rows += range(end - columns, end)  # the rows of the window's last level are the last rows
                    windows.append((seq, state, columns))
        fresh = iter(out.logits[rows].argmax(-1).tolist() if rows else ())
        for seq, state, columns in windows:
            self._shift(state, seq, [next(fresh) for _ in range(columns)])

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _state(self, seq: Sequence) -> _State:
        """Return the state of a sequence, with its pool up to date. The state is created when it is first needed: a
        sequence for which speculation is off costs nothing."""
        config, state = self.config, self._states.get(seq.id)
        if state is None:
            state = _State(Pool(config.pool, config.guesses), BackOff(config.row_cost), ReadableText(seq), [[]])
            state.indexed = max(0, len(state.text.ids) - config.pool)
            self._fill(state, seq)
            self._states[seq.id] = state
        elif state.gained:
            self._shift(state, seq, [])
        if config.from_text:
            text = state.text.ids
            recent = text[max(0, state.indexed - config.ngram + 1) :]
            for i in range(len(recent) - config.ngram + 1):
                state.pool.add(recent[i : i + config.ngram])
            state.indexed = len(text)
        return state

    def _add_ngrams(self, state: _State, last: int, depth: int, tokens: list[int], parents: list[int]) -> None:
        """Append the pool's n-grams that begin with `last`, as chains with common prefixes merged."""
        places: dict[tuple[int, ...], int] = {(): -1}
        for tail in state.pool.tails(last):
            for end in range(1, min(depth, len(tail)) + 1):
                if tail[:end] not in places:
                    places[tail[:end]] = len(tokens)
                    tokens.append(tail[end - 1])
                    parents.append(places[tail[: end - 1]])

    def _add_window(self, state: _State, depth: int, tokens: list[int], parents: list[int]) -> None:
        """Append as many columns of the window as fit into `depth`."""
        window = self.config.window if state.back_off.saves_time else -(-self.config.window // 2)
        columns = state.columns = max(0, min(window, depth - len(state.levels) + 1))
        first = len(tokens)
        for level, row in enumerate(state.levels):
            tokens += row[:columns]
            if level:
                parents += range(first + (level - 1) * columns, first + level * columns)
            else:
                parents += (-1, *range(first, first + columns - 1))[:columns]

    def _shift(self, state: _State, seq: Sequence, new: list[int]) -> None:
        """Move the window to the end of the current text. new: the target's argmaxes after the last level, for the
        columns that ran."""
        levels, gained, state.gained = state.levels, state.gained, 0
        if new:
            levels = [*levels, new]
        if len(levels) == self.config.ngram:  # full: the first level is dropped, which shifts the window by one token
            for i in range(len(new)):
                state.pool.add([level[i] for level in levels])
            levels = levels[1:]
            gained -= 1
        state.levels = [level[gained:] for level in levels]
        self._fill(state, seq)

    def _fill(self, state: _State, seq: Sequence) -> None:
        """Draw the missing cells from the text."""
        missing = sum(self.config.window - len(level) for level in state.levels)
        if missing:
            text = state.text.ids
            drawn = iter((seq.random.uniforms(DRAFT, len(seq.tokens), missing) * len(text)).astype(int).tolist())
            for level in state.levels:
                level += [text[next(drawn)] for _ in range(self.config.window - len(level))]


def make(target: Target, **options: Any) -> LookaheadDrafter:
    """Make the drafter `lookahead`, as `registry` requires. options: as in `LookaheadConfig`."""
    return LookaheadDrafter(LookaheadConfig(**options), target.device)
