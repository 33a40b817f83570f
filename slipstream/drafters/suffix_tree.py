"""`SuffixTree`: counts every string in a text while the text grows at its end.

    text: a b a c a b      root ─┬─ a (3) ─┬─ b ...  (twice: becomes an inner node if it continues in two ways)
                                 │         └─ c ...  (once: only its position in the text)
                                 ├─ b ...
                                 └─ c ...

The tree is compressed: strings that were always continued in the same way share one node. It is lazy: a string that has
occurred once is a single integer, its position in the text. So a token adds at most one leaf and one inner node, about
0.15 kB, however deep the tree is. `Store` bounds the size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

END = -1  # marks the end of a document in a text
FANOUT = 16  # largest number of followers kept for one string; see `_drop`


class Node:
    """An inner node: the end of a string with several continuations, or of a string as long as the tree is deep."""

    __slots__ = ("base", "children", "count", "end")

    def __init__(self, base: int, end: int, count: int, children: dict[int, Node | int]):
        self.base = base  # position of the string's latest occurrence in the text
        self.end = end  # length of the string
        self.count = count  # number of occurrences of the string
        self.children = children  # next token -> node below, or position of a string that occurred only once


class SuffixTree:
    """Every string of up to `depth` tokens in a text that grows at its end, with its number of occurrences.

    `ends[m]` is the node at or above which the text's last m tokens end, for every m < depth for which these tokens
    occurred before. A new token extends each of them in one look-up: time O(longest match) a token.

    Counts are exact as long as no string has more than `FANOUT` followers."""

    def __init__(self, depth: int):
        self.depth = depth
        self.text: list[int] = []
        self.root = Node(0, 0, 0, {})
        self.ends: list[Node | None] = [self.root]

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens to the end of the text."""
        text, ends, depth = self.text, self.ends, self.depth
        for token in tokens:
            at = len(text)
            text.append(token)
            ends.append(None)
            for length in range(len(ends) - 2, -1, -1):  # longest first: a split leaves the part above whole
                node = ends[length]
                if node is not None:
                    if length < node.end:
                        if text[node.base + length] == token:
                            if length + 1 == node.end:
                                node.count += 1
                                node.base = at - length
                        else:
                            _split(node, length, text[node.base + length], token, at - length)
                            node = None
                    elif length == node.end:
                        node = self._descend(node, token, length, at - length)
                    else:
                        node = None  # a shorter suffix split the node; happens only after `_drop`
                ends[length + 1] = node
            if len(ends) > depth:
                ends.pop()
            while ends[-1] is None:
                ends.pop()

    def _descend(self, node: Node, token: int, length: int, start: int) -> Node | None:
        """Add `token` after the string at the end of `node`. Returns its child for this token, None if new."""
        child = node.children.get(token)
        if child is None:
            if len(node.children) >= FANOUT and length:
                _drop(node.children)
            node.children[token] = start
            return None
        if not isinstance(child, Node):
            child = node.children[token] = Node(child, self.depth, 1, {})
        if length + 1 == child.end:
            child.count += 1
            child.base = start
        return child

    def close(self) -> None:
        """End a document: the next tokens do not continue it."""
        if self.text:
            self.extend([END])
        self.ends = [self.root]

    def locate(self, string: Seq[int]) -> Node | int | None:
        """Return the node at or above which `string` ends, or the position of its only occurrence, or None."""
        text, node, at = self.text, self.root, 0
        while at < len(string):
            child = node.children.get(string[at])
            if child is None:
                return None
            if not isinstance(child, Node):
                return child if text[child + at : child + len(string)] == string[at:] else None
            stop = min(child.end, len(string))
            if text[child.base + at : child.base + stop] != string[at:stop]:
                return None
            node, at = child, stop
        return node

    def longest(self, tail: Seq[int], above: int = 0) -> tuple[int, Node | int]:
        """Find the longest suffix of `tail` that occurs in the text, of more than `above` and less than `depth` tokens.
        Returns its length (`above` if there is none) and where it ends. All suffixes of an occurring string occur, too,
        so doubling and then halving the length finds it."""
        most = min(len(tail), self.depth - 1)
        low, high, step = above, most, 1
        where: Node | int = self.root
        while low < high:
            length = min(low + step, high) if high == most else (low + high + 1) // 2
            place = self.locate(tail[-length:])
            step *= 2
            if place is None:
                high = length - 1
            else:
                low, where = length, place
        return low, where

    def before(self) -> tuple[int, Node | int]:
        """Find the longest end of the text itself that occurred before. Returns its length and where it ends."""
        return len(self.ends) - 1, self.ends[-1] or self.root


def _split(node: Node, length: int, old: int, new: int, start: int) -> None:
    """End `node` at `length`: until now `old` always followed the string; now, at `start`, `new` follows."""
    below = node.base if node.count == 1 and not node.children else Node(node.base, node.end, node.count, node.children)
    node.children = {old: below, new: start}
    node.base, node.end, node.count = start, length, node.count + 1


def _drop(children: dict[int, Node | int]) -> None:
    """Forget the oldest follower that occurred once, or else the rarest follower."""
    once = next((token for token, child in children.items() if not isinstance(child, Node)), None)
    if once is None:
        counts = {token: child.count for token, child in children.items() if isinstance(child, Node)}
        once = min(counts, key=counts.__getitem__)
    del children[once]


class Store:
    """Suffix trees of bounded size. The younger tree grows, the older is only read; the older is forgotten when the
    younger holds half of `max_tokens`."""

    def __init__(self, depth: int, max_tokens: int):
        self.depth, self.half = depth, max_tokens // 2
        self.young = SuffixTree(depth)
        self.old: SuffixTree | None = None
        self.indexed = 0

    def __len__(self) -> int:
        return len(self.young.text) + (len(self.old.text) if self.old else 0)

    def index(self, text: Seq[int]) -> None:
        """Add the new tokens of a text that is stored while it grows."""
        self.extend(text[self.indexed :])
        self.indexed = len(text)

    def extend(self, tokens: Seq[int]) -> None:
        begin = 0
        while begin < len(tokens):
            if len(self.young.text) >= self.half:
                self.old, self.young = self.young, SuffixTree(self.depth)
            room = self.half - len(self.young.text)
            self.young.extend(tokens[begin : begin + room])
            begin += room

    def longest(self, tail: Seq[int], at_end: bool) -> tuple[SuffixTree, int, Node | int]:
        """Find the longest end of `tail` that occurred before. Returns (tree, length, where it ends); the younger tree
        if both have it. at_end: whether `tail` is the end of the stored text."""
        tree = self.young
        match, where = tree.before() if at_end else tree.longest(tail)
        if self.old is not None:
            longer, there = self.old.longest(tail, match)
            if longer > match:
                tree, match, where = self.old, longer, there
        return tree, match, where
