"""Suffix decoding (Oliaro et al. 2411.04975; Arctic Inference): drafts what followed the longest match, by frequency.

A suffix tree holds every string of the text up to a depth, with the number of its occurrences. The drafter looks up the
longest end of the text that occurred before. The draft is the text that followed, most frequent first (2411.04975,
section 4). It ends where verifying a further token costs too much (see `lookups`), so longer matches give longer
drafts.

    a b c y a b d z a b c w x a b        "a b" occurred 3 times before: twice c came next, once d

         c 2/3 ── w 1/3                  at most 2 tokens; of equals, the later one

Each request has its own tree, over its prompt and its output. With `across` all requests share one more tree, over the
outputs of finished requests. The draft comes from the tree with the higher expected number of accepted draft tokens.

Every draft token is deterministic given the trees: a point mass. So q is None and the distribution of the output does
not depend on the trees. With `across`, the speed depends on earlier requests, and so does the text *sampled* for a
given seed (except under the rule `coupled`; see `Engine.add`). Hence `across` is off by default.
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
    """max_depth    longest string in the tree, in tokens; matches are shorter. Deeper draft tokens copy one occurrence.
    min_match    shortest match to draft from.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens with a lower acceptance probability
                 are left out. 0: no limit. If the engine chooses draft lengths, the measured cost is used instead.
    max_tokens   largest number of tokens remembered for one request, in two generations: when the younger holds half of
                 them, the older is forgotten. A token costs at most 0.15 kB (one leaf and one inner node).
    across       also remember the outputs of finished requests, for all requests.
    past_tokens  with `across`: largest number of tokens remembered of finished requests, also in two generations.
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
    """Yield the tokens that follow the string of `match` tokens at `place`: each time the most frequent one, with its
    share of the occurrences.

    of_request: whether the string is the end of the text itself. Its last occurrence has no follower yet."""
    text, tokens = tree.text, list[int]()
    where, at = place, match
    while True:
        share = 1.0
        if isinstance(where, Node) and at == where.end and where.children:
            share, token, where = _likeliest(where, where.count - (of_request and at == match))
        else:  # the string had only one continuation
            i = at + (where.base if isinstance(where, Node) else where)
            if i >= len(text) and not of_request:
                return
            token = text[i] if i < len(text) else tokens[i - len(text)]  # after the text, copy from the draft
        if token == END:
            return
        at += 1
        tokens.append(token)
        yield token, share


def _likeliest(node: Node, total: int) -> tuple[float, int, Node | int]:
    """Return (share, token, node or position below) of the most frequent follower of the string at the end of `node`,
    which was followed `total` times; among equals, the latest."""
    counts = [(c.count if isinstance(c, Node) else 1, t, c) for t, c in node.children.items()]
    count, token, child = max(reversed(counts), key=itemgetter(0))
    return min(1.0, count / total), token, child


class SuffixDrafter(LookupDrafter[Store]):
    """Drafts from suffix trees, as the module's docstring says."""

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
    """Make the drafter `suffix`, as `registry` requires. options: as in `SuffixConfig`."""
    return SuffixDrafter(SuffixConfig(**options), target.device)
