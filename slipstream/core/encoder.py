"""`Encoder`: what an encoder-decoder declares about its encoder. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Encoder:
    """The limits of an encoder, which reads the source of each sequence once (see `SourcedSequence`).

    context  largest number of tokens of a source.
    start    token ids with which the decoder's input begins, before the output.
    """

    context: int
    start: tuple[int, ...]
