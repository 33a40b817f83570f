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

Every draft token is deterministic given what the trees hold, a point mass, so q is None and the distribution of the
output does not depend on the trees. Which text is *sampled* for a given seed does: with `across` it depends, like the
speed, on which requests came before (rule `coupled` excepted; see `Engine.add`). Hence it is off by default.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from slipstream.core.params import check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.matching import END, Continuation, MatchConfig, MatchDrafter, MatchState
from slipstream.drafters.suffix_tree import FANOUT, Node, Store, SuffixTree
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class SuffixConfig(MatchConfig):
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
    """

    max_depth: int = 24
    spec_offset: float = 0.0
    min_prob: float = 0.1
    branches: int = 1
    across: bool = False
    past_tokens: int = 1 << 18
    past_prompts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("max_depth", 2), ("branches", 1), ("past_tokens", 2)):
            check_integer(name, getattr(self, name), low)
        check_number("spec_offset", self.spec_offset, -1000.0, 1000.0)
        check_number("min_prob", self.min_prob, 0.0, 1.0)
        if self.min_match >= self.max_depth:
            raise ParameterError(
                f"min_match is {self.min_match}, max_depth is {self.max_depth}",
                why="a match and its next token are looked up together, so no match would ever be found",
                fix="choose min_match < max_depth",
            )
        if self.branches > FANOUT:
            raise ParameterError(f"branches is {self.branches}, only {FANOUT} followers of a string are kept")


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


class SuffixDrafter(MatchDrafter[SuffixConfig]):
    """See the module."""

    name = "suffix"

    def __init__(self, config: SuffixConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__(config or SuffixConfig(), device)
        self.traits = replace(self.traits, remembers=self.config.across)
        self.past = Store(self.config.max_depth, self.config.past_tokens)

    def _index(self, seq: Sequence) -> Store:
        return Store(self.config.max_depth, self.config.max_tokens)

    def release(self, seq_id: int) -> None:
        state = self._states.get(seq_id)
        super().release(seq_id)
        if state is not None and self.config.across and state.seq.finish:
            self.past.extend(state.seq.readable if self.config.past_prompts else state.seq.output)
            self.past.young.close()

    def _best(self, state: MatchState, depth: int, ahead: Seq[int] = ()) -> Continuation:
        """From the request's own store, or from that of all requests if its score is higher."""
        config, best = self.config, Continuation()
        tail = [*state.seq.readable[-config.max_depth :], *ahead][-config.max_depth :]
        for store in (state.index, self.past) if config.across else (state.index,):
            own = store is state.index and not ahead
            tree, match, where = store.longest(tail, own)
            if match >= config.min_match:
                nodes = max(1, min(depth, int(config.spec_factor * match + config.spec_offset)))
                deepest = min(nodes, state.match_stats.depth(match))
                latest = own and tree is store.young
                branches = 1 if ahead else config.branches
                made = grow(tree, match, where, nodes, deepest, branches, config.min_prob, latest)
                if made.score > best.score:
                    best = made
        return best


def make(target: Target, **options: Any) -> SuffixDrafter:
    """See `registry`; options as in `SuffixConfig`."""
    return SuffixDrafter(SuffixConfig(**options), target.device)
