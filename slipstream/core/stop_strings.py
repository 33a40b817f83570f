"""Where a stop string ends a text. Does not import torch."""

from __future__ import annotations


def completed_at(text: str, before: str, stop: str) -> int:
    """Where in `text` the first `stop` begins that ends after `before`, the text without its last token; -1 if none.
    An incomplete character, which decodes to U+FFFD, does not count as text yet."""
    return text.find(stop, max(0, len(before.rstrip("\ufffd")) - len(stop) + 1))
