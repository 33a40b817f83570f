"""Does a draft head belong to the target?"""

from __future__ import annotations

from slipstream.core.target import HeadHost
from slipstream.errors import PairError
from slipstream.models.pair_check import PADDING


def same_vocabulary(host: HeadHost, vocab_size: int, kind: str) -> None:
    """Raise PairError unless a head made for `vocab_size` ids can belong to this target. Outputs are padded to round
    numbers, so sizes that differ by less than `PADDING` pass; a head brings no tokenizer that would tell more."""
    narrow, wide = sorted((host.vocab_size, vocab_size))
    if wide - narrow > PADDING * wide:
        raise PairError(
            f"the {kind} head was made for a vocabulary of {vocab_size} ids, the target has {host.vocab_size}",
            why="guesses are token ids: that is too far apart to be padding, so they would stand for other tokens",
            fix="take a head that was trained for this target",
        )
