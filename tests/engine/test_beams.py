"""Beam search apart from any model; `engine/test_beam_search.py` compares its texts with those of transformers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.beam_params import BeamParams
from slipstream.engine.beams import Beam, Beams
from slipstream.errors import ParameterError, TargetError

VOCAB = 7
EOS = frozenset({2})


def logits_after(text: tuple[int, ...]) -> Tensor:
    """Logits [V] after a text: random, but always the same."""
    seed = sum((token + 1) * 11**i for i, token in enumerate(text)) % 2**40
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found(params: BeamParams, stop_ids: frozenset[int] = EOS, most: int | None = None) -> list[Beam]:
    beams = Beams(params, stop_ids, params.max_tokens if most is None else most)
    while not beams.done:
        before = [one.output for one in beams.running]
        parents = beams.advance(torch.stack([logits_after(text) for text in before]))
        assert [one.output[:-1] for one in beams.running] == [before[parent] for parent in parents]
    return beams.best()


def all_texts(most: int) -> list[tuple[tuple[int, ...], float]]:
    """Every text of at most `most` tokens that has ended, and its log-probability."""
    ended, going = [], [((), 0.0)]
    for length in range(1, most + 1):
        continued = [
            ((*text, token), total + float(torch.log_softmax(logits_after(text), 0)[token]))
            for text, total in going
            for token in range(VOCAB)
        ]
        ended += [one for one in continued if one[0][-1] in EOS or length == most]
        going = [one for one in continued if one[0][-1] not in EOS]
    return ended


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
def test_with_enough_beams_the_best_of_all_texts_are_found(penalty: float) -> None:
    most = 3
    params = BeamParams(beams=260, n=5, length_penalty=penalty, early_stopping="never", max_tokens=most)
    wanted = sorted(
        ((total / len(text) ** penalty, total, list(text)) for text, total in all_texts(most)), key=lambda one: -one[0]
    )
    for beam, (score, total, text) in zip(found(params), wanted[:5], strict=True):
        assert beam.token_ids == text
        assert beam.score == pytest.approx(score, abs=1e-12)
        assert beam.logprob == pytest.approx(total, abs=1e-12)


def test_a_text_that_ends_by_a_stop_id_says_so() -> None:
    done = found(BeamParams(beams=6, n=6, max_tokens=4, length_penalty=0.0))
    assert {beam.finish_reason for beam in done} == {"stop", "length"}
    for beam in done:
        assert beam.stop_cause == (2 if beam.finish_reason == "stop" else None)
        assert (beam.token_ids[-1] == 2) == (beam.finish_reason == "stop")
        assert 2 not in beam.token_ids[:-1]


@pytest.mark.parametrize("most", [5, 2])
def test_without_stop_ids_every_text_has_the_greatest_length_that_the_context_allows(most: int) -> None:
    done = found(BeamParams(beams=3, n=3, max_tokens=5), frozenset(), most)
    assert [len(beam.token_ids) for beam in done] == [most] * 3


def test_a_vocabulary_that_is_too_small_gives_fewer_texts() -> None:
    beams = Beams(BeamParams(beams=9, n=9, max_tokens=1), frozenset(), 1)
    beams.advance(logits_after(())[None])
    assert beams.done
    assert len(beams.best()) == VOCAB


@pytest.mark.parametrize("place", [0, 5])
def test_logits_that_are_not_numbers_are_an_error(place: int) -> None:
    logits = logits_after(())[None].clone()
    logits[0, place] = math.nan
    with pytest.raises(TargetError, match="NaN"):
        Beams(BeamParams(), EOS, 4).advance(logits)


def test_min_tokens_with_nothing_but_stop_ids_is_an_error() -> None:
    with pytest.raises(TargetError, match="min_tokens"):
        Beams(BeamParams(min_tokens=1), frozenset(range(VOCAB)), 4).advance(logits_after(())[None])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beams": 1}, "greedy decoding"), ({"beams": 0}, "beams is 0"), ({"beams": 2.5}, "beams is 2.5"),
        ({"beams": 3, "n": 4}, "n is 4, but there are 3 beams"), ({"n": 0}, "n is 0"),
        ({"length_penalty": math.inf}, "length_penalty"), ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": 17}, "length_penalty"), ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"early_stopping": 1}, "early_stopping is 1"), ({"early_stopping": None}, "early_stopping is None"),
        ({"min_tokens": -1}, "min_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"temperature": 0.5}, "no parameter 'temperature'"),
        ({"stop": ["x"]}, "no parameter 'stop'"), ({"num_beams": 4}, "no parameter 'num_beams'"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        BeamParams(**given)
