"""Draft models whose tokenizer differs from the target's. Both methods keep the target's distribution.

    intersection  the draft model drafts only tokens that both vocabularies have (see `targets.translated`). Sampled,
                  in chains and trees, with every option of the draft model.
    string        the draft model writes text, which the target's tokenizer splits (see `string_match`). Nothing has to
                  be shared; draft tokens are the most likely ones at every temperature.

With equal tokenizers nothing is translated. Other tokenizers are refused unless one of these is asked for, because the
acceptance rate is lower than that of a draft model of the target's family.
"""

from __future__ import annotations

import logging
from typing import Any

from slipstream.core.target import Target
from slipstream.drafters.string_match import Writer
from slipstream.errors import PairError
from slipstream.models.rereading import Vocabularies
from slipstream.models.shared_tokens import SharedTokens
from slipstream.models.token_texts import TokenTexts
from slipstream.settings import DRAFT_TOKENIZERS, INTERSECTION, SAME, one_of
from slipstream.targets.translated import TranslatedModel

log = logging.getLogger("slipstream")


def with_own_tokenizer(
    model: Target, draft_tokenizer: Any, target_tokenizer: Any, vocab_size: int, method: str
) -> Target | Writer:
    """A loaded draft model with a tokenizer of its own, as `LLM(draft=...)` and `make_drafter` take it.

    draft_tokenizer, target_tokenizer  fast tokenizers of transformers, or of a folder (`models.text.load_tokenizer`).
    vocab_size  width of the target's logits. method: "intersection" or "string".

    Raises PairError if a tokenizer is missing, changes text, or cannot be compared, and if no token is shared.
    """
    one_of("method", method, tuple(name for name in DRAFT_TOKENIZERS if name != SAME))
    both = vocabularies(target_tokenizer, draft_tokenizer, (vocab_size, model.vocab_size), method)
    return TranslatedModel(model, both) if method == INTERSECTION else Writer(model, both)


def vocabularies(ours: Any, theirs: Any, width: tuple[int, int], method: str) -> Vocabularies:
    """What is known of both tokenizers; raises as `with_own_tokenizer`. width: of both models' logits."""
    for tokenizer, whose in ((ours, "the target"), (theirs, "the draft model")):
        if tokenizer is None:
            raise PairError(
                f"draft_tokenizer is {method!r}, but the tokenizer of {whose} is unknown",
                why="draft tokens are translated by what tokens write",
                fix="name folders that have one, or use slipstream.drafters.draft_tokenizers.with_own_tokenizer",
            )
    mine, other = TokenTexts(ours, "the target"), TokenTexts(theirs, "the draft model")
    shared = SharedTokens(mine, other, width)
    other.require_faithful()
    if method == INTERSECTION:
        shared.require_some()
    else:
        mine.require_faithful()
    log.info("draft_tokenizer=%r: %s", method, shared)
    return Vocabularies(mine, other, shared)
