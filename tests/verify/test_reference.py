"""The reference of `verify`; `core/test_warp.py` compares it with `warp`, a separate implementation."""

import numpy as np
import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.verify.reference import ROWS, distribution, edit_logits, impossible, logits_of
from tests.targets.toy import ToyTarget


def test_equal_logits_are_filtered_by_their_ids():
    params = SamplingParams(temperature=1.0, top_k=3)
    assert distribution(np.zeros(8), (params, [], [], frozenset())).nonzero()[0].tolist() == [0, 1, 2]


def test_logits_are_not_changed():
    logits = np.ones(8)
    edit_logits(logits, (SamplingParams(repetition_penalty=2.0, logit_bias={1: -100.0}), [1, 2], [3], frozenset()))
    assert (logits == 1).all()


@pytest.mark.parametrize("length", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
def test_each_token_gets_the_logits_before_it(length):
    target = ToyTarget(vocab=9, order=4)
    text = np.random.default_rng(0).integers(9, size=length).tolist()
    rows = list(logits_of(target, [1, 2, 3], text))
    assert len(rows) == length
    for t, row in enumerate(rows):
        assert row == pytest.approx(target.logits([1, 2, 3, *text[:t]]).numpy())
    assert not target._slots


def test_a_text_may_fill_the_context_and_only_tokens_that_rounding_cannot_keep_are_impossible():
    target = ToyTarget(vocab=9, context=20)
    assert len(list(logits_of(target, [1, 2], [3] * 18))) == 18
    logits, params = np.array([2.0, 1.0, 0.999, -5.0]), SamplingParams(temperature=1.0, top_k=2)
    p = distribution(logits, (params, [], [], frozenset()))
    exact, loose = (impossible(p, logits, (params, [], [], frozenset()), noise) for noise in (0.0, 0.01))
    assert (exact.tolist(), loose.tolist()) == ([False, False, True, True], [False, False, False, True])
    logits, params = np.zeros(4), SamplingParams(temperature=1.0, logit_bias={1: -100.0})
    p = distribution(logits, (params, [], [], frozenset()))
    assert impossible(p, logits, (params, [], [], frozenset()), 1e3).tolist() == [False, True, False, False]


def test_a_sequence_is_released_when_the_target_fails():
    class Failing(ToyTarget):
        def run(self, seqs, draft, taps=()):
            if self.runs:
                raise RuntimeError("as planted")
            return super().run(seqs, draft, taps)

    target = Failing(vocab=9)
    with pytest.raises(RuntimeError, match="as planted"):
        list(logits_of(target, [1], [2] * (ROWS + 1)))
    assert not target._slots
    target.release(Sequence([1]).id)
