"""Torch's threads while another runtime computes: fewer inside a step, all again for a model of torch's own."""

from dataclasses import replace

import pytest
import torch

from slipstream.core.params import SamplingParams
from slipstream.drafters.none import NoDrafter
from slipstream.host.torch_threads import all_threads, host_threads
from slipstream.llm import LLM
from tests.targets.toy import ToyTarget


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_fewer_threads_inside_and_as_before_after_an_error_too():
    def fails():
        with host_threads(1):
            assert torch.get_num_threads() == 1
            with all_threads():
                assert torch.get_num_threads() == 3
            assert torch.get_num_threads() == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert torch.get_num_threads() == 3
    with all_threads():
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("count", [None, 3, 8])
def test_never_more_threads_than_before(count):
    with host_threads(count):
        assert torch.get_num_threads() == 3


class Watching(ToyTarget):
    @property
    def capabilities(self):
        return replace(super().capabilities, torch_threads=1)

    def run(self, seqs, draft, taps=()):
        self.seen = torch.get_num_threads()
        return super().run(seqs, draft, taps)


def test_a_step_uses_the_number_of_threads_that_its_target_asks_for():
    target = Watching(vocab=8)
    LLM(target, NoDrafter(), draft_tokens=4).generate([[1, 2]], SamplingParams(max_tokens=2))
    assert target.seen == 1
    assert torch.get_num_threads() == 3
