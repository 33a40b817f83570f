"""Text of an output token by token, stop strings in it, and common beginnings of texts. Does not import torch."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence as Seq

Decode = Callable[[Seq[int]], str]

REPLACEMENT = "\ufffd"


def context_of(decode: Decode, prompt: Seq[int]) -> tuple[list[int], int]:
    """Return the last tokens of a prompt, with which its output is decoded, and how many of them write whole
    characters.

    Many tokenizers drop the space that begins a text. So the first token of an output is decoded correctly only after
    another token that writes something."""
    size, text = 4, ""
    while text[:1] in ("", REPLACEMENT) and size < len(prompt) + 4:
        size *= 2
        text = decode(prompt[-size:])
    ids = list(prompt[-size:])
    # A character has at most four bytes, and each token writes at least one of them.
    complete = (len(ids) - cut for cut in range(4) if not decode(ids[: len(ids) - cut]).endswith(REPLACEMENT))
    return ids, next(complete, len(ids))


def text_after(decode: Decode, prompt: Seq[int], output: Seq[int]) -> str:
    """Return the text that an output adds to its prompt."""
    ids, whole = context_of(decode, prompt)
    return decode([*ids, *output])[len(decode(ids[:whole])) :]


class OutputText:
    """Decodes an output token by token. stray_byte: as in `TextStream`."""

    def __init__(self, decode: Decode, prompt: Seq[int] = (), stray_byte: int | None = None):
        self._decode, self._stray = decode, stray_byte
        self._ids, self._shown = context_of(decode, prompt)
        self._prompt = len(self._ids)
        self._begins = deque([0], maxlen=5)  # first token of each of the last texts; decoding starts there

    def __len__(self) -> int:
        """Number of tokens that were added."""
        return len(self._ids) - self._prompt

    @property
    def incomplete(self) -> int:
        """Number of tokens at the end of the output whose character is not complete."""
        return len(self._ids) - self._shown

    def add(self, token: int) -> str:
        """Add a token. Returns the text that is complete with this token."""
        self._ids.append(token)
        before, after = self._texts()
        if after.endswith(REPLACEMENT):
            return ""
        further = () if self._stray is None else (*self._ids[self._begins[0] :], self._stray)
        if further and not self._decode(further).startswith(after):  # a later token may still change this text
            return ""
        if len(after) > len(before):
            self._begins.append(self._shown)
        self._shown = len(self._ids)
        return after[len(before) :]

    def rest(self) -> str:
        """Return the text of the incomplete tokens, for an output that ends with them."""
        before, after = self._texts()
        self._shown = len(self._ids)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        begin = self._begins[0]
        return self._decode(self._ids[begin : self._shown]), self._decode(self._ids[begin:])


class StopSearch:
    """Finds stop strings in the text of an output, as its tokens arrive."""

    def __init__(self, decode: Decode, prompt: Seq[int], stop: Seq[str]):
        self.decode, self._prompt, self._stop, self._longest = decode, list(prompt), stop, max(map(len, stop))
        self.read(())

    def read(self, output: Iterable[int]) -> None:
        """Start again with the output `output`."""
        self.text, self._end = OutputText(self.decode, self._prompt), ""  # _end: of the text before the next token
        for token in output:
            self.add(token)

    def add(self, token: int) -> str | None:
        """Add a token. Returns the stop string that the token completes; if it completes several, the string that
        begins first."""
        known, whole = len(self._end), self._end + self.text.add(token)
        self._end = whole[max(0, len(whole) + 1 - self._longest) :]
        if len(whole) == known:
            return None
        ends = [(at, stop) for stop in self._stop if (at := whole.find(stop, max(0, known + 1 - len(stop)))) >= 0]
        return min(ends, default=(0, None))[1]


def count_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which a stop string begins, without being complete."""
    at = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


def find_completed(text: str, before: str, stop: str) -> int:
    """Return where in `text` the first `stop` begins that ends after `before`, or -1. before: the text without its last
    token. An incomplete character, which decodes to U+FFFD, does not count as text yet."""
    return text.find(stop, max(0, len(before.rstrip(REPLACEMENT)) - len(stop) + 1))
