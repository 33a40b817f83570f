"""`Encoder`: what an encoder-decoder declares. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Encoder:
    """Each text of an encoder-decoder answers a source (see `SourcedSequence`), which its encoder reads once.

    context  most tokens of a source.
    start    ids that every text begins with, before its output.
    """

    context: int
    start: tuple[int, ...]
