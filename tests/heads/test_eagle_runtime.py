"""EAGLE heads at run time: torch and the native backend against a dense recomputation without any cache."""

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.backends.native.native_heads import NativeEagle
from slipstream.backends.native.packed_weights import Layout, SharedTables
from slipstream.backends.native.quantise import quantise_rows
from slipstream.backends.table import backend_for_head
from slipstream.backends.torch.torch_heads import TorchEagle
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_formats import WeightFormat
from slipstream.core.decode_steps import ARGMAX, ARGMAX_INV_TEMPERATURE, DecodedSteps, StepSampling, Worth
from slipstream.core.target import HeadHost, Runtime
from slipstream.errors import ParameterError, TargetError
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_rows import EagleRuntime
from slipstream.training import eagle3_objective
from slipstream.training.eagle3_objective import compute_chain_states
from tests.backends.native.models import chain, forest
from tests.heads.dense_eagle import TARGET, VARIANTS, Text, V, dense, rotary, true_batch, variant
from tests.heads.tiny_heads import head, head_host
from tests.targets.reference import assert_close


@pytest.fixture(params=VARIANTS)
def eagle(request: pytest.FixtureRequest) -> EagleHead:
    return head(VARIANTS[request.param], spread=0.4)


def chain_by_hand(head: EagleHead, text: Text, rows: int, steps: int, picks: Callable[[Tensor, int], int]) -> list[Any]:
    """Draft token by token, everything recomputed densely each time: [(draft id, logits [draft_vocab])]."""
    ids = torch.arange(V) if head.config.version == 1 else head.target_ids
    tokens = text.tokens[1 : rows + 1]
    hidden = head.fuse(list(text.features[:rows].split(head.config.target_hidden, -1)))
    out = []
    for j in range(steps):
        n = len(tokens)
        after, x = dense(head, tokens, hidden, torch.ones(n, n).tril().bool(), list(range(n)))
        logits = head.logits(x[-1])
        out.append((picks(logits, j), logits))
        tokens = [*tokens, int(ids[out[-1][0]])]
        hidden = torch.cat((hidden, after[-1:]))
    return out


def assert_greedy_chains(
    actual: DecodedSteps, eagle: EagleHead, texts: list[Text], rows: Seq[int], tolerance: float
) -> None:
    """Chains of four draft tokens after so many rows of each text."""
    for b, (text, count) in enumerate(zip(texts, rows, strict=True)):
        wanted = chain_by_hand(eagle, text, count, 4, lambda x, j: int(x.argmax()))
        assert actual.tokens[:, b].tolist() == [token for token, _ in wanted]
        assert_close(actual.logits[:, b], torch.stack([x for _, x in wanted]), tolerance)


RUNTIMES = {"torch": (TorchEagle, 1e-10), "native": (NativeEagle, 2e-5)}


@pytest.fixture(params=RUNTIMES)
def run(request: pytest.FixtureRequest, eagle: EagleHead) -> tuple[EagleRuntime, float]:
    make, tolerance = RUNTIMES[request.param]
    return make(eagle), tolerance


def test_a_chain_in_one_call_equals_one_recomputed_token_by_token(eagle, run):
    """Ragged: one sequence is new, one has rows in the cache, and one has own rows of an earlier draft there."""
    runtime, tolerance = run
    texts = [Text(eagle, n, seed) for seed, n in enumerate((7, 12, 9))]
    for done in ([0, 5, 4], [0, 9, 6]):
        batch, features = true_batch(texts, [0, 0, 0], [max(1, d) for d in done])
        runtime.decode_steps(batch, features, 3)
    batch, features = true_batch(texts, [0, 9, 6], [6, 11, 8])
    assert_greedy_chains(runtime.decode_steps(batch, features, 4), eagle, texts, (6, 11, 8), tolerance)


