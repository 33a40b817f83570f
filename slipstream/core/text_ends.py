"""Where a stop string ends a text, and where two texts part. Does not import torch."""

from collections.abc import Iterable


def completed_at(text: str, before: str, stop: str) -> int:
    """Where in `text` the first `stop` begins that ends after `before`, the text without its last token; -1 if none.
    An incomplete character, which decodes to U+FFFD, does not count as text yet."""
    return text.find(stop, max(0, len(before.rstrip("\ufffd")) - len(stop) + 1))


def common_beginning(a: Iterable[object], b: Iterable[object]) -> int:
    """Number of items with which both begin."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
