"""Suffix decoding (Oliaro et al. 2411.04975; Arctic Inference): the text so far guesses on, by how often it went which
way.

A suffix tree holds everything that has been said, each string with the number of its occurrences. The longest end of
the text that has occurred before is looked up in it, and the guesses are what followed, most frequent first, as far as
the product of the frequencies bears (2411.04975, section 4). The longer the match, the more is guessed.

    a b c y a b d z a b c w x a b        "a b" occurred 3 times before: twice c came next, once d

         c(0) 2/3 ─┬─ w(2) 1/3          tokens  = [ c,  d, w, y]     branches=2, at most 4 guesses, best first;
                   └─ y(3) 1/3          parents = [-1, -1, 0, 0]     among equals the shallower, then the later one
         d(1) 1/3

Each request has a tree of its own, over its prompt and its output. With `across` there is one more, shared by all
requests, over the outputs of those that have finished; the guesses come from the tree that scores higher, the score
being the expected number of guesses that stand, as the frequencies have it.

Every guess is deterministic given what the trees hold, a point mass, so q is None and the law of the output does not
depend on the trees. Which text is *sampled* for a given seed does: with `across` it depends, like the speed, on which
requests finished before (rule `coupled` excepted). Hence it is off unless asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.acceptance_stats import MatchLengthStats
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.lookups import LookupDrafter, LookupState
from slipstream.drafters.suffix_tree import END, FANOUT, Node, Store, SuffixTree
from slipstream.errors import ParameterError

RECORDS = 16  # longer matches share one record of how guesses fared


@dataclass(frozen=True)
class SuffixConfig(Strict):
    """max_depth    longest string in the tree, in tokens; matches are shorter than that. Guesses that reach deeper are
                 copied on from one occurrence.
    min_match    shortest match that is guessed from.
    max_draft    deepest guess; the engine's own limit applies as well.
    spec_factor  a match of length m allows for spec_factor * m + spec_offset guesses (alpha of 2411.04975,
    spec_offset  section 4.2), at least one.
    min_prob     guesses end where the product of the frequencies along their path falls below this.
    branches     most guesses at one place; 1 gives chains.
    row_cost     what verifying one more row costs, as a share of a step; see `MatchLengthStats`. 0 switches it off.
    max_tokens   most tokens of one request that are remembered. They are held in two generations: when the younger has
                 half of them, the older is forgotten. A token costs at most one leaf and one inner node, about
                 0.15 kB, whatever max_depth.
    across       also remember the outputs of finished requests, for all requests.
    past_tokens  most tokens of finished requests that are remembered, in two generations likewise: the oldest go
                 first. Used with `across` only.
    past_prompts remember their prompts too.
    """

    max_depth: int = 24
    min_match: int = 1
    max_draft: int = 16
    spec_factor: float = 4.0
    spec_offset: float = 0.0
    min_prob: float = 0.1
    branches: int = 1
    row_cost: float = 0.05
    max_tokens: int = 1 << 17
    across: bool = False
    past_tokens: int = 1 << 18
    past_prompts: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("max_depth", 2), ("min_match", 1), ("max_draft", 1), ("branches", 1), ("max_tokens", 2), ("past_tokens", 2)
        ):  # fmt: skip
            check_integer(name, getattr(self, name), low)
        check_number("spec_factor", self.spec_factor, 0.0, 1000.0)
        check_number("spec_offset", self.spec_offset, -1000.0, 1000.0)
        check_number("min_prob", self.min_prob, 0.0, 1.0)
        check_number("row_cost", self.row_cost, 0.0, 0.7)
        if self.min_match >= self.max_depth:
            raise ParameterError(
                f"min_match is {self.min_match}, max_depth is {self.max_depth}",
                why="a match and its next token are looked up together, so no match would ever be found",
                fix="choose min_match < max_depth",
            )
        if self.max_draft > MAX_NODES:
            raise ParameterError(f"max_draft is {self.max_draft}, at most {MAX_NODES} guesses are verified")
        if self.branches > FANOUT:
            raise ParameterError(f"branches is {self.branches}, only {FANOUT} followers of a string are kept")


_Waiting = tuple[float, int, int, int, Node | int, int]
"""A guess that has not been taken yet: (-probability, arrival, parent, token, where it leads, length there)."""


@dataclass
class Guesses:
    """A tree of guesses for one sequence; `score` is the expected number that stand."""

    match: int = 0
    score: float = 0.0
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


def grow(
    tree: SuffixTree, match: int, found: Node | int, nodes: int, depth: int, branches: int, min_prob: float, own: bool
) -> Guesses:
    """Up to `nodes` guesses, none deeper than `depth`, that follow the string of `match` tokens at `found`: the
    likeliest first, a guess's probability being the product of the frequencies along its path.

    own: the string is the text's own end. Its last occurrence has no follower yet, and does not count.
    """
    text, tokens, parents, score = tree.text, list[int](), list[int](), 0.0
    probability, parent, where, at = 1.0, -1, found, match  # the guess whose followers are offered next
    waiting: list[_Waiting] = []
    arrivals = 0
    while True:
        if at - match >= depth:
            ways = []
        elif isinstance(where, Node) and at == where.end and where.children:
            ways = _ways(where, where.count - (own and at == match), branches)
        else:  # it always went on alike
            i = at + (where.base if isinstance(where, Node) else where)
            if i < len(text):
                ways = [(1.0, text[i], where)]
            elif own:  # behind the last token stand the guesses themselves: a loop in the text is followed round
                ways = [(1.0, _path(tokens, parents, parent)[i - len(text)], where)]
            else:
                ways = []
        for share, token, below in ways:
            if token != END and probability * share >= min_prob:
                heapq.heappush(waiting, (-probability * share, arrivals, parent, token, below, at + 1))
                arrivals += 1
        if not waiting or len(tokens) >= nodes:
            return Guesses(match, score, tuple(tokens), tuple(parents))
        negative, _, above, token, where, at = heapq.heappop(waiting)
        probability, parent = -negative, len(tokens)
        score += probability
        tokens.append(token)
        parents.append(above)


def _ways(node: Node, total: int, branches: int) -> list[tuple[float, int, Node | int]]:
    """(share, token, where it leads) of the most frequent followers of the string at the end of `node`, which has been
    followed `total` times; among equals, the one that came up last stands first."""
    counts = [(c.count if isinstance(c, Node) else 1, t, c) for t, c in node.children.items()]
    if len(counts) > 1:
        counts = heapq.nlargest(branches, reversed(counts), key=itemgetter(0))
    return [(min(1.0, count / total), token, child) for count, token, child in counts]


def _path(tokens: Seq[int], parents: Seq[int], node: int) -> list[int]:
    """The guesses from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@dataclass
