"""A fast tokenizer with one letter per token, for toy targets."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from slipstream.core.params import SamplingParams
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.text_constraint import TextConstraint
from tests.core.fake_drafters import LETTERS
from tests.tokens.tokenizer_kinds import letters


def letter_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i writes letter i; no token is special. Not to be changed: it is made once."""
    return letters(tuple(LETTERS[:vocab]))


def constraint_of(params: SamplingParams, vocab: int, stop_ids: frozenset[int] = frozenset()) -> TextConstraint | None:
    """As `LLM` gives it to a sequence with these parameters."""
    if params.structured is None:
        return None
    return grammars(vocab).make_constraint(params.structured, stop_ids)


@cache
def grammars(vocab: int) -> Grammars:
    return Grammars(letter_tokenizer(vocab), vocab)
