"""Chains by our own kernel are those of the same int8 weights computed in float32, one token at a time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from slipstream.core.draws import COLD, GREEDY, Draws
from slipstream.errors import TargetError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import Batch, Unrolled
from slipstream.targets.decoder.torch_executor import TorchExecutor
from slipstream.targets.decoder.weights import load_weights

if not all(map(importlib.util.find_spec, ("openvino", "numba"))):
    pytest.skip("openvino or numba is not installed", allow_module_level=True)

from slipstream.targets.decoder import openvino_chain
from slipstream.targets.decoder.openvino_constants import quantise_rows
from slipstream.targets.decoder.openvino_executor import OpenVinoExecutor

VOCAB = 96
TEXTS = [30, 41, 3]  # tokens of three sequences, two of them pending


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of the kernel's shapes, weights drawn wide, whose linear weights are int8 multiples: quantising them
    changes nothing, so float32 is an oracle."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.25, pad_token_id=None, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                values, scale = quantise_rows(parameter)
                parameter.copy_(values * scale)
            elif "norm" in name:
                parameter.copy_(1 + torch.rand_like(parameter) / 4)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def executor(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenVinoExecutor:
    config = DecoderConfig.load(checkpoint)
    cache = tmp_path_factory.mktemp("cache")
    made = OpenVinoExecutor(config, load_weights(checkpoint, config), "int8", threads=1, cache_dir=cache)
    assert not made.few_rows  # the kernel is what runs its chains
    return made


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> TorchExecutor:
    config = DecoderConfig.load(checkpoint)
    return TorchExecutor(config, load_weights(checkpoint, config))


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


def prefilled(executor: OpenVinoExecutor, texts: list[list[int]], pending: int = 2) -> Batch:
    """The batch of their last tokens, all before them read by the kernel itself, as it rounds less than the graph."""
    for b, text in enumerate(texts):
        for start in range(0, len(text) - pending, 8):
            stop = min(start + 8, len(text) - pending)
            executor.unrolled(chain(b, start, text[start:stop]), 1)
    return together(texts, pending)


def stepwise(oracle: TorchExecutor, text: list[int], steps: int, draws: Draws) -> tuple[list[int], Tensor]:
    """Tokens and logits [K, V] of one sequence."""
    oracle.release(0)
    ids, logits = list(text), []
    for j in range(steps):
        start = 0 if j == 0 else len(ids) - 1
        logits.append(oracle.forward(chain(0, start, ids[start:])).logits[0].clone())
        ids.append(int(draws.pick(logits[-1][None].double(), j)))
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


@pytest.mark.parametrize("kind", ["maximum", "uniforms", "noise"])
@pytest.mark.parametrize("vocab", [None, VOCAB - 5])
def test_equals_one_forward_a_step_in_float32(
    kind: str, vocab: int | None, executor: OpenVinoExecutor, oracle: TorchExecutor
) -> None:
    texts = [tokens(n, seed) for seed, n in enumerate(TEXTS)]
    draws = numbers(kind, vocab)
    made = executor.unrolled(prefilled(executor, texts), 4, draws)
    for b, text in enumerate(texts):
        want, logits = stepwise(oracle, text, 4, alone(draws, b))
        assert made.tokens[:, b].tolist() == want
        assert (made.logits[:, b] - logits).abs().max() < 1e-3 * logits.abs().max()
        assert vocab is None or max(want) < vocab


@pytest.mark.parametrize("kind", ["uniforms", "noise"])
def test_the_laws_are_those_of_the_logits_in_float64(kind: str, executor: OpenVinoExecutor) -> None:
    texts = [tokens(n, seed) for seed, n in enumerate(TEXTS)]
    draws = numbers(kind, VOCAB - 5)
    made = executor.unrolled(prefilled(executor, texts), 4, draws)
    assert made.laws is not None
    assert draws.inv_temperature is not None
    want = torch.softmax(made.logits[..., : VOCAB - 5].double() * draws.inv_temperature[None, :, None], -1)
    assert torch.allclose(made.laws[..., : VOCAB - 5], want, rtol=1e-12, atol=0)
    assert not made.laws[..., VOCAB - 5 :].any()
    assert bool((made.laws.gather(-1, made.tokens[..., None]) > 0).all())
    assert executor.unrolled(together(texts), 4).laws is None


def test_a_sequence_says_the_same_bit_for_bit_alone_and_in_company(executor: OpenVinoExecutor) -> None:
    texts = [tokens(n, seed) for seed, n in enumerate(TEXTS)]
    draws = numbers("uniforms")
    batch = prefilled(executor, texts)
    company = executor.unrolled(batch, 4, draws)
    for b, text in enumerate(texts):
        one = executor.unrolled(chain(b, len(text) - 2, text[-2:]), 4, alone(draws, b))
        assert torch.equal(one.tokens[:, 0], company.tokens[:, b])
        assert torch.equal(one.logits[:, 0], company.logits[:, b])


def test_pending_rows_say_the_same_bit_for_bit_however_many_run_together(executor: OpenVinoExecutor) -> None:
    text = tokens(40)
    made: list[Unrolled] = []
    for piece in (1, 3, 8, 16):
        for start in range(0, 39, piece):
            executor.unrolled(chain(7, start, text[start : min(start + piece, 39)]), 1)
        made.append(executor.unrolled(chain(7, 39, text[39:]), 3))
    assert all(torch.equal(one.logits, made[0].logits) for one in made)


def test_the_keys_and_values_of_every_token_but_the_last_are_there(
    executor: OpenVinoExecutor, oracle: TorchExecutor
) -> None:
    text = tokens(62, seed=5)  # the chain goes on into a new block of the cache
    made = executor.unrolled(prefilled(executor, [text]), 5)
    ids = text + made.tokens[:-1, 0].tolist()
    oracle.release(0)
    oracle.forward(chain(0, 0, ids))
    want = oracle.kv(0, len(ids))
    assert (executor.kv(0, len(ids)) - want).abs().max() < 1e-3 * want.abs().max()


def test_all_but_the_last_of_a_long_prompt_are_run_by_the_graph(
    executor: OpenVinoExecutor, oracle: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says nearly the same: it rounds activations to 8 bits."""
    ran: list[int] = []
    forward = OpenVinoExecutor.forward
    monkeypatch.setattr(
        OpenVinoExecutor, "forward", lambda self, batch, *rest: (ran.append(batch.splits[-1]), forward(self, batch))[1]
    )
    long, short = tokens(openvino_chain.MOST_ROWS + 30), tokens(2, seed=1)
    batch = Batch(
        [0, 1], torch.tensor(long + short), [*range(len(long)), 0, 1], [0, len(long), len(long) + 2], [0, 0],
        [None, None], [len(long) - 1, len(long) + 1], [512] * 2,
    )  # fmt: skip
    made = executor.unrolled(batch, 3)
    assert ran == [len(long) - 1]
    for b, text in enumerate((long, short)):
        _, logits = stepwise(oracle, text, 1, GREEDY)
        assert (made.logits[0, b] - logits[0]).abs().max() < (0.1 if b == 0 else 1e-3) * logits.abs().max()