@pytest.mark.parametrize("kind", ["noise", "uniforms"])
def test_draft_tokens_are_drawn_from_what_a_recomputation_gives(eagle: EagleHead, run: Any, kind: str) -> None:
    """By Gumbel noise at two temperatures, or by inversion; then one of the sequences is greedy."""
    runtime, tolerance = run
    texts = [Text(eagle, n, seed) for seed, n in enumerate((5, 8))]
    inverse = torch.tensor([2.0, 0.5] if kind == "noise" else [0.8, ARGMAX_INV_TEMPERATURE], dtype=torch.float64)
    drawn = torch.rand(3, 2, eagle.config.draft_vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = -(-drawn.log()).log()
    uniforms = torch.tensor([[0.31, 0.0], [0.85, 0.0], [0.02, 0.0]], dtype=torch.float64)

    def pick(x: Tensor, j: int, b: int) -> int:
        if kind == "noise":
            return int((x * inverse[b] + noise[j, b]).argmax())
        return int(x.argmax()) if b else int((torch.softmax(x * 0.8, -1).cumsum(-1) <= uniforms[j, 0]).sum())

    batch, features = true_batch(texts, [0, 0], [4, 7])
    sampling = StepSampling(inverse, noise=noise) if kind == "noise" else StepSampling(inverse, uniforms)
    tokens, logits, distributions = runtime.decode_steps(batch, features, 3, sampling)[:3]
    if distributions is not None:  # a call that samples in float64 returns them
        count = 2 if kind == "noise" else 1
        wanted = torch.softmax(logits[:, :count].double() * inverse[:count, None], -1)
        torch.testing.assert_close(distributions[:, :count], wanted, rtol=1e-12, atol=1e-15)
    for b, rows in enumerate((4, 7)):
        chain = chain_by_hand(eagle, texts[b], rows, 3, lambda x, j, b=b: pick(x, j, b))
        assert tokens[:, b].tolist() == [token for token, _ in chain]
        assert_close(logits[:, b], torch.stack([x for _, x in chain]), tolerance)


@pytest.mark.parametrize("kind", ["maximum", "noise", "uniforms"])
def test_a_call_ends_where_no_sequence_is_worth_a_further_token(eagle: EagleHead, kind: str) -> None:
    """With the tokens and logits of a longer call. A greedy sequence among sampled ones is judged at temperature 1."""
    runtime = NativeEagle(eagle)
    texts = [Text(eagle, n, seed) for seed, n in enumerate((5, 8))]
    draws = torch.rand(4, 2, eagle.config.draft_vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inverse = torch.tensor([0.8, ARGMAX_INV_TEMPERATURE], dtype=torch.float64)
    sampling = {
        "maximum": ARGMAX,
        "noise": StepSampling(inverse, noise=-(-draws.log()).log()),
        "uniforms": StepSampling(inverse, draws[..., 0] * torch.tensor([1.0, 0.0])),
    }[kind]

    def drafted(worth: Worth | None) -> DecodedSteps:
        batch, features = true_batch(texts, [0, 0], [4, 7])
        return runtime.decode_steps(batch, features, 4, replace(sampling, worth=worth))

    whole = drafted(None)
    heat = torch.tensor([1.0 if kind == "maximum" else 0.8, 1.0])
    confidence = torch.softmax(whole.logits * heat[:, None], -1).amax(-1)  # [K, B]
    rates = np.linspace(0.1, 1.0, 7)[None].repeat(2, 0)
    reach = np.take_along_axis(rates, np.minimum((7 * confidence.numpy()).astype(int), 6).T, 1).cumprod(1)  # [B, K]
    third = np.array([[0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])  # too much to ask from there on
    for more, steps in ((0 * third, 4), (third, 3), (0 * third + 1, 1)):
        actual = drafted(Worth(rates, reach - 1e-9 + more))
        assert len(actual.tokens) == steps
        assert torch.equal(actual.tokens, whole.tokens[:steps])
        assert torch.equal(actual.logits, whole.logits[:steps])
        torch.testing.assert_close(actual.confidence, confidence[:steps].double(), rtol=1e-5, atol=1e-6)


def test_a_tree_of_own_rows_equals_each_of_its_paths(eagle: EagleHead, run: tuple[EagleRuntime, float]) -> None:
    """Own rows of two sequences, one a tree, one a chain, after true rows in the cache."""
    runtime, tolerance = run
    rng = random.Random(0)
    texts = [Text(eagle, n, seed) for seed, n in enumerate((6, 9))]
    batch, features = true_batch(texts, [0, 0], [5, 8])
    runtime.extend(batch, features)
    parents = [[-1, -1, 0, 0, 1, 3], [-1, 0, 1]]
    tokens = [[rng.randrange(V) for _ in p] for p in parents]
    generator = torch.Generator().manual_seed(5)
    states = [torch.randn(len(p), eagle.config.hidden_size, generator=generator, dtype=torch.float64) for p in parents]
    rows = forest([(0, 5, tokens[0], parents[0]), (1, 8, tokens[1], parents[1])])
    rows = replace(rows, select=(1, 3, 4, 5, 8))
    found_hidden, actual = runtime.extend(rows, torch.cat(states), from_head=True)
    for at, (b, node) in enumerate(((0, 1), (0, 3), (0, 4), (0, 5), (1, 2))):
        path = [node]
        while parents[b][path[0]] >= 0:
            path.insert(0, parents[b][path[0]])
        past = 5 if b == 0 else 8
        fused = eagle.fuse(list(texts[b].features[:past].split(eagle.config.target_hidden, -1)))
        n = past + len(path)
        after, x = dense(
            eagle, texts[b].tokens[1 : past + 1] + [tokens[b][i] for i in path], torch.cat((fused, states[b][path])),
            torch.ones(n, n).tril().bool(), list(range(n)),
        )  # fmt: skip
        assert_close(found_hidden[at : at + 1], after[-1:], tolerance)
        assert_close(actual[at : at + 1], eagle.logits(x[-1:]), tolerance)


def test_sequences_that_grow_together_across_blocks_stay_separate(eagle, run):
    """Their blocks are interleaved; one is released in between, one begins later. None of the head's own states remain
    in the cache."""
    runtime, tolerance = run
    texts = [Text(eagle, n, seed) for seed, n in enumerate((80, 90, 75))]
    for at in range(0, 70, 7):
        ids = [0, 1] if at < 35 else [0, 2]
        if at == 35:
            runtime.release(1)
        firsts = [at, at] if at < 35 else [at, at - 35]
        batch, features = true_batch([texts[i] for i in ids], firsts, [first + 7 for first in firsts])
        runtime.decode_steps(replace(batch, seq_ids=ids), features, 5)
    batch, features = true_batch([texts[0], texts[2]], [70, 35], [72, 36])
    actual = runtime.decode_steps(replace(batch, seq_ids=[0, 2]), features, 4)
    assert_greedy_chains(actual, eagle, [texts[0], texts[2]], (72, 36), 5 * tolerance)  # more rows, more rounding


@pytest.mark.parametrize("kind", ["3", "3.1"])
def test_training_and_inference_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of training-time test at the chain that starts at row i are those of a chain drafted after row i."""
    monkeypatch.setattr(eagle3_objective, "BLOCK", 4)  # several blocks of queries, the last one shorter
    trained_head, steps = head(VARIANTS[kind], spread=0.4), 3
    text = Text(trained_head, 12)
    taps = [t[None] for t in text.features.split(TARGET, -1)]
    trained = compute_chain_states(trained_head, torch.tensor([text.tokens]), taps, rotary(trained_head), steps)
    runtime = TorchEagle(trained_head)
    for i in range(12 - steps):
        # the chain is fed the tokens of the text, as training feeds it
        batch, features = true_batch([text], [0], [i + 1])
        hidden, logits = runtime.extend(batch, features)
        for j in range(steps):
            wanted = trained_head.logits(trained[j][0, i])  # summed in float32
            torch.testing.assert_close(logits[0], wanted, rtol=1e-5, atol=1e-5)
            if i + j + 2 < 12:
                row = chain(0, i + 1 + j, text.tokens[i + j + 2 : i + j + 3])
                hidden, logits = runtime.extend(row, hidden, from_head=True)


def lender(embedding: Any = None) -> HeadHost:
    """A target of the native backend."""
    return head_host(32, 3, V, torch.float32, torch.zeros(V, 32), "native", embedding)


def format_of(quantize: str | None) -> WeightFormat | None:
    return LoadSettings(quantize=quantize, role="draft").weight_format


def runtime_for(head: EagleHead, host: HeadHost, quantize: str | None = None) -> EagleRuntime:
    """Created as a drafter creates it."""
    backend, settings = backend_for_head(head.config.decoder, host, quantize)
    return backend.eagle(head, host, settings)


@pytest.mark.parametrize(("quantize", "tolerance"), [(None, 2e-5), ("w8a16", 1e-3), ("int8", 5e-2), ("w8a8", 5e-2)])
def test_the_native_backend_runs_the_heads_of_its_targets(quantize: str | None, tolerance: float) -> None:
    wide = head(variant(3, 32, decoder={"hidden_size": 32, "intermediate_size": 64}), spread=0.4).float()
    lent, layout = torch.randn(V, 32, generator=torch.Generator().manual_seed(1)), Layout()
    host = lender(SharedTables(layout.embedding({"": lent}, ""), None, layout))
    runtime = runtime_for(wide.borrow(lambda: pytest.fail("it was read again")), host, quantize=quantize)
    assert isinstance(runtime, NativeEagle)
    assert runtime._head[0]["decoder"]["embed"] == host.packed_tables.embedding  # not stored twice
    text = Text(wide.borrow(lent), 9)
    batch, features = true_batch([text], [0], [8])
    steps = runtime.decode_steps(batch, features, 4)
    if quantize:
        for parameter in (p for p in wide.parameters() if p.ndim == 2):
            values, scale = quantise_rows(parameter)
            parameter.copy_(values * scale)
    exact = TorchEagle(wide).decode_steps(batch, features.float(), 4)
    assert_close(steps.logits[0], exact.logits[0].double(), tolerance)
    if tolerance < 1e-2:
        assert torch.equal(steps.tokens, exact.tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_stored_in_their_original_format(dtype: torch.dtype) -> None:
    wide = head(variant(3, 32, decoder={"hidden_size": 32, "intermediate_size": 64}), spread=0.4)
    for parameter in wide.parameters():
        parameter.copy_(parameter.to(dtype))
    text = Text(wide, 9)
    batch, features = true_batch([text], [0], [8])
    runtime = NativeEagle(wide)
    actual, wanted = runtime.decode_steps(batch, features, 3), TorchEagle(wide).decode_steps(batch, features, 3)
    assert_close(actual.logits, wanted.logits, 2e-5)
    assert (runtime._layout.nbytes < 3.2 * sum(p.numel() for p in wide.parameters())) is (dtype != torch.float32)


@pytest.mark.parametrize("quantize", [None, "w8a16", "w8a8"])
def test_a_row_is_the_same_bit_for_bit_for_any_batch_and_number_of_threads(quantize: str | None) -> None:
    one_head = head(VARIANTS["3.1"], spread=0.4)
    texts = [Text(one_head, n, seed) for seed, n in enumerate((7, 31, 12))]
    batch, features = true_batch(texts, [0, 0, 0], [6, 30, 11])
    one = NativeEagle(one_head, 1, format_of(quantize))
    together = one.decode_steps(batch, features, 4)
    three = NativeEagle(one_head, 3, format_of(quantize))
    three._workspace._small = False
    assert torch.equal(three.decode_steps(batch, features, 4).logits, together.logits)
    for b, text in enumerate(texts):
        last = len(text.tokens) - 1
        single, own = true_batch([text], [0], [last])
        one.release(0)
        for i in range(last - 1):  # true rows one by one
            row, feature = true_batch([text], [i], [i + 1])
            one.extend(row, feature)
        row, feature = true_batch([text], [last - 1], [last])
        again = one.decode_steps(row, feature, 4)
        assert torch.equal(again.tokens[:, 0], together.tokens[:, b])
        assert torch.equal(again.logits[:, 0], together.logits[:, b])
        one.release(0)
        assert torch.equal(one.decode_steps(single, own, 4).logits[:, 0], together.logits[:, b])


def test_unsupported_heads_run_on_torch(caplog: pytest.LogCaptureFixture) -> None:
    narrow = head(variant(3, decoder={"head_dim": 4})).float()
    assert runtime_for(narrow, lender()).name == "torch"
    assert "size of its heads is 4, not a multiple of 16" in caplog.text
    with pytest.raises(ParameterError, match="quantize='int8' was given, but a head that torch runs"):
        runtime_for(narrow, lender(), quantize="int8")
    fine = head(variant(3)).float()
    for host, quantize, name in (
        (lender(), None, "native"),
        (lender(), "int8", "native"),
        (replace(lender(), runtime=Runtime("torch", torch.float32)), None, "torch"),
    ):
        assert backend_for_head(fine.config.decoder, host, quantize)[0].name == name


def test_a_head_that_is_stored_in_8_bits_runs_in_8_bits(eagle: EagleHead) -> None:
    eagle, host = eagle.float(), lender()

    def size(quantize: str | None) -> int:
        runtime = runtime_for(eagle, host, quantize)
        return runtime._layout.nbytes

    stored = size(None)
    eagle.in_8_bits = True
    assert size(None) == size("int8") < stored


def test_a_head_whose_states_overflow_is_refused(eagle: EagleHead) -> None:
    runtime, text = NativeEagle(eagle), Text(eagle, 4)
    batch, features = true_batch([text], [0], [3])
    with pytest.raises(TargetError, match="NaN or infinite"):
        runtime.decode_steps(batch, features * float("inf"), 2)


def test_weights_in_int8_need_a_quarter_of_the_memory() -> None:
    wide = head(variant(3, 64, decoder={"hidden_size": 64, "intermediate_size": 128}), spread=0.4)
    sizes = [NativeEagle(wide, None, format_of(quantize))._layout.nbytes for quantize in (None, "w8a8", "w8a16")]
    assert sizes[1] < 0.32 * sizes[0]
    assert sizes[2] <= sizes[1]
