"""The size of the faults that the test of all prompts finds: what is stated is found, however diverse the texts are."""

import numpy as np
import pytest

from slipstream.verify.choices import count_choices, smallest_shift
from slipstream.verify.outcomes import SCREEN
from slipstream.verify.served import PERMUTATIONS, permute

TEXTS, TOKENS, PROMPTS = 200, 8, 3


def write(table: np.ndarray, begin: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    """Texts of a Markov chain with these transitions."""
    ends, token, texts = table.cumsum(1), np.full(TEXTS, begin), []
    for _ in range(TOKENS):
        token = (ends[token] < rng.random((TEXTS, 1))).sum(1).clip(max=len(table) - 1)
        texts.append(token)
    return [tuple(map(str, text)) for text in np.stack(texts, 1)]


@pytest.mark.parametrize(("tokens", "scale"), [(8, 1.0), (50, 1.0), (300, 1.0), (300, 2.5)])
def test_a_fault_of_the_stated_size_is_found_with_the_stated_probability(tokens, scale):
    """2.6 to 7.5 bits a token. A first look should find 0.95 of such faults; two of ten may be missed. The stated size
    varies by a tenth with the samples, so the mean of four is planted."""
    rng = np.random.default_rng(0)
    table = np.exp(scale * rng.normal(size=(tokens, tokens)))
    table /= table.sum(1, keepdims=True)
    best = table.argmax(1)
    samples = [[(write(table, i, rng), write(table, i, rng)) for i in range(PROMPTS)] for _ in range(4)]
    shift = np.mean([smallest_shift(each, 1e-3) for each in samples])
    rate = shift / (1 - table.max(1).mean())
    wrong = (1 - rate) * table
    wrong[np.arange(tokens), best] += rate
    found = 0
    for _ in range(10):
        counts = [count_choices(write(table, i, rng), write(wrong, i, rng)) for i in range(PROMPTS)]
        found += permute(counts, rng, PERMUTATIONS) < SCREEN
    assert found >= 8


def test_texts_that_are_always_the_same_or_too_few_have_no_stated_size():
    assert smallest_shift([([("a", "b")] * 9, [("a", "b")] * 9)], 1e-3) is None
    rng = np.random.default_rng(0)
    few = [[tuple(map(str, rng.integers(1000, size=4))) for _ in range(5)] for _ in range(2)]
    assert smallest_shift([(few[0], few[1])], 1e-3) is None