def test_a_greedy_sequence_among_drawn_ones_has_its_first_maximum(executor: OpenVinoExecutor) -> None:
    """And a uniform next to 1 names a token."""
    batch = Batch([0, 1], torch.tensor([3, 4]), [0, 0], [0, 1, 2], [0, 0], [None] * 2, [0, 1], [512] * 2)
    heat, u = torch.tensor([COLD, 0.01], dtype=torch.float64), torch.tensor([[0.0, 1 - 2.0**-53]] * 3).double()
    made = executor.unrolled(batch, 3, Draws(heat, u))
    assert made.tokens[:, 0].tolist() == made.logits[:, 0].argmax(-1).tolist()
    assert made.tokens[:, 1].tolist() == [VOCAB - 1] * 3


def test_hidden_states_that_overflow_are_refused(executor: OpenVinoExecutor) -> None:
    broken = executor._chains.model._replace(embed=np.full((VOCAB, 64), np.inf, np.float32))
    fine, executor._chains.model = executor._chains.model, broken
    try:
        with pytest.raises(TargetError, match="not finite"):
            executor.unrolled(chain(0, 0, [3, 4]), 2)
    finally:
        executor._chains.model = fine


@pytest.mark.parametrize(
    ("change", "value"),
    [("norm", "layer"), ("activation", "gelu"), ("position", "learned"), ("gated", False), ("qkv_bias", True),
     ("o_bias", True), ("mlp_bias", True), ("qk_norm", True), ("windows", (8, None)), ("intermediate_size", 100),
     ("hidden_size", 72), ("vocab_size", 97)],
)  # fmt: skip
def test_other_decoders_are_left_to_the_graph(change: str, value: object, checkpoint: Path) -> None:
    import dataclasses

    config = DecoderConfig.load(checkpoint)
    assert openvino_chain.suits(config, "int8")
    assert not openvino_chain.suits(dataclasses.replace(config, **{change: value}), "int8")


def test_without_numba_or_int8_the_graph_drafts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig.load(checkpoint)
    assert not openvino_chain.suits(config, None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name, *rest))
    made = OpenVinoExecutor(config, load_weights(checkpoint, config), "int8", threads=1, cache_dir=tmp_path)
    assert made.few_rows
    assert made.unrolled(chain(0, 0, [3, 4]), 2).tokens.shape == (2, 1)
