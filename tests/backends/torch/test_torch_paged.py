"""The KV cache of the torch backend: where it is read without a copy, and calls of several Python threads."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from slipstream.backends.torch import torch_executor
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.backends.torch.torch_heads import TorchEagle
from slipstream.backends.torch.torch_paged import TorchBlocks
from slipstream.checkpoints.load_settings import LoadSettings
from tests.backends.native.models import chain, config, forest, ids, last, weights
from tests.heads.tiny_heads import config as head_config, head
from tests.spying import spied


def executor(**options: int) -> TorchExecutor:
    llama = config()
    return TorchExecutor(llama, weights(llama), LoadSettings(**options))


def test_sequences_that_grow_together_are_read_in_place_and_forks_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = spied(monkeypatch, TorchBlocks, "gather", lambda cache, layer, blocks: len(blocks))
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

    def last_row(seq_id: int) -> torch.Tensor:
        for past in range(0, 150, 10):  # the cache grows while others write to it
            out = model.forward(chain(seq_id, past, texts[seq_id][past : past + 10], [9])).logits
        return out.clone()

    with ThreadPoolExecutor(4) as helpers:
        results = list(helpers.map(last_row, range(12)))
    for seq_id, logits in enumerate(results):
        wanted = executor().forward(chain(0, 0, texts[seq_id], [149])).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_whatever_was_in_a_block_of_a_head_before_changes_no_draft() -> None:
    """Blocks of finished sequences are used again, and a batch reads as far as its longest sequence."""
    eagle = head_config(3, 40, target=8, draft_vocab=24)
    batch = last(forest([(0, 0, ids(40, 1, 40), []), (1, 0, [3, 4, 5], []), (2, 0, ids(33, 2, 40), [])]))
    features = torch.randn(76, len(eagle.taps) * eagle.target_hidden, generator=torch.Generator().manual_seed(1))
    branches = forest([(0, 40, [5, 6, 7], [-1, -1, 0]), (1, 3, [8], [-1])])
    states = torch.randn(4, eagle.hidden_size, generator=torch.Generator().manual_seed(2))

    def drafted(before: float) -> list[torch.Tensor]:
        runtime = TorchEagle(head(eagle))
        runtime.decode_steps(batch, features, 3)
        for seq_id in range(3):
            runtime.release(seq_id)
        with torch.inference_mode():
            for layer in runtime._blocks.layers:
                layer[:] = before
        made_at_once = runtime.decode_steps(batch, features, 3)
        return [made_at_once.tokens, made_at_once.logits, *runtime.extend(branches, states, from_head=True)]

    for actual, wanted in zip(drafted(float("nan")), drafted(0.0), strict=True):
        assert actual.isfinite().all()
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33])
@pytest.mark.parametrize(("out", "width"), [(48, 32), (5, 64), (97, 33)])
def test_packed_equals_plain(out: int, width: int, rows: int, bias: bool) -> None:
    weight, b, x = torch.randn(out, width), torch.randn(out) if bias else None, torch.randn(rows, width)
    linear = torch_executor.Linear(weight, b, torch.device("cpu"))
    torch.testing.assert_close(linear(x), F.linear(x, weight, b), rtol=1e-4, atol=1e-4)
    assert linear.nbytes == weight.nbytes + (0 if b is None else b.nbytes)


def test_plain_layers_are_used_if_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_executor, "_has_packed", lambda: False)
    weight, bias, x = torch.randn(16, 32), torch.randn(16), torch.randn(3, 32)
    linear = torch_executor.Linear(weight, bias, torch.device("cpu"))
    assert torch.equal(linear(x), F.linear(x, weight, bias))
    assert linear.nbytes == weight.nbytes + bias.nbytes


def test_the_weights_are_freed_with_the_executor_and_not_first_when_cycles_are_collected() -> None:
    model = executor()
    model.forward(forest([(1, 0, ids(3), [])]))
    freed = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert freed() is None
    finally:
        gc.enable()
