"""`Reading` translates a sequence of the target's tokens to tokens of a draft model with another tokenizer.

The draft model's own tokenizer splits complete words. A word is complete when the next word begins: before a space
after other text, at a special token, or after `LONGEST` bytes. The last word may still continue, so its tokens are
translated one by one: a token that both models have becomes that token, and other tokens are split.

        target's tokens   spec  ulative  ▁dec              draft model's, "dec" still open   speculative  Ġdec
                          spec  ulative  ▁dec  oding  ▁                                    speculative  Ġdecoding  Ġ

So the draft model's ids depend only on the target's tokens, not on how the tokens were drafted, and ids before the last
word never change.
"""

from collections.abc import Sequence as Seq

from slipstream.tokens.token_texts import SHARED_ROLES, TokenTexts

LONGEST = 64
"""After this number of bytes, a word ends at the next character. Otherwise the tokenizer would split a long text
without spaces again after each token."""

WHITESPACE = b" \t\n\r"


class Vocabularies:
    """Tokens of a target and of its draft model, and their common tokens. Tokens are common if they write the same
    bytes, special tokens also if they have the same text or the same role. Each token has at most one counterpart.

    width  number of logits of the target and of the draft model; larger ids are never predicted.
    """

    def __init__(self, target: TokenTexts, draft: TokenTexts, width: tuple[int, int]):
        self.target, self.draft = target, draft
        pairs = [
            (id_, draft_id) for data, id_ in target.id_of.items() if (draft_id := draft.id_of.get(data)) is not None
        ]
        pairs += [(target.special[name], draft.special[name]) for name in target.special.keys() & draft.special.keys()]
        for role in SHARED_ROLES:
            target_id, draft_id = target.roles[role], draft.roles[role]
            if target_id is not None and draft_id is not None:
                pairs = [pair for pair in pairs if target_id != pair[0] and draft_id != pair[1]]
                pairs.append((target_id, draft_id))
        self.to_draft = {a: b for a, b in sorted(pairs) if a < width[0] and b < width[1]}
        self.to_target = {b: a for a, b in self.to_draft.items()}

    def __str__(self) -> str:
        shared, target, draft = len(self.to_draft), len(self.target.written), len(self.draft.written)
        return (
            f"{shared} tokens are shared, {shared / max(1, target):.0%} of the target's {target} and "
            f"{shared / max(1, draft):.0%} of the draft model's {draft}"
        )


class Reading:
    """A sequence of the target's tokens as the draft model reads it.

    ids  the draft model's ids, beginning with the tokens that its tokenizer puts before every text. May be empty, if
         there are no such tokens and the draft model has no token for the text.
    """

    def __init__(self, vocabularies: Vocabularies):
        self._vocabularies = vocabularies
        self.ids: list[int] = list(vocabularies.draft.begin)
        self._read = 0  # number of the target's tokens that have been read
        self._words: list[tuple[int, int]] = [(0, len(self.ids))]  # where each word begins, in tokens and in ids

    def update(self, tokens: Seq[int], same: int) -> int:
        """Read the target's tokens, the first `same` of which are the same as in the last call. Returns the number of
        leading ids that have not changed."""
        known = min(same, self._read)
        while len(self._words) > 1 and self._words[-1][0] >= known:  # the token at `known` may no longer begin a word
            self._words.pop()
        at, kept = self._words[-1]
        del self.ids[kept:]
        word, complete = b"", True  # complete: the word does not end within a character
        for n in range(at, len(tokens)):
            written = self._vocabularies.target.text_of(tokens[n])
            if written is None:
                self._end_word(word)
                self._add_special(tokens[n], n)
                at, word = n + 1, b""
                self._words.append((at, len(self.ids)))
                continue
            next_word = written.startswith(b" ") and word[-1:] not in WHITESPACE
            if word and complete and (next_word or len(word) >= LONGEST):
                self._end_word(word)
                at, word = n, b""
                self._words.append((at, len(self.ids)))
            word += written
            complete = not cut_at_end(word)
        self._add_open(tokens[at:])
        self._read = len(tokens)
        return kept

    @property
    def open_word(self) -> int:
        """Index of the first target token whose ids may still change."""
        return self._words[-1][0]

    def _end_word(self, word: bytes) -> None:
        if not word:
            return
        first = len(self.ids) == len(self._vocabularies.draft.begin)
        if first and self._vocabularies.target.drops_space:
            word = word.removeprefix(b" ")
        self.ids += self._vocabularies.draft.pieces(word, first)

    def _add_special(self, token: int, place: int) -> None:
        """Add a special token if the draft model has it. The target's BOS at the beginning is skipped, because `ids`
        begins with the draft model's own."""
        vocabularies = self._vocabularies
        if token in vocabularies.to_draft and not (place == 0 and token == vocabularies.target.roles["bos"]):
            self.ids.append(vocabularies.to_draft[token])

    def _add_open(self, tokens: Seq[int]) -> None:
        """Add the tokens of the last word one by one; tokens that together write one character are added together."""
        to_draft, data = self._vocabularies.to_draft, b""
        for token in tokens:
            if not data and token in to_draft:
                self.ids.append(to_draft[token])
                continue
            data += self._vocabularies.target.text_of(token) or b""
            if not cut_at_end(data):
                self.ids += self._vocabularies.draft.pieces(data)
                data = b""
        self.ids += self._vocabularies.draft.pieces(data)


def cut_at_end(data: bytes) -> int:
    """Return how many bytes at the end belong to an incomplete character."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            return length if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
    return 0
