"""A fast tokenizer with one letter per token, for toy targets."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from slipstream.core.params import SamplingParams
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.text_constraint import TextConstraint
from tests.core.fake_drafters import LETTERS
from tests.tokens.tokenizer_kinds import letters


def letter_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which token i writes letter i and no token is special. Do not change it: it is cached."""
    return letters(tuple(LETTERS[:vocab]))


def constraint_of(params: SamplingParams, vocab: int, stop_ids: frozenset[int] = frozenset()) -> TextConstraint | None:
    """Return the constraint that `LLM` would give to a sequence with these parameters."""
    if params.structured is None:
        return None
    return grammars(vocab).make_constraint(params.structured, stop_ids)


@cache
def grammars(vocab: int) -> Grammars:
    return Grammars(letter_tokenizer(vocab), vocab)
