"""The kernels of the cuda backend against PyTorch in float64. Triton's interpreter runs them on a CPU, without graphs
and in float32; where there is a GPU, they run there."""

import dataclasses
import logging
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backends.cuda.cuda_backend import BACKEND
from slipstream.backends.torch import torch_executor
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.decode_steps import StepSampling, Worth
from slipstream.errors import ParameterError, TargetError
from slipstream.executor.executor import Batch
from tests.backends.native.models import SHAPES, chain, config, forest, ids, in_float64, last, weights

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {"hidden_size": 64, "intermediate_size": 48, "context": 1024}
TREE = (-1, -1, 0, 0, 1)
CLOSE = 1e-4
"""Of the largest logit: sums of float32."""


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read weights as they are, not in oneDNN's layout."""
    monkeypatch.setattr(torch_executor, "repacks", lambda dtype, device: False)


def pair(shape: str = "llama", **changes: Any) -> tuple[Any, TorchExecutor]:
    """A decoder on the kernels, and in float64."""
    from slipstream.backends.cuda.cuda_executor import CudaExecutor

    decoder = config(**TINY | SHAPES[shape] | changes)
    given = weights(decoder)
    on_device = LoadSettings(device=DEVICE, dtype=torch.float32)
    return CudaExecutor(decoder, given, on_device), TorchExecutor(decoder, in_float64(decoder, given))


def on(device: torch.device, batch: Batch) -> Batch:
    return dataclasses.replace(batch, tokens=batch.tokens.to(device))


def check(model: Any, exact: TorchExecutor, batch: Batch) -> torch.Tensor:
    """Run the batch on both; logits, their maxima and taps are equal. Returns the logits."""
    taps = (0, 1, -1)
    out, right = model.forward(on(DEVICE, batch), taps), exact.forward(batch, taps)
    assert out.finite
    assert out.maxima == right.logits.argmax(-1).tolist()
    for seen, wanted in [(out.logits, right.logits), *((out.taps[tap], right.taps[tap]) for tap in taps)]:
        assert float((seen.cpu().double() - wanted).abs().max() / wanted.abs().max()) < CLOSE
    return out.logits.clone()


@pytest.mark.parametrize("shape", ["llama", "window", "qwen", "many heads"])
def test_chains_trees_and_batches_equal_PyTorch(shape: str) -> None:
    model, exact = pair(shape)
    check(model, exact, forest([(1, 0, ids(9), []), (2, 0, ids(3, 1), [])]))
    check(model, exact, forest([(2, 3, ids(6, 2), TREE), (1, 9, ids(4, 3), [])]))
    for each in (model, exact):  # the branch of nodes 1 and 4 is kept
        each.move(2, [5, 8], [4, 5])
    check(model, exact, chain(2, 6, ids(2, 4)))
    assert torch.allclose(model.kv(2, 8).cpu().double(), exact.kv(2, 8), atol=1e-4)


def test_several_splits_of_attention_and_a_fork_equal_PyTorch() -> None:
    """300 tokens are read by PyTorch in both; then the kernels see more than one split."""
    model, exact = pair()
    for each, batch in ((model, on(DEVICE, chain(1, 0, ids(300)))), (exact, chain(1, 0, ids(300)))):
        each.forward(batch)
        each.fork(1, 2, 290)
    check(model, exact, forest([(2, 290, ids(3, 5), []), (1, 300, ids(2, 6), [])]))


def test_rows_are_bitwise_equal_alone_and_beside_others() -> None:
    model, _ = pair()
    for seq_id, length in ((1, 20), (2, 7)):
        model.forward(on(DEVICE, chain(seq_id, 0, ids(length, seq_id))))
    alone = model.forward(on(DEVICE, chain(1, 20, ids(1, 9)))).logits.clone()
    for batch in (
        chain(1, 20, ids(1, 9) + ids(4, 3)),
        forest([(1, 20, ids(1, 9) + ids(5, 8), TREE)]),
        forest([(1, 20, ids(1, 9) + ids(3, 7), []), (2, 7, ids(14, 2), [])]),
    ):
        assert torch.equal(model.forward(on(DEVICE, batch)).logits[0], alone[0])


def test_several_steps_in_one_call_equal_single_steps_of_several_sequences() -> None:
    model, _ = pair()
    batch = forest([(1, 0, ids(5), []), (2, 0, ids(2, 1), [])])
    decoded = model.decode_steps(on(DEVICE, batch), 3)
    texts = {1: ids(5), 2: ids(2, 1)}
    for seq_id in texts:
        model.release(seq_id)
    for j in range(3):
        for b, (seq_id, text) in enumerate(texts.items()):
            past = len(text) - 1 if j else 0
            out = model.forward(on(DEVICE, last(chain(seq_id, past, text[past:]))))
            # The products of the interpreter are NumPy's, which depend on the place of a row.
            assert torch.allclose(out.logits[0], decoded.logits[j, b], atol=0.0 if DEVICE.type == "cuda" else 1e-5)
            text.append(out.maxima[0])
    assert decoded.tokens.tolist() == [[texts[1][5 + j], texts[2][2 + j]] for j in range(3)]


