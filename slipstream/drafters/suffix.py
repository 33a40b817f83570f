"""Suffix decoding (Oliaro et al. 2411.04975; Arctic Inference): drafts what followed the longest match, by frequency.

A suffix tree holds every string of the text up to a depth, with the number of its occurrences. The longest end of the
text that occurred before is looked up in it. The draft is what followed, most frequent first, as long as the product of
the frequencies stays above `min_prob` (2411.04975, section 4). The longer the match, the longer the draft.

    a b c y a b d z a b c w x a b        "a b" occurred 3 times before: twice c came next, once d

         c(0) 2/3 ─┬─ w(2) 1/3          tokens  = [ c,  d, w, y]     branches=2, at most 4 tokens, best first;
                   └─ y(3) 1/3          parents = [-1, -1, 0, 0]     among equals the shallower, then the later one
         d(1) 1/3

Each request has a tree of its own, over its prompt and its output. With `across` there is one more, shared by all
requests, over the outputs of finished ones. The draft comes from the tree with the higher score: the expected number of
accepted draft tokens, by the frequencies.

A fixed `corpus` has a tree of its own, which every request may copy from.

Every draft token is deterministic given what the trees hold, a point mass, so q is None and the distribution of the
output does not depend on the trees. Which text is *sampled* for a given seed does: with `across` it depends, like the
speed, on which requests came before (rule `coupled` excepted; see `Engine.add`). Hence it is off by default.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.acceptance_stats import MatchLengthStats
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.lookups import LookupDrafter, LookupState
from slipstream.drafters.suffix_tree import END, FANOUT, Node, Store, SuffixTree
from slipstream.errors import ParameterError

RECORDS = 16  # longer matches share one acceptance record


@dataclass(frozen=True)
class SuffixConfig(Strict):
    """max_depth    longest string in the tree, in tokens; matches are shorter than that. Deeper draft tokens are copied
                 from one occurrence.
    min_match    shortest match to draft from.
    max_draft    longest draft; the engine's own limit applies as well.
    spec_factor  a match of length m allows spec_factor * m + spec_offset draft tokens, at least one (alpha of
                 2411.04975, section 4.2).
    spec_offset  see spec_factor.
    min_prob     drafts end where the product of the frequencies along their path falls below this.
    branches     most alternatives at one position; 1 gives chains.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens that are less likely to be
                 accepted are left out. 0: no limit.
    max_tokens   most tokens of one request that are remembered. They are held in two generations: when the younger has
                 half of them, the older is forgotten. A token costs at most one leaf and one inner node, about
                 0.15 kB, for any max_depth.
    across       also remember the outputs of finished requests, for all requests.
    past_tokens  most tokens of finished requests that are remembered, also in two generations: the oldest go
                 first. Used with `across` only.
    past_prompts  remember their prompts too.
    corpus       documents (lists of token ids) that every request may copy from; held for good, at the same cost a
                 token.
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
    corpus: Seq[Seq[int]] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, low in (
            ("max_depth", 2), ("min_match", 1), ("max_draft", 1), ("branches", 1), ("max_tokens", 2),
            ("past_tokens", 2),
        ):  # fmt: skip
            check_integer(name, getattr(self, name), low)
        check_number("spec_factor", self.spec_factor, 0.0, 1000.0)
        check_number("spec_offset", self.spec_offset, -1000.0, 1000.0)
        check_number("min_prob", self.min_prob, 0.0, 1.0)
        check_number("row_cost", self.row_cost, 0.0, 0.7)
        if self.max_draft > MAX_NODES:
            raise ParameterError(f"max_draft is {self.max_draft}, at most {MAX_NODES} draft tokens are verified")
        if self.min_match >= self.max_depth:
            raise ParameterError(
                f"min_match is {self.min_match}, max_depth is {self.max_depth}",
                why="a match and its next token are looked up together, so no match would ever be found",
                fix="choose min_match < max_depth",
            )
        if self.branches > FANOUT:
            raise ParameterError(f"branches is {self.branches}, only {FANOUT} followers of a string are kept")


@dataclass(frozen=True)
class Continuation:
    """A tree of draft tokens for one sequence, after a match of `match` tokens; `score` is the expected number that
    are accepted."""

    match: int = 0
    score: float = 0.0
    tokens: Seq[int] = ()
    parents: Seq[int] = ()


_Waiting = tuple[float, int, int, int, Node | int, int]
"""A draft token that has not been taken yet: (-probability, arrival, parent, token, where it leads, length there)."""