class _State(LookupState):
    seq: Sequence
    store: Store
    indexed: int = 0  # tokens of the sequence that are in the store

    def update(self) -> None:
        self.store.extend(self.seq.tokens[self.indexed :])
        self.indexed = len(self.seq.tokens)


class SuffixDrafter(LookupDrafter[_State]):
    """device: where the target wants its draft tokens."""

    name = "suffix"

    def __init__(self, config: SuffixConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__()
        self.config = config or SuffixConfig()
        self.device = device
        self.past = Store(self.config.max_depth, self.config.past_tokens)

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        splits = [0]
        for seq, depth in zip(seqs, budget, strict=True):
            if depth > 0:
                state = self._state(seq)
                best = self._best(state, min(depth, self.config.max_draft))
                state.match = best.match
                tokens += best.tokens
                parents += best.parents
            splits.append(len(tokens))
        return self._remembered(seqs, Draft.of(tokens, parents, splits, device=self.device))

    def continue_from(self, seq: Sequence, guesses: Seq[int], depth: int) -> tuple[list[int], int]:
        """See `hybrid.Lookup`; the likeliest chain."""
        best = self._best(self._states[seq.id], min(depth, self.config.max_draft), guesses, 1)
        return list(best.tokens), best.match

    def release(self, seq_id: int) -> None:
        state = self._states.get(seq_id)
        super().release(seq_id)
        if state is not None and self.config.across and state.seq.finish:
            self.past.extend(state.seq.tokens if self.config.past_prompts else state.seq.output)
            self.past.young.close()

    def _state(self, seq: Sequence) -> _State:
        """The state of a sequence, up to date with its tokens. Made when first needed: a sequence for which
        speculation is off costs nothing, and is not remembered."""
        state = self._states.get(seq.id)
        if state is None:
            config = self.config
            state = _State(
                seq, Store(config.max_depth, config.max_tokens), match_stats=MatchLengthStats(config.row_cost, RECORDS)
            )
            self._states[seq.id] = state
        state.update()
        return state

    def _best(self, state: _State, depth: int, ahead: Seq[int] = (), branches: int = 0) -> Guesses:
        """What follows the longest match in the request's own store, or in that of all requests if it scores higher.
        ahead: tokens taken to stand behind the text; branches: 0 for those configured."""
        config, best = self.config, Guesses()
        tail = [*state.seq.tokens[-config.max_depth :], *ahead][-config.max_depth :]
        for store in (state.store, self.past) if config.across else (state.store,):
            own = store is state.store and not ahead
            tree, match, where = store.longest(tail, own)
            if match >= config.min_match:
                nodes = max(1, min(depth, int(config.spec_factor * match + config.spec_offset)))
                deepest = min(nodes, state.match_stats.depth(match))
                latest = own and tree is store.young
                made = grow(tree, match, where, nodes, deepest, branches or config.branches, config.min_prob, latest)
                if made.score > best.score:
                    best = made
        return best


def make(target: Target, **options: Any) -> SuffixDrafter:
    """See `registry`; options as in `SuffixConfig`."""
    return SuffixDrafter(SuffixConfig(**options), target.device)
