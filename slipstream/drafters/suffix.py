"""Suffix decoding (Oliaro et al. 2411.04975; Arctic Inference): drafts what followed the longest match, by frequency.

A suffix tree holds every string of the text up to a depth, with the number of its occurrences. The longest end of the
text that occurred before is looked up in it. The draft is what followed, most frequent first, as long as the product of
the frequencies stays above `min_prob` (2411.04975, section 4). The longer the match, the longer the draft.

    a b c y a b d z a b c w x a b        "a b" occurred 3 times before: twice c came next, once d

         c 2/3 ── w 1/3                  at most 2 tokens; of equals, the later one

Each request has a tree of its own, over its prompt and its output. With `across` there is one more, shared by all
requests, over the outputs of finished ones. The draft comes from the tree with the higher score: the expected number of
accepted draft tokens, by the frequencies.

Every draft token is deterministic given what the trees hold, a point mass, so q is None and the distribution of the
output does not depend on the trees. Which text is *sampled* for a given seed does: with `across` it depends, like the
speed, on which requests came before (rule `coupled` excepted; see `Engine.add`). Hence it is off by default.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.acceptance_stats import MatchLengthStats
from slipstream.drafters.lookups import LookupDrafter
from slipstream.drafters.suffix_tree import END, Node, Store, SuffixTree
from slipstream.errors import ParameterError

RECORDS = 16  # longer matches share one acceptance record


@dataclass(frozen=True)
class SuffixConfig(Strict):
    """max_depth    longest string in the tree, in tokens; matches are shorter than that. Deeper draft tokens are copied
                 from one occurrence.
    min_match    shortest match to draft from.
    spec_factor  a match of length m allows spec_factor * m draft tokens, at least one (alpha of 2411.04975, section
                 4.2).
    min_prob     drafts end where the product of the frequencies falls below this.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens that are less likely to be
                 accepted are left out. 0: no limit.
    max_tokens   most tokens of one request that are remembered. They are held in two generations: when the younger has
                 half of them, the older is forgotten. A token costs at most one leaf and one inner node, about
                 0.15 kB, for any max_depth.
    across       also remember the outputs of finished requests, for all requests.
    past_tokens  most tokens of finished requests that are remembered, also in two generations: the oldest go
                 first. Used with `across` only.
    """

    max_depth: int = 24
    min_match: int = 1
    spec_factor: float = 4.0
    min_prob: float = 0.1
    row_cost: float = 0.05
    max_tokens: int = 1 << 17
    across: bool = False
    past_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        for name, low in (
            ("max_depth", 2), ("min_match", 1), ("max_tokens", 2), ("past_tokens", 2),
        ):  # fmt: skip
            check_integer(name, getattr(self, name), low)
        check_number("spec_factor", self.spec_factor, 0.0, 1000.0)
        check_number("min_prob", self.min_prob, 0.0, 1.0)
        check_number("row_cost", self.row_cost, 0.0, 0.7)
        if self.min_match >= self.max_depth:
            raise ParameterError(
                f"min_match is {self.min_match}, max_depth is {self.max_depth}",
                why="a match and its next token are looked up together, so no match would ever be found",
                fix="choose min_match < max_depth",
            )


def follow(
    tree: SuffixTree, match: int, place: Node | int, depth: int, min_prob: float, of_request: bool
) -> tuple[list[int], float]:
    """Up to `depth` draft tokens that follow the string of `match` tokens at `place`: each time the most frequent one,
    as long as the product of the frequencies is at least `min_prob`. With the expected number that are accepted.

    of_request: the string is the text's own end. Its last occurrence has no follower yet, and does not count.
    """
    text, tokens, score = tree.text, list[int](), 0.0
    probability, where, at = 1.0, place, match
    while len(tokens) < depth:
        if isinstance(where, Node) and at == where.end and where.children:
            share, token, where = _likeliest(where, where.count - (of_request and at == match))
            probability *= share
        else:  # it always went on alike
            i = at + (where.base if isinstance(where, Node) else where)
            if i >= len(text) and not of_request:
                break
            token = text[i] if i < len(text) else tokens[i - len(text)]  # a loop in the text goes on in the draft
        if token == END or probability < min_prob:
            break
        at += 1
        score += probability
        tokens.append(token)
    return tokens, score


def _likeliest(node: Node, total: int) -> tuple[float, int, Node | int]:
    """(share, token, where it leads) of the most frequent follower of the string at the end of `node`, which has been
    followed `total` times; among equals, the latest."""
    counts = [(c.count if isinstance(c, Node) else 1, t, c) for t, c in node.children.items()]
    count, token, child = max(reversed(counts), key=itemgetter(0))
    return min(1.0, count / total), token, child


class SuffixDrafter(LookupDrafter[Store]):
    """See the module."""

    name = "suffix"

    def __init__(self, config: SuffixConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.config = config or SuffixConfig()
        self.traits = replace(self.traits, remembers=self.config.across)
        self.past = Store(self.config.max_depth, self.config.past_tokens)

    def _new(self) -> tuple[Store, MatchLengthStats]:
        store = Store(self.config.max_depth, self.config.max_tokens)
        return store, MatchLengthStats(self.config.row_cost, RECORDS)

    def continue_from(self, seq: Sequence, drafted: Seq[int], depth: int) -> tuple[list[int], int]:
        """What follows the longest match: in the request's own store, or in that of finished requests if its score is
        higher."""
        config, state = self.config, self._states[seq.id]
        tokens, matched, best = list[int](), 0, 0.0
        tail = [*seq.readable[-config.max_depth :], *drafted][-config.max_depth :]
        for store in (state.store, self.past) if config.across else (state.store,):
            of_request = store is state.store and not drafted
            tree, match, where = store.longest(tail, of_request)
            if match >= config.min_match:
                most = max(1, min(depth, int(config.spec_factor * match)))
                deepest = min(most, state.match_stats.depth(match))
                whole = of_request and tree is store.young
                more, score = follow(tree, match, where, deepest, config.min_prob, whole)
                if score > best:
                    tokens, matched, best = more, match, score
        return tokens, matched

    def release(self, seq_id: int) -> None:
        state = self._states.get(seq_id)
        super().release(seq_id)
        if state is not None and self.config.across and state.seq.finish:
            self.past.extend(state.seq.output)
            self.past.young.close()


def make(target: Target, **options: Any) -> SuffixDrafter:
    """See `registry`; options as in `SuffixConfig`."""
    return SuffixDrafter(SuffixConfig(**options), target.device)
