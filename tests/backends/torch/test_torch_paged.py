"""The KV cache of the torch backend: where it is read without a copy, and calls of several Python threads."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.backends.torch.torch_paged import TorchBlocks
from slipstream.models.load_settings import LoadSettings
from tests.backends.native.models import chain, config, forest, ids, weights


def executor(**options: int) -> TorchExecutor:
    made = config()
    return TorchExecutor(made, weights(made), LoadSettings(**options))


def test_sequences_that_grow_together_are_read_in_place_and_forks_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    gather = TorchBlocks.gather

    def counted(self: TorchBlocks, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        gathered.append(len(blocks))
        return gather(self, layer, blocks)

    monkeypatch.setattr(TorchBlocks, "gather", counted)
    model = executor()
    for past in range(0, 200, 20):
        model.forward(forest([(seq_id, past, ids(20, seq_id), []) for seq_id in range(5)]))
    assert not gathered
    model.fork(1, 9, 190)
    model.forward(forest([(1, 200, [5], []), (9, 190, [5], [])]))
    assert gathered == [6, 6]  # blocks of the fork, in each of two layers


def test_several_python_threads_run_one_executor_as_each_would_alone() -> None:
    model = executor()
    texts = [ids(150, seed) for seed in range(12)]

    def last(seq_id: int) -> torch.Tensor:
        for past in range(0, 150, 10):  # the cache grows while others write to it
            out = model.forward(chain(seq_id, past, texts[seq_id][past : past + 10], [9])).logits
        return out.clone()

    with ThreadPoolExecutor(4) as helpers:
        found = list(helpers.map(last, range(12)))
    for seq_id, logits in enumerate(found):
        wanted = executor().forward(chain(0, 0, texts[seq_id], [149])).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("allocations", range(3))
def test_an_interrupt_while_the_cache_grows_leaves_every_sequence_readable(monkeypatch, allocations):
    """Some layers then have a new tensor, others the old one."""
    model, text = executor(), ids(60)
    want = model.forward(chain(0, 0, text)).logits.clone()
    model.forward(chain(1, 0, text[:59], []))
    zeros, left = torch.Tensor.new_zeros, [allocations]

    def interrupted(self: torch.Tensor, *shape: int) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return zeros(self, *shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            model.forward(chain(2, 0, ids(2000), []))
    for _ in range(2):
        torch.testing.assert_close(model.forward(chain(1, 59, text[59:])).logits, want[59:])
        torch.testing.assert_close(model.forward(chain(3, 0, text)).logits, want)
        model.forward(chain(2, 0, ids(700), []))  # grows to its end
