"""Suffix decoding (Oliaro et al. 2411.04975; Arctic Inference): drafts what followed the longest match, by frequency.

A suffix tree holds every string of the text up to a depth, with the number of its occurrences. The longest end of the
text that occurred before is looked up in it. The draft is what followed, most frequent first (2411.04975, section 4).
It ends where its tokens are not worth their rows (see `lookups`): the longer the match, the longer the draft.

    a b c y a b d z a b c w x a b        "a b" occurred 3 times before: twice c came next, once d

         c 2/3 ── w 1/3                  at most 2 tokens; of equals, the later one

Each request has a tree of its own, over its prompt and its output. With `across` there is one more, shared by all
requests, over the outputs of finished ones. The draft comes from the tree from which more draft tokens are expected to
be accepted.

Every draft token is deterministic given what the trees hold, a point mass, so q is None and the distribution of the
output does not depend on the trees. Which text is *sampled* for a given seed does: with `across` it depends, like the
speed, on which requests came before (rule `coupled` excepted; see `Engine.add`). Hence it is off by default.
"""

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from slipstream.core.params import Strict, integer, number, option
from slipstream.core.target import Target
from slipstream.drafters.lookups import ROW_COST, LookupDrafter, LookupState
from slipstream.drafters.suffix_tree import END, Node, Store, SuffixTree
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class SuffixConfig(Strict):
    """max_depth    longest string in the tree, in tokens; matches are shorter than that. Deeper draft tokens are copied
                 from one occurrence.
    min_match    shortest match to draft from.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens that are less likely to be
                 accepted are left out. 0: no limit. Where draft lengths are chosen, it is measured.
    max_tokens   most tokens of one request that are remembered. They are held in two generations: when the younger has
                 half of them, the older is forgotten. A token costs at most one leaf and one inner node, about
                 0.15 kB, for any max_depth.
    across       also remember the outputs of finished requests, for all requests.
    past_tokens  most tokens of finished requests that are remembered, also in two generations: the oldest go
                 first. Used with `across` only.
    """

    max_depth: int = option(24, check=integer(2))
    min_match: int = option(1, check=integer(1))
    row_cost: float = option(ROW_COST, check=number(0.0, 0.7))
    max_tokens: int = option(1 << 17, check=integer(2))
    across: bool = False
    past_tokens: int = option(1 << 18, check=integer(2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_match >= self.max_depth:
            raise ParameterError(
                f"min_match is {self.min_match}, max_depth is {self.max_depth}",
                why="a match and its next token are looked up together, so no match would ever be found",
                fix="choose min_match < max_depth",
            )


def follow(tree: SuffixTree, match: int, place: Node | int, of_request: bool) -> Iterator[tuple[int, float]]:
    """The tokens that follow the string of `match` tokens at `place`: each time the most frequent one, with its share
    of the occurrences.

    of_request: the string is the text's own end. Its last occurrence has no follower yet, and does not count.
    """
    text, tokens = tree.text, list[int]()
    where, at = place, match
    while True:
        share = 1.0
        if isinstance(where, Node) and at == where.end and where.children:
            share, token, where = _likeliest(where, where.count - (of_request and at == match))
        else:  # it always went on alike
            i = at + (where.base if isinstance(where, Node) else where)
            if i >= len(text) and not of_request:
                return
            token = text[i] if i < len(text) else tokens[i - len(text)]  # a loop in the text goes on in the draft
        if token == END:
            return
        at += 1
        tokens.append(token)
        yield token, share


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
        self.config = config or SuffixConfig()
        super().__init__(self.config.row_cost, device)
        self.traits = replace(self.traits, remembers=self.config.across)
        self.past = Store(self.config.max_depth, self.config.past_tokens)

    def _store(self) -> Store:
        return Store(self.config.max_depth, self.config.max_tokens)

    def _matches(
        self, state: LookupState[Store], drafted: Seq[int]
    ) -> Iterator[tuple[int, Iterator[tuple[int, float]]]]:
        """Find the longest match in the request's own store, and the longest in the store of finished requests."""
        config = self.config
        tail = [*state.text.ids[-config.max_depth :], *drafted][-config.max_depth :]
        at_end = state.indexed == len(state.text.ids) and not drafted
        for store in (state.store, self.past) if config.across else (state.store,):
            of_request = store is state.store and at_end
            tree, match, where = store.longest(tail, of_request)
            if match >= config.min_match:
                yield match, follow(tree, match, where, of_request and tree is store.young)

    def release(self, seq_id: int) -> None:
        state = self._states.get(seq_id)
        super().release(seq_id)
        if state is not None and self.config.across and state.seq.finish:
            self.past.extend(state.seq.output)
            self.past.young.close()


def make(target: Target, **options: Any) -> SuffixDrafter:
    """See `registry`; options as in `SuffixConfig`."""
    return SuffixDrafter(SuffixConfig(**options), target.device)
