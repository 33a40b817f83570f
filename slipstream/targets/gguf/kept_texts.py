"""`KeptTexts`: finished texts whose keys and values stay in llama.cpp's cache, for later texts that begin alike.

Each has a sequence id of its own, on the same cells as the sequence that computed it. A later text forks it, up to the
last block that both have in common:

    kept    id 9    the cat sat on the mat          cells 0..5
    new     id 3    the cat sat in ...              cells 0..2 of id 9, then its own

Texts give way, the one that was used longest ago first, where ids or cells run short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from slipstream.core.common_beginning import common_beginning

MOST_TEXTS = 16
"""Each takes a sequence id, of which a context begins with 64."""


class KeptTexts:
    """give_back: called with the sequence id of a text that is dropped."""

    def __init__(self, give_back: Callable[[int], None]):
        self._give_back = give_back
        self._texts: dict[int, list[int]] = {}  # by sequence id; used longest ago first

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [len(text) for text in self._texts.values()]

    def longest(self, tokens: Seq[int]) -> tuple[int, int]:
        """(how many tokens are kept of the beginning of a text, by which sequence id); (0, -1) if none are."""
        found = ((common_beginning(text, tokens), seq_id) for seq_id, text in self._texts.items())
        return max(found, default=(0, -1), key=lambda one: one[0])

    def add(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keep a text. Those that are its beginning are dropped."""
        tokens = list(tokens)
        for other, text in list(self._texts.items()):
            if tokens[: len(text)] == text:
                self._drop(other)
        while len(self._texts) >= MOST_TEXTS:
            self.drop_oldest()
        self._texts[seq_id] = tokens

    def use(self, seq_id: int) -> None:
        """Note that a text was of use."""
        self._texts[seq_id] = self._texts.pop(seq_id)

    def drop_oldest(self) -> bool:
        """Drop the text that was used longest ago; False if there is none."""
        if not self._texts:
            return False
        self._drop(next(iter(self._texts)))
        return True

    def forget(self) -> None:
        """All texts are gone, with their sequence ids."""
        self._texts.clear()

    def _drop(self, seq_id: int) -> None:
        del self._texts[seq_id]
        self._give_back(seq_id)