def grow(
    tree: SuffixTree, match: int, found: Node | int, nodes: int, depth: int, branches: int, min_prob: float, own: bool
) -> Continuation:
    """Up to `nodes` draft tokens, none deeper than `depth`, that follow the string of `match` tokens at `found`: the
    most probable first, the probability being the product of the frequencies along the path.

    own: the string is the text's own end. Its last occurrence has no follower yet, and does not count.
    """
    text, tokens, parents, score = tree.text, list[int](), list[int](), 0.0
    probability, parent, where, at = 1.0, -1, found, match  # the draft token whose followers are offered next
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
            elif own:  # the draft itself follows the last token: a loop in the text goes on
                ways = [(1.0, _path(tokens, parents, parent)[i - len(text)], where)]
            else:
                ways = []
        for share, token, below in ways:
            if token != END and probability * share >= min_prob:
                heapq.heappush(waiting, (-probability * share, arrivals, parent, token, below, at + 1))
                arrivals += 1
        if not waiting or len(tokens) >= nodes:
            return Continuation(match, score, tokens, parents)
        negative, _, above, token, where, at = heapq.heappop(waiting)
        probability, parent = -negative, len(tokens)
        score += probability
        tokens.append(token)
        parents.append(above)


def _ways(node: Node, total: int, branches: int) -> list[tuple[float, int, Node | int]]:
    """(share, token, where it leads) of the most frequent followers of the string at the end of `node`, which has been
    followed `total` times; among equals, the latest comes first."""
    counts = [(c.count if isinstance(c, Node) else 1, t, c) for t, c in node.children.items()]
    if len(counts) > 1:
        counts = heapq.nlargest(branches, reversed(counts), key=itemgetter(0))
    return [(min(1.0, count / total), token, child) for count, token, child in counts]


def _path(tokens: Seq[int], parents: Seq[int], node: int) -> list[int]:
    """The draft tokens from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@dataclass
class _State(LookupState):
    """store: of the sequence's text; indexed: how many of its tokens are in there."""

    seq: Sequence
    store: Store
    indexed: int = 0


class SuffixDrafter(LookupDrafter[_State]):
    """See the module."""

    name = "suffix"

    def __init__(self, config: SuffixConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.config = config or SuffixConfig()
        self.traits = replace(self.traits, remembers=self.config.across)
        self.past = Store(self.config.max_depth, self.config.past_tokens)
        self._shared = [self.past] if self.config.across else []
        if self.config.corpus:
            self._shared.append(Store(self.config.max_depth, 2 + 4 * sum(map(len, self.config.corpus))))
            for document in self.config.corpus:
                self._shared[-1].extend(document)
                self._shared[-1].young.close()

    def continue_from(self, seq: Sequence, drafted: Seq[int], depth: int) -> tuple[list[int], int]:
        """See `core.drafter.Lookup`."""
        best = self._best(self._states[seq.id], depth, drafted)
        return list(best.tokens), best.match

    def release(self, seq_id: int) -> None:
        state = self._states.get(seq_id)
        super().release(seq_id)
        if state is not None and self.config.across and state.seq.finish:
            self.past.extend(state.seq.readable if self.config.past_prompts else state.seq.output)
            self.past.young.close()

    def _state(self, seq: Sequence) -> _State:
        state, text = self._states.get(seq.id), seq.readable
        if state is None:
            store = Store(self.config.max_depth, self.config.max_tokens)
            state = _State(seq, store, match_stats=MatchLengthStats(self.config.row_cost, RECORDS))
            self._states[seq.id] = state
        state.store.extend(text[state.indexed :])
        state.indexed = len(text)
        return state

    def _tree(self, state: _State, seq: Sequence, depth: int) -> tuple[Seq[int], Seq[int]]:
        best = self._best(state, depth)
        state.match = best.match
        return best.tokens, best.parents

    def _best(self, state: _State, depth: int, ahead: Seq[int] = ()) -> Continuation:
        """What follows the longest match, up to `depth` deep: in the request's own store, or in a shared one if its
        score is higher. ahead: tokens taken to follow the text; then a chain."""
        config, best = self.config, Continuation()
        tail = [*state.seq.readable[-config.max_depth :], *ahead][-config.max_depth :]
        for store in (state.store, *self._shared):
            own = store is state.store and not ahead
            tree, match, where = store.longest(tail, own)
            if match >= config.min_match:
                most = min(depth, config.max_draft)
                nodes = max(1, min(most, int(config.spec_factor * match + config.spec_offset)))
                deepest = min(nodes, state.match_stats.depth(match))
                latest = own and tree is store.young
                branches = 1 if ahead else config.branches
                made = grow(tree, match, where, nodes, deepest, branches, config.min_prob, latest)
                if made.score > best.score:
                    best = made
        return best


def make(target: Target, **options: Any) -> SuffixDrafter:
    """See `registry`; options as in `SuffixConfig`. Raises ParameterError where the corpus holds an id that the target
    does not know."""
    config = SuffixConfig(**options)
    outside = next((t for document in config.corpus for t in document if not 0 <= t < target.vocab_size), None)
    if outside is not None:
        raise ParameterError(
            f"the corpus holds id {outside}, the target's vocabulary is 0..{target.vocab_size - 1}",
            why="draft tokens are copied from it",
            fix="encode it with the target's own tokenizer",
        )
    return SuffixDrafter(config, target.device)
