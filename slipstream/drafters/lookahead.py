"""Lookahead decoding (Fu et al. 2402.02057): Jacobi iteration rides along with verification and collects n-grams.

A causal model can be asked about many positions at once, given guesses for the positions before them (Jacobi
iteration). Its answers are seldom right where they stand, but short runs of them are things that the model likes to
say. They go into a pool, and when a run's first token comes up in the text, its rest is guessed. No other model, no
training.

The window has `window` columns (W) and `ngram` - 1 levels (N - 1): cell (l, i) is a guess for the token l + i + 1
places behind the pending one, made from level l - 1 one round earlier. It is an ordinary tree whose nodes have no vote.
Level 0 is a chain below the pending token, every column hangs below its cell of level 0, and so each cell sees exactly
what 2402.02057 (section 3.1, figure 2) has it see: level 0 up to its column, then its own column. W = 3, N = 4:

    pending ─┬─ (0,0) ─┬─ (0,1) ─┬─ (0,2) ── (1,2) ── (2,2) -> new        each "new" is the target's argmax there
             │         │         └─ (1,1) ── (2,1) -> new
             │         └─ (1,0) ── (2,0) -> new
             └─ guesses from the pool: chains of N - 1, with a vote, what begins alike merged

Every round, (0,i) .. (N-2,i) and "new" make one n-gram for the pool, level 0 is dropped and "new" becomes the last
level. The text gained one token, so the window has kept its place; where guesses stood and it gained more, as many
columns go on the left, and others come in on the right. What begins a window, or comes in, is drawn from the text.

Where this deviates from the paper's code: columns come in at all levels at once, so their first n-grams are poor (there
the window shrinks and grows back); n-grams of the text itself enter the pool as well (`from_text`); and no cell lies
deeper than the round's budget, so with fewer than window + ngram - 2 draft tokens a round runs fewer columns, and with
fewer than ngram - 1 none.

New cells are argmaxes under sampling too (section 3.2), so every guess is deterministic, or drawn apart from all that
verification draws: a point mass, q is None. Nothing depends on the rest of the batch. Rule `block` takes chains only,
and refuses this drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.guard import MAX_NODES
from slipstream.errors import ParameterError

TRIAL = 16  # rounds after which it is judged whether the rows pay
FADE = 31 / 32  # weight that the record keeps with each round
REST, LONGEST = 16, 256  # rounds without a draft when they do not, doubled each time up to the longest


@dataclass(frozen=True)
class LookaheadConfig(Strict):
    """window     columns (W): how many n-grams a round makes.
    ngram      length of an n-gram (N), at least 2; its last N - 1 tokens are what is guessed.
    guesses    most n-grams that are verified in a round (G), and that are kept for one first token.
    from_text  n-grams of the prompt and of the output enter the pool too.
    row_cost   what verifying one more row costs, as a share of a step. Half of the window is run until the guesses that
               stand have proved worth the rows of a round, window included; where they are not, the drafter rests for
               a while, each time longer. 0 always runs all of it.
    pool       most first tokens in the pool; those used longest ago go first. About 0.15 kB an n-gram.
    """

    window: int = 5
    ngram: int = 4
    guesses: int = 5
    from_text: bool = True
    row_cost: float = 0.05
    pool: int = 1 << 14

    def __post_init__(self) -> None:
        for name, low in (("window", 1), ("ngram", 2), ("guesses", 1), ("pool", 1)):
            check_integer(name, getattr(self, name), low)
        check_number("row_cost", self.row_cost, 0.0, 1.0)
        if not isinstance(self.from_text, bool):
            raise ParameterError(f"from_text is {self.from_text!r}, must be True or False")
        if self.most_nodes > MAX_NODES:
            raise ParameterError(
                f"window={self.window}, ngram={self.ngram} and guesses={self.guesses} make trees of {self.most_nodes} "
                f"nodes, at most {MAX_NODES} are verified",
                fix="lower one of them",
            )

    @property
    def most_nodes(self) -> int:
        """Nodes in the largest tree that this configuration can draft."""
        return (self.window + self.guesses) * (self.ngram - 1)


class Pool:
    """N-grams by their first token, at most `guesses` for each: the latest."""

    def __init__(self, tokens: int, guesses: int):
        self.tokens, self.guesses = tokens, guesses
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # dictionaries keep the order: the oldest first

    def __len__(self) -> int:
        """N-grams held."""
        return sum(map(len, self._tails.values()))

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
        """What followed `first`, the latest n-gram first."""
        return list(self._tails.get(first, ()))[::-1]


class Patience:
    """Whether rounds pay: one row costs `row_cost` of a step, one guess that stands saves a step. Looks at earlier
    rounds alone."""

    def __init__(self, row_cost: float):
        self.row_cost = row_cost
        self.rounds, self.rows, self.stood = 0, 0.0, 0.0
        self.rest, self.pause = 0, REST
        self.proven = row_cost == 0  # rounds have paid, so far

    def resting(self) -> bool:
        """Whether to let this round go by."""
        self.rest -= self.rest > 0
        return self.rest > 0

    def learn(self, rows: int, stood: int) -> None:
        """Take in a round of so many rows."""
        self.rounds += 1
        self.rows = self.rows * FADE + rows
        self.stood = self.stood * FADE + stood
        if self.rounds < TRIAL:
            return
        self.proven = self.stood >= self.row_cost * self.rows
        if self.proven:
            self.pause = REST
        else:
            self.rest, self.pause = self.pause + 1, min(2 * self.pause, LONGEST)
            self.rounds, self.rows, self.stood = 0, 0.0, 0.0


@dataclass
class _State:
    pool: Pool
    patience: Patience
    levels: list[list[int]]  # [level][column] of the window; fewer than N - 1 levels at first
    indexed: int = 0  # tokens of the sequence whose n-grams are in the pool
    drafted: list[int] | None = None  # tokens of the last draft
    columns: int = 0  # columns of the window that it ran
    gained: int = 0  # tokens that the text has gained since the window was moved


class LookaheadDrafter:
    """device: where the target wants its draft tokens."""

    name = "lookahead"
    taps: tuple[int, ...] = ()

    def __init__(self, config: LookaheadConfig | None = None, device: torch.device | str = "cpu"):
        self.config = config or LookaheadConfig()
        self.device = device
        self._states: dict[int, _State] = {}

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        acceptable: list[bool] = []
        splits = [0]
        for seq, depth in zip(seqs, budget, strict=True):
            if depth > 0:
                state = self._state(seq)
                if not state.patience.resting():
                    own: tuple[list[int], list[int]] = ([], [])
                    self._guess(state, seq.tokens[-1], depth, *own)
                    acceptable += [True] * len(own[0])
                    self._look(state, depth, *own)
                    acceptable += [False] * (len(own[0]) + len(tokens) - len(acceptable))
                    state.drafted = own[0]
                    tokens += own[0]
                    parents += own[1]
            splits.append(len(tokens))
        return Draft.of(tokens, parents, splits, acceptable=None if all(acceptable) else acceptable, device=self.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        told: list[tuple[Sequence, _State, int]] = []  # whose window was run, columns of it
        rows: list[int] = []
        for b, seq in enumerate(seqs):
            state = self._states.get(seq.id)
            if state is not None:
                ran = len(draft.nodes(b)) > 0 and draft.ids[draft.splits[b] : draft.splits[b + 1]] == state.drafted
                columns = state.columns if ran else 0
                if ran:
                    state.patience.learn(len(draft.nodes(b)), verdict.accepted(b))
                state.drafted, state.columns = None, 0
                state.gained += len(verdict.path[b]) + 1
                if columns:
                    last = draft.splits[b + 1] + b + 1  # behind the last row of this sequence
                    rows += range(last - columns, last)  # the last level stands last
                    told.append((seq, state, columns))
        fresh = iter(out.logits[rows].argmax(-1).tolist() if rows else ())
        for seq, state, columns in told:
            self._shift(state, seq, [next(fresh) for _ in range(columns)])

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _state(self, seq: Sequence) -> _State:
        """The state of a sequence, its pool up to date. Made when first needed: a sequence for which speculation is off
        costs nothing."""
        config, state = self.config, self._states.get(seq.id)
        if state is None:
            state = _State(Pool(config.pool, config.guesses), Patience(config.row_cost), [[]])
            state.indexed = max(0, len(seq.tokens) - config.pool)
            self._fill(state, seq)
            self._states[seq.id] = state
        elif state.gained:
            self._shift(state, seq, [])
        if config.from_text:
            recent = seq.tokens[max(0, state.indexed - config.ngram + 1) :]
            for i in range(len(recent) - config.ngram + 1):
                state.pool.add(recent[i : i + config.ngram])
            state.indexed = len(seq.tokens)
        return state

    def _guess(self, state: _State, last: int, depth: int, tokens: list[int], parents: list[int]) -> None:
        """Append the pool's n-grams that begin with `last`, as chains that share what begins alike."""
        places: dict[tuple[int, ...], int] = {(): -1}
        for tail in state.pool.tails(last):
            for end in range(1, min(depth, len(tail)) + 1):
                if tail[:end] not in places:
                    places[tail[:end]] = len(tokens)
                    tokens.append(tail[end - 1])
                    parents.append(places[tail[: end - 1]])

    def _look(self, state: _State, depth: int, tokens: list[int], parents: list[int]) -> None:
        """Append as many columns of the window as fit into `depth`."""
        window = self.config.window if state.patience.proven else -(-self.config.window // 2)
        columns = state.columns = max(0, min(window, depth - len(state.levels) + 1))
        first = len(tokens)
        for level, row in enumerate(state.levels):
            tokens += row[:columns]
            if level:
                parents += range(first + (level - 1) * columns, first + level * columns)
            else:
                parents += (-1, *range(first, first + columns - 1))[:columns]

    def _shift(self, state: _State, seq: Sequence, new: list[int]) -> None:
        """Move the window behind the text as it is now. new: what the target said behind the last level, for the
        columns that were run, if any."""
        levels, gained, state.gained = state.levels, state.gained, 0
        if new:
            levels = [*levels, new]
        if len(levels) == self.config.ngram:  # full: the first level goes, and the window has kept its place
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
            text = seq.tokens
            drawn = iter((seq.random.uniforms(DRAFT, len(text), missing) * len(text)).astype(int).tolist())
            for level in state.levels:
                level += [text[next(drawn)] for _ in range(self.config.window - len(level))]


def make(target: Target, **options: Any) -> LookaheadDrafter:
    """See `registry`; options as in `LookaheadConfig`."""
    return LookaheadDrafter(LookaheadConfig(**options), target.device)
