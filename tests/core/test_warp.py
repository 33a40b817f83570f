"""`warp` against the reference of `verify`, for each parameter and all together; histories of nodes; refusals."""

import math
import random
from collections.abc import Iterable, Sequence as Seq

import numpy as np
import pytest
import torch

from slipstream.core.declaration import DISTRIBUTION, declared
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.structured import Structured
from slipstream.core.warp import first_maxima, list_histories, warp
from slipstream.errors import TargetError
from slipstream.verify.reference import distribution, edit_logits
from tests.core.changed_parameters import CHOICES
from tests.core.fake_drafters import LETTERS, decode
from tests.core.letter_tokenizer import constraint_of

NEVER = -math.inf


def reference(
    logits: Seq[float], params: SamplingParams, prompt: Seq[int] = (), output: Seq[int] = (), stop: Seq[int] = ()
) -> list[float]:
    """The distribution of one row by the reference of `verify`, with temperature 0 and forms of texts besides."""
    x = np.array(logits)
    if params.structured is not None:
        x[sorted({*range(len(x))} - may_follow(params.structured, output, stop, range(len(x))))] = NEVER
    given = params, list(prompt), list(output), frozenset(stop)
    if params.temperature == 0:
        return np.eye(len(x))[edit_logits(x, given).argmax()].tolist()
    return distribution(x, given).tolist()


def may_follow(structured: Structured, output: Seq[int], stop: Seq[int], vocab: Iterable[int]) -> set[int]:
    """Tokens that the constraint allows. structured: a choice of texts, one letter a token."""
    texts, said = set(structured.choice or ()), decode(output)
    goes_on = {LETTERS.index(text[len(said)]) for text in texts if text.startswith(said) and text != said}
    if any(t in stop for t in output) or not goes_on:
        return set(vocab)  # nothing that follows is used
    return goes_on - set(stop) | (set(stop) if said in texts else set())


def agree(probs: torch.Tensor, wanted: Seq[float]) -> None:
    assert probs.dtype == torch.float64
    assert [bool(x) for x in probs] == [bool(x) for x in wanted], "another set of tokens is possible"
    assert probs.tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_reference_covers_every_parameter_of_the_distribution() -> None:
    assert set(CHOICES) == {name for name, known in declared(SamplingParams).items() if known.effect in DISTRIBUTION}


def rows(rng: random.Random, vocab: int = 8) -> tuple[torch.Tensor, list[int], list[list[int]]]:
    """Logits [R, V], a prompt, and one output a row."""
    logits = torch.tensor([[rng.gauss(0, 2) for _ in range(vocab)] for _ in range(4)], dtype=torch.float64)
    prompt = [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 5)))]
    outputs = [[rng.randrange(vocab) for _ in range(n)] for n in (0, 1, 3, 7)]
    return logits, prompt, outputs


def warped(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], outputs: list[list[int]], stop: Seq[int]
) -> torch.Tensor:
    constraint = constraint_of(params, logits.shape[-1], frozenset(stop))
    return warp(logits, params, prompt, outputs, stop, constraint and constraint.find_allowed([], outputs))


def test_parameters_alone_and_together_agree_with_the_reference() -> None:
    rng = random.Random(1)
    alone = [{"temperature": 1.0, name: value} for name, values in CHOICES.items() for value in values]
    together = [{name: rng.choice(values) for name, values in CHOICES.items()} for _ in range(300)]
    for given in [*alone * 3, *together]:
        params = SamplingParams(**given)
        logits, prompt, outputs = rows(rng)
        before, stop = logits.clone(), rng.choice(((6,), (6, 0)))
        probs = warped(logits, params, prompt, outputs, stop)
        assert torch.equal(logits, before), "the input was changed"
        for row, x, output in zip(probs, logits.tolist(), outputs, strict=True):
            agree(row, reference(x, params, prompt, output, stop))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_distribution_is_float64_for_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = SamplingParams(temperature=0.8, top_p=0.9, logit_bias={1: 0.5})
    before = logits.clone()
    for row, x in zip(warp(logits, params), logits.double().tolist(), strict=True):
        agree(row, reference(x, params))
    assert torch.equal(logits, before)