def test_sampled_steps_draw_in_float64_from_their_own_distributions() -> None:
    model, _ = pair()
    uniforms = torch.tensor([[0.1, 0.9], [0.5, 0.99]], dtype=torch.float64)
    sampling = StepSampling(torch.tensor([0.7, 1.3], dtype=torch.float64), uniforms, vocab=80)
    decoded = model.decode_steps(on(DEVICE, forest([(1, 0, ids(4), []), (2, 0, ids(2, 1), [])])), 2, sampling)
    assert decoded.probs is not None
    for j in range(2):
        for b, heat in enumerate((0.7, 1.3)):
            right = torch.softmax(decoded.logits[j, b, :80].double().cpu() * heat, -1)
            assert torch.allclose(decoded.probs[j, b, :80].cpu(), right, atol=1e-12)
            assert not decoded.probs[j, b, 80:].any()
            assert decoded.tokens[j, b] == torch.searchsorted(right.cumsum(-1), uniforms[j, b], right=True)


def test_a_call_ends_where_no_further_token_is_worth_drawing() -> None:
    """By the highest probability of the softmax at the sequence's temperature."""
    model, exact = pair()
    worth = Worth(np.array([[0.2, 0.5]]), np.array([[0.1, 0.9, 0.9, 0.9]]))
    heat = torch.tensor([0.3], dtype=torch.float64)
    decoded = model.decode_steps(on(DEVICE, chain(1, 0, ids(4))), 4, StepSampling(heat, vocab=60, worth=worth))
    assert decoded.tokens.shape == (2, 1)
    assert decoded.confidence is not None
    right = exact.forward(last(chain(1, 0, ids(4)))).logits[0, :60]
    assert float(decoded.confidence[0, 0]) == pytest.approx(float(torch.softmax(0.3 * right, -1).max()), rel=1e-4)
    assert int(decoded.tokens[0, 0]) == int(right.argmax())


def test_an_exit_keeps_the_streams_of_every_row() -> None:
    model, exact = pair(layers=3)
    decoded = model.decode_steps(on(DEVICE, chain(1, 0, ids(4))), 2, exit=2)
    text = ids(4) + decoded.tokens[:, 0].tolist()
    right = exact.forward(chain(1, 0, text), (), (0, 2)).hidden
    assert decoded.hidden is not None
    assert decoded.later is not None
    seen = torch.cat((decoded.hidden, decoded.later[:, 0])).cpu().double()
    assert torch.allclose(seen, right, atol=1e-3)


def test_long_prompts_and_slices_of_layers_run_by_PyTorch_and_the_cache_grows_between_passes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, exact = pair(context=8192)
    with caplog.at_level(logging.WARNING):
        for seq_id in range(30):
            model.forward(on(DEVICE, chain(seq_id, 0, ids(200, seq_id), [])))
    exact.forward(chain(0, 0, ids(200)))
    check(model, exact, chain(0, 200, ids(2, 1)))
    stream = model.forward(on(DEVICE, chain(99, 0, ids(5))), (), (0, 1)).hidden
    whole = model.forward(on(DEVICE, chain(99, 0, ids(5))), (), (1, 2), stream).logits
    assert torch.allclose(whole.cpu().double(), exact.forward(chain(99, 0, ids(5))).logits, atol=1e-3)
    assert not caplog.records


@pytest.mark.parametrize("steps", [None, 2])
def test_ids_outside_of_the_vocabulary_are_named_and_weights_that_overflow_are_found(steps: int | None) -> None:
    model, _ = pair()

    def run(text: Seq[int]) -> Any:
        batch = on(DEVICE, chain(1, 0, text))
        return model.forward(batch) if steps is None else model.decode_steps(last(batch), steps)

    with pytest.raises(TargetError, match="a token id is outside the model's embedding, which has 90 rows"):
        run([1, 90])
    model.final_norm.weight = model.final_norm.weight * torch.nan
    if steps is None:
        out = run([1, 2])
        assert not out.finite
        assert out.maxima is None
    else:
        with pytest.raises(TargetError, match="NaN or infinite"):
            run([1, 2])


def test_what_the_kernels_lack_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = LoadSettings(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert BACKEND.refusal(config(), on_gpu) is None
    assert "mixtures of experts" in str(BACKEND.refusal(config(**SHAPES["mixture"]), on_gpu))
    assert "RMS norms" in str(BACKEND.refusal(config(**SHAPES["gpt2"]), on_gpu))
    assert "not in float16" in str(BACKEND.refusal(config(), dataclasses.replace(on_gpu, dtype=torch.float16)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in str(BACKEND.refusal(config(), on_gpu))
    with pytest.raises(ParameterError, match="given with device='cpu'"):
        BACKEND.check(LoadSettings(device=torch.device("cpu"), dtype=torch.float32))
