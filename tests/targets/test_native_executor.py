"""What only the native executor has: weights in 16 bits and int8, chains in one call with their laws, rows that say the
same in any company. What every executor must do is in the conformance suite."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from slipstream.core.draws import COLD, GREEDY, Draws
from slipstream.errors import ParameterError, TargetError, UnsupportedModelError
from slipstream.targets.decoder import native_weights
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import Batch
from slipstream.targets.decoder.int8 import quantise_rows
from slipstream.targets.decoder.model import Decoder, choose_executor
from slipstream.targets.decoder.native_weights import check_suits, matrix_values, suits
from slipstream.targets.decoder.torch_executor import TorchExecutor
from slipstream.targets.decoder.weights import load_weights

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from slipstream.kernels import decoder
from slipstream.targets.decoder.native_executor import NativeExecutor

VOCAB = 96
TEXTS = [30, 41, 3]  # tokens of three sequences, two of them pending
KINDS = ["float32", "float16", "bfloat16", "int8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A Llama of the kernels' shapes, weights drawn wide, kept in this dtype; for "int8" a float16 one whose linear
    weights are int8 multiples of powers of two, so that quantising them changes nothing and float32 is an oracle."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            config = transformers.LlamaConfig(
                vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.25, pad_token_id=None,
                bos_token_id=1, eos_token_id=2, tie_word_embeddings=kind == "bfloat16",
            )  # fmt: skip
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config).float()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        parameter.copy_(1 + torch.rand_like(parameter) / 4)
                    elif kind == "int8" and "embed" not in name:
                        values, scale = quantise_rows(parameter)
                        values[:, 0] = 127  # of which the scale is found again
                        parameter.copy_(values * 2 ** scale.log2().round())
            made[kind] = tmp_path_factory.mktemp(kind)
            model.to(torch.float16 if kind == "int8" else getattr(torch, kind)).save_pretrained(made[kind])
        return made[kind]

    return get


@pytest.fixture(scope="module")
def native(checkpoint: Callable[[str], Path]) -> Callable[[str], NativeExecutor]:
    made: dict[str, NativeExecutor] = {}

    def get(kind: str) -> NativeExecutor:
        if kind not in made:
            config = DecoderConfig.load(checkpoint(kind))
            quantize = "int8" if kind == "int8" else None
            made[kind] = NativeExecutor(config, load_weights(checkpoint(kind), config), quantize, threads=1)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], TorchExecutor]:
    def get(kind: str) -> TorchExecutor:
        config = DecoderConfig.load(checkpoint(kind))
        return TorchExecutor(config, load_weights(checkpoint(kind), config, torch.float64))

    return get


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain(seq_id: int, past: int, ids: list[int], wanted: list[int] | None = None) -> Batch:
    n = len(ids)
    wanted = [n - 1] if wanted is None else wanted
    return Batch([seq_id], torch.tensor(ids), range(past, past + n), [0, n], [past], [None], wanted, [512])


def together(texts: list[list[int]], pending: int = 2) -> Batch:
    past = [len(text) - pending for text in texts]
    splits = [pending * b for b in range(len(texts) + 1)]
    return Batch(
        seq_ids=range(len(texts)),
        tokens=torch.tensor([t for text in texts for t in text[-pending:]]),
        positions=[p + i for p in past for i in range(pending)],
        splits=splits,
        past=past,
        trees=[None] * len(texts),
        select=[s - 1 for s in splits[1:]],
        limit=[512] * len(texts),
    )


def prefilled(executor: NativeExecutor, texts: list[list[int]], pending: int = 2) -> Batch:
    """The batch of their last tokens, all before them read."""
    for b, text in enumerate(texts):
        if len(text) > pending:
            executor.forward(chain(b, 0, text[:-pending], []))
    return together(texts, pending)


def stepwise(oracle: TorchExecutor, text: list[int], steps: int, draws: Draws) -> tuple[list[int], Tensor]:
    """Tokens and logits [K, V] of one sequence."""
    oracle.release(0)
    ids, logits = list(text), []
    for j in range(steps):
        start = 0 if j == 0 else len(ids) - 1
        logits.append(oracle.forward(chain(0, start, ids[start:])).logits[0].clone())
        ids.append(int(draws.pick(logits[-1][None], j)))
    return ids[len(text) :], torch.stack(logits)


def numbers(kind: str, vocab: int | None = None) -> Draws:
    u = torch.rand(4, len(TEXTS), VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    heat = torch.tensor([0.7, 2.0, 0.1], dtype=torch.float64)
    if kind == "maximum":
        return Draws(vocab=vocab)
    if kind == "uniforms":
        return Draws(heat, u[..., 0], vocab=vocab)
    return Draws(heat, noise=-(-u.log()).log(), vocab=vocab)


def alone(draws: Draws, b: int) -> Draws:
    def column(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, b : b + 1]

    heat = None if draws.inv_temperature is None else draws.inv_temperature[b : b + 1]
    return Draws(heat, column(draws.uniforms), column(draws.noise), draws.vocab)


def near(got: Tensor, want: Tensor, tolerance: float = 1e-3) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() < tolerance * want.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_stored_weights_in_float64(
    kind: str, native: Callable[[str], NativeExecutor], oracle: Callable[[str], TorchExecutor]
) -> None:
    text = tokens(70)
    batch = chain(3, 0, text, list(range(70)))
    near(native(kind).forward(batch).logits, oracle(kind).forward(batch).logits, 1e-3 if kind == "int8" else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_logits_is_the_same_bit_for_bit_however_many_run_together(
    kind: str, native: Callable[[str], NativeExecutor]
) -> None:
    executor, text = native(kind), tokens(80)
    whole = executor.forward(chain(5, 0, text, list(range(80)))).logits.clone()
    for piece in (1, 2, 3, 6, 8, 9, 13, 17):
        for start in range(0, 80, piece):
            part = text[start : start + piece]
            out = executor.forward(chain(6, start, part, list(range(len(part))))).logits
            assert torch.equal(out, whole[start : start + piece])


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_threads_change_nothing(kind: str, checkpoint: Callable[[str], Path]) -> None:
    config = DecoderConfig.load(checkpoint(kind))
    quantize, text = "int8" if kind == "int8" else None, tokens(60)
    made = [NativeExecutor(config, load_weights(checkpoint(kind), config), quantize, threads) for threads in (1, 2)]
    made[1]._weight_bytes = 1 << 30  # no model is too small to share
    one, two = (executor.forward(chain(0, 0, text, list(range(60)))).logits for executor in made)
    assert torch.equal(one, two)


@pytest.mark.parametrize("quantize", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["maximum", "uniforms", "noise"])
@pytest.mark.parametrize("vocab", [None, VOCAB - 5])
def test_a_chain_equals_one_forward_a_step(
    quantize: str,
    kind: str,
    vocab: int | None,
    native: Callable[[str], NativeExecutor],
    oracle: Callable[[str], TorchExecutor],
) -> None:
    texts = [tokens(n, seed) for seed, n in enumerate(TEXTS)]
    draws, executor = numbers(kind, vocab), native(quantize)
    made = executor.unrolled(prefilled(executor, texts), 4, draws)
    for b, text in enumerate(texts):
        want, logits = stepwise(oracle(quantize), text, 4, alone(draws, b))
        assert made.tokens[:, b].tolist() == want
        near(made.logits[:, b], logits)
        assert vocab is None or max(want) < vocab


@pytest.mark.parametrize("kind", ["uniforms", "noise"])
def test_the_laws_are_those_of_the_logits_in_float64(kind: str, native: Callable[[str], NativeExecutor]) -> None:
    texts = [tokens(n, seed) for seed, n in enumerate(TEXTS)]
    draws, executor = numbers(kind, VOCAB - 5), native("float16")
    made = executor.unrolled(prefilled(executor, texts), 4, draws)
    assert made.laws is not None
    assert draws.inv_temperature is not None
    want = torch.softmax(made.logits[..., : VOCAB - 5].double() * draws.inv_temperature[None, :, None], -1)
    assert torch.allclose(made.laws[..., : VOCAB - 5], want, rtol=1e-12, atol=0)
    assert not made.laws[..., VOCAB - 5 :].any()
    assert bool((made.laws.gather(-1, made.tokens[..., None]) > 0).all())
    assert executor.unrolled(together(texts), 4).laws is None


@pytest.mark.parametrize("quantize", ["float16", "int8"])
def test_a_chain_is_the_same_bit_for_bit_alone_and_in_company(
    quantize: str, native: Callable[[str], NativeExecutor]
) -> None:
    texts = [tokens(n, seed) for seed, n in enumerate(TEXTS)]
    draws, executor = numbers("uniforms"), native(quantize)
    company = executor.unrolled(prefilled(executor, texts), 4, draws)
    for b, text in enumerate(texts):
        one = executor.unrolled(chain(b, len(text) - 2, text[-2:]), 4, alone(draws, b))
        assert torch.equal(one.tokens[:, 0], company.tokens[:, b])
        assert torch.equal(one.logits[:, 0], company.logits[:, b])


def test_the_keys_and_values_of_every_token_but_the_last_are_there(
    native: Callable[[str], NativeExecutor], oracle: Callable[[str], TorchExecutor]
) -> None:
    text, executor, reference = tokens(62, seed=5), native("float16"), oracle("float16")
    made = executor.unrolled(prefilled(executor, [text]), 5)  # the chain goes on into a new block of the cache
    ids = text + made.tokens[:-1, 0].tolist()
    reference.forward(chain(0, 0, ids))
    near(executor.kv(0, len(ids)), reference.kv(0, len(ids)), 1e-5)


def test_an_exit_returns_the_stream_of_every_token_and_writes_the_KV_of_its_layers(
    native: Callable[[str], NativeExecutor],
) -> None:
    executor, text = native("float32"), tokens(20)
    made = executor.unrolled(chain(8, 0, text), 3, exit=1)
    assert made.hidden is not None
    assert made.later is not None
    ids = text + made.tokens[:, 0].tolist()
    out = executor.forward(chain(9, 0, ids, list(range(23))), (1,), (0, 1))
    assert out.hidden is not None
    assert torch.equal(torch.cat((made.hidden, made.later[:, 0])), out.hidden)
    assert torch.equal(out.taps[1], out.hidden)
    assert torch.equal(made.logits[:, 0], out.logits[19:22])
    assert torch.equal(executor.kv(8, 23)[0], executor.kv(9, 23)[0])


def test_a_greedy_sequence_among_drawn_ones_has_its_first_maximum(native: Callable[[str], NativeExecutor]) -> None:
    """And a uniform next to 1 names a token."""
    batch = Batch([0, 1], torch.tensor([3, 4]), [0, 0], [0, 1, 2], [0, 0], [None] * 2, [0, 1], [512] * 2)
    heat, u = torch.tensor([COLD, 0.01], dtype=torch.float64), torch.tensor([[0.0, 1 - 2.0**-53]] * 3).double()
    made = native("float16").unrolled(batch, 3, Draws(heat, u))
    assert made.tokens[:, 0].tolist() == made.logits[:, 0].argmax(-1).tolist()
    assert made.tokens[:, 1].tolist() == [VOCAB - 1] * 3


def test_whatever_was_in_a_block_before_does_not_shine_through(native: Callable[[str], NativeExecutor]) -> None:
    executor, ids = native("float16"), tokens(40)
    want = executor.forward(chain(0, 0, ids, list(range(40)))).logits.clone()
    for array in (*executor._cache.keys, *executor._cache.values):
        array[:] = np.nan
    assert torch.equal(executor.forward(chain(0, 0, ids, list(range(40)))).logits, want)


def test_hidden_states_that_overflow_are_refused(native: Callable[[str], NativeExecutor]) -> None:
    executor = native("float32")
    fine = executor._model
    executor._model = fine._replace(embed=np.full_like(fine.embed, np.inf))
    try:
        with pytest.raises(TargetError, match="not finite"):
            executor.unrolled(chain(0, 0, [3, 4]), 2)
        assert not torch.isfinite(executor.forward(chain(0, 0, [3, 4])).logits).any()  # the decoder refuses these
    finally:
        executor._model = fine


def test_weights_are_kept_as_narrow_as_the_checkpoint_has_them(native: Callable[[str], NativeExecutor]) -> None:
    sizes = {kind: native(kind).memory()["weights"] for kind in KINDS}
    assert sizes["float16"] < 0.55 * sizes["float32"]
    assert sizes["bfloat16"] == sizes["float16"]
    assert sizes["int8"] < 0.32 * sizes["float32"]
    tied = native("bfloat16")._model
    assert np.shares_memory(tied.embed, tied.head.values)


@pytest.mark.parametrize(
    ("change", "value"),
    [("norm", "layer"), ("activation", "gelu"), ("position", "learned"), ("gated", False), ("head_dim", 24)],
)
def test_other_decoders_are_left_to_the_other_executors(
    change: str, value: object, checkpoint: Callable[[str], Path]
) -> None:
    config = DecoderConfig.load(checkpoint("float32"))
    assert choose_executor(config, "auto", None, "cpu", "int8")[0] == "native"
    other = dataclasses.replace(config, **{change: value})
    assert choose_executor(other, "auto", None, "cpu", "int8")[0] == "openvino"
    with pytest.raises(UnsupportedModelError, match="native"):
        check_suits(other)


def test_decoders_that_suit_run_there_in_float32_and_int8(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig.load(checkpoint("float32"))
    large = dataclasses.replace(config, vocab_size=2**20)
    for sums, best in ((True, "openvino"), (False, "native")):
        monkeypatch.setattr(native_weights, "sums_of_bytes", lambda sums=sums: sums)
        assert choose_executor(large, "auto", None, "cpu", "int8")[0] == best
    assert choose_executor(large, "auto", None, "cpu")[0] == "native"
    assert choose_executor(config, "auto", None, "cpu", "int8")[0] == "native"
    assert choose_executor(config, "auto", None, "cpu")[0] == "native"
    assert choose_executor(config, "auto", torch.float64, "cpu")[0] == "torch"
    assert choose_executor(config, "native", None, None)[0] == "native"
    for device, dtype in (("meta", None), ("cpu", torch.float64)):
        with pytest.raises(ParameterError, match="on the CPU in float32"):
            choose_executor(config, "native", dtype, device)


def test_weights_of_a_pass_are_counted(native: Callable[[str], NativeExecutor]) -> None:
    model = native("float32")._model
    held = sum(each.values.size for each in (model.qkv, model.o, model.gate_up, model.down, model.head))
    assert held == matrix_values(dataclasses.replace(native("float32").config, vocab_size=128))  # filled up to 128


def test_int8_needs_rows_of_whole_steps(checkpoint: Callable[[str], Path]) -> None:
    config = DecoderConfig.load(checkpoint("float32"))
    odd = dataclasses.replace(config, intermediate_size=100)
    assert suits(odd)
    assert not suits(odd, "int8")


def test_without_numba_another_executor_is_chosen(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name, *rest))
    assert Decoder.load(checkpoint("float32"), device="cpu", quantize="int8").executor.name == "openvino"
    with pytest.raises(UnsupportedModelError, match="needs Numba"):
        Decoder.load(checkpoint("float32"), "native")


@pytest.mark.parametrize("options", [{"quantize": "int4"}, {"threads": 0}])
def test_a_setting_that_cannot_be_honoured_is_refused(
    options: dict[str, object], checkpoint: Callable[[str], Path]
) -> None:
    config = DecoderConfig.load(checkpoint("float32"))
    with pytest.raises(ParameterError):
        NativeExecutor(config, load_weights(checkpoint("float32"), config), **options)  # type: ignore[arg-type]


def test_more_steps_exits_layers_and_taps_than_there_are_are_refused(native: Callable[[str], NativeExecutor]) -> None:
    executor, batch = native("float32"), chain(0, 0, [3, 4])
    for steps, exit in ((0, None), (2, 0), (2, 3)):
        with pytest.raises(TargetError):
            executor.unrolled(batch, steps, GREEDY, exit)
    for taps, layers in (((), (0, 3)), ((), (1, 1)), ((5,), None), ((0,), (1, 2)), ((), (1, 2))):
        with pytest.raises(TargetError):
            executor.forward(batch, taps, layers)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compiled_on_loading_is_all_that_is_ever_needed(
    kind: str, native: Callable[[str], NativeExecutor]
) -> None:
    executor = native(kind)
    kernels = decoder.forward, decoder.lookup, decoder.draft

    def compiled() -> list[int]:
        return [len(each.signatures) for each in kernels]

    before = compiled()
    assert all(before)
    batch = prefilled(executor, [tokens(n) for n in TEXTS])
    for draws in (GREEDY, numbers("uniforms"), numbers("noise", VOCAB - 6)):
        executor.unrolled(batch, 4, draws)
        executor.unrolled(batch, 4, draws, exit=1)
    tree = dataclasses.replace(chain(9, 0, tokens(3)), trees=[torch.eye(3, dtype=torch.bool)])
    lower = executor.forward(tree, (0, 1), (0, 1))
    executor.forward(tree, (-1,), (1, 2), lower.hidden)
    executor.forward(dataclasses.replace(tree, select=()))
    assert compiled() == before


def test_loading_leaves_the_cache_empty(checkpoint: Callable[[str], Path]) -> None:
    config = DecoderConfig.load(checkpoint("float16"))
    assert NativeExecutor(config, load_weights(checkpoint("float16"), config)).memory()["kv"] == 0