def test_ties_in_top_k_go_to_the_smaller_ids() -> None:
    for vocab in (5, 1000):
        probs = warp(torch.zeros(1, vocab), SamplingParams(temperature=1.0, top_k=3))[0]
        assert probs.nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("vocab", "top_p", "kept"), [(4, 0.5, 2), (8, 0.375, 3), (10, 0.7, 7), (10, 0.3, 3), (4, 1.0, 4)]
)
def test_ties_in_top_p_go_to_the_smaller_ids_and_the_mass_is_just_reached(vocab: int, top_p: float, kept: int) -> None:
    probs = warp(torch.zeros(1, vocab, dtype=torch.float64), SamplingParams(temperature=1.0, top_p=top_p))[0]
    assert probs.nonzero().flatten().tolist() == list(range(kept))


@pytest.mark.parametrize("vocab", [5, 1000, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_temperature_zero_is_one_hot_at_the_first_maximum(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, vocab, dtype=dtype)
    logits[1, [2, 4, vocab - 1]] = 3.0
    probs = warp(logits, SamplingParams())
    assert probs.argmax(-1).tolist() == [0, 2]
    assert probs.sum(-1).tolist() == [1, 1]
    assert probs.max() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_first_maxima_are_those_of_the_distribution_at_temperature_zero(dtype: torch.dtype) -> None:
    """The short cut of greedy decoding: the same ids, ties included, and the same refusals, for every dtype."""
    logits = torch.randn(40, 11, generator=torch.Generator().manual_seed(0)).mul(3).round().to(dtype)  # full of ties
    wanted = warp(logits, SamplingParams()).argmax(-1).tolist()
    assert first_maxima(logits) == wanted
    assert first_maxima(logits[:, ::2]) == warp(logits[:, ::2], SamplingParams()).argmax(-1).tolist()
    for bad in ([0.0, math.nan, 1.0], [math.inf, 0.0, 0.0], [NEVER] * 3):
        with pytest.raises(TargetError):
            first_maxima(torch.tensor([[0.0, 1.0, 2.0], bad], dtype=dtype))


@pytest.mark.parametrize("temperature", [1e-5, 1e-12, 1e-300, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy_and_no_error(temperature: float) -> None:
    probs = warp(torch.tensor([[1.0, 30.0, -4.0]]), SamplingParams(temperature=temperature))
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinite_logits_raise(temperature: float, bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(TargetError, match="NaN"):
        warp(logits, SamplingParams(temperature=temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_possible_token_raises(temperature: float) -> None:
    with pytest.raises(TargetError, match="-inf for every token"):
        warp(torch.full((1, 4), NEVER), SamplingParams(temperature=temperature))
    with pytest.raises(TargetError, match="logit_bias"):
        warp(torch.zeros(1, 3), SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(3), -100.0)))


def test_a_bias_outside_a_narrow_vocabulary_is_left_out() -> None:
    assert warp(torch.zeros(1, 2), SamplingParams(temperature=1.0, logit_bias={7: 5.0})).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ([9, 3, 1], []),  # in the prompt
        ([3, 1], []),  # it is the whole prompt
        ([9, 3], [1]),  # across the border
        ([3], [1]),
        ([9], [3, 1]),  # in the output
        ([9, 9], [5, 5, 3, 1]),
    ],
)
def test_bad_words_span_prompt_and_output(prompt: list[int], output: list[int]) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 2] = 9
    for words in (((3, 1, 2),), ((3, 1, 2), (8, 8, 8, 8, 8, 8))):
        probs = warp(logits, SamplingParams(bad_words=words), prompt, [output])
        assert probs.argmax(-1).item() == 0, f"{prompt} + {output} may not be continued by 2"


def test_bad_words_are_looked_up_and_not_compared_one_by_one() -> None:
    compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    words = [*((i % 50, i) for i in range(50, 4050)), *((i, 7, i) for i in range(50))]
    probs = warp(torch.zeros(1, 4050), SamplingParams(1.0, bad_words=words), [3], [[Counted(7), Counted(7)]])
    assert (probs[0] == 0).nonzero().flatten().tolist() == list(range(7, 4050, 50))
    assert compared < 10


def test_a_node_sees_prompt_output_and_its_own_ancestors_only() -> None:
    seq = Sequence([7, 8])
    seq.tokens += [5]
    draft = Draft(torch.tensor([1, 2, 3, 4]), (-1, -1, 0, 1), (0, 4))
    assert list_histories(seq, draft, 0) == [[5], [5, 1], [5, 2], [5, 1, 3], [5, 2, 4]]
