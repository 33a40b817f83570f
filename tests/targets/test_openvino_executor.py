"""What only the OpenVINO executor has: paged blocks, int8 kernels, unrolled drafting, constants that live in a file,
and buffers that are bound once. What every executor must do is in the conformance suite."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import random
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.core.draws import COLD, GREEDY, Draws
from slipstream.errors import LoadError, ParameterError, TargetError, UnsupportedModelError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import Batch, Executor, Unrolled
from slipstream.targets.decoder.torch_executor import TorchExecutor
from slipstream.targets.decoder.weights import load_weights
from tests.targets.families import FAMILIES, VOCAB, Reference

if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

from slipstream.targets.decoder import openvino_paged
from slipstream.targets.decoder.int8 import quantise_rows
from slipstream.targets.decoder.openvino_constants import Constants
from slipstream.targets.decoder.openvino_executor import OpenVinoExecutor, Unrolling

Files = Callable[[str], Path]
Ref = Callable[[str, torch.dtype], Reference]

TREE = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
"""A root with two branches of two: rows 1-2 and rows 3-4."""
TREE_DEPTHS = [0, 1, 2, 1, 2]


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain(seq_id: int, past: int, ids: list[int], select: Seq[int] | None = None) -> Batch:
    n = len(ids)
    rows = range(n) if select is None else select
    return Batch([seq_id], torch.tensor(ids), range(past, past + n), [0, n], [past], [None], rows, [512])


def tree(seq_id: int, past: int, ids: list[int]) -> Batch:
    positions = [past + d for d in TREE_DEPTHS]
    return Batch([seq_id], torch.tensor(ids), positions, [0, 5], [past], [torch.tensor(TREE) > 0], range(5), [512])


def near(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.fixture(scope="module")
def build(checkpoint: Files, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., OpenVinoExecutor]:
    def make(family: str, **options: object) -> OpenVinoExecutor:
        config = DecoderConfig.load(checkpoint(family))
        options.setdefault("cache_dir", tmp_path_factory.mktemp("cache"))
        return OpenVinoExecutor(config, load_weights(checkpoint(family), config), threads=1, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def llama(build: Callable[..., OpenVinoExecutor]) -> OpenVinoExecutor:
    return build("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, build: Callable[..., OpenVinoExecutor], reference: Ref) -> None:
    ids = tokens(70)
    want = reference(family, torch.float32)(ids)
    executor = build(family)
    near(executor.forward(chain(0, 0, ids[:40])).logits, want[:40])
    near(executor.forward(chain(0, 40, ids[40:69])).logits, want[40:69])
    near(executor.forward(chain(0, 69, ids[69:])).logits, want[69:])


def test_trees_chains_and_new_sequences_share_a_batch(llama: OpenVinoExecutor, reference: Ref) -> None:
    of = reference("llama", torch.float32)
    ids = tokens(45)
    llama.forward(chain(1, 0, ids[:40]))
    llama.forward(chain(2, 0, ids[:33]))
    llama.release(3)
    batch = Batch(
        seq_ids=[1, 2, 3],
        tokens=torch.tensor(ids[40:45] + ids[33:36] + ids[:2]),
        positions=[40, 41, 42, 41, 42, 33, 34, 35, 0, 1],
        splits=[0, 5, 8, 10],
        past=[40, 33, 0],
        trees=[torch.tensor(TREE) > 0, None, None],
        select=[2, 4, 7, 9],
        limit=[512] * 3,
    )
    a, b, c, d, e = ids[40:45]
    got = llama.forward(batch).logits
    near(got[0], of([*ids[:40], a, b, c])[-1])
    near(got[1], of([*ids[:40], a, d, e])[-1])
    near(got[2], of(ids[:36])[-1])
    near(got[3], of(ids[:2])[-1])


def test_rolling_back_is_passing_a_smaller_past(llama: OpenVinoExecutor, reference: Ref) -> None:
    ids, other = tokens(60), tokens(60, seed=1)
    llama.forward(chain(4, 0, ids))
    mixed = ids[:30] + other[:10]
    near(llama.forward(chain(4, 30, mixed[30:])).logits, reference("llama", torch.float32)(mixed)[30:])


def test_a_branch_that_is_moved_reads_as_its_chain(llama: OpenVinoExecutor, reference: Ref) -> None:
    ids = tokens(36)
    for past in (28, 31):  # 31: the move crosses a block
        a, b, c, d, e = ids[past : past + 5]
        llama.forward(chain(5, 0, ids[:past]))
        llama.forward(tree(5, past, [a, b, c, d, e]))
        llama.move(5, [past + 3, past + 4], [past + 1, past + 2])
        text = [*ids[:past], a, d, e, 7]
        near(llama.forward(chain(5, past + 3, [7])).logits, reference("llama", torch.float32)(text)[-1:])
        moved = llama.kv(5, past + 4)
        llama.forward(chain(6, 0, text))
        near(moved, llama.kv(6, past + 4))
    assert llama.kv(5, 3).shape == (3, 2, 2, 3, 16)


def test_taps_accumulate_and_equal_the_hidden_states(llama: OpenVinoExecutor, reference: Ref) -> None:
    ids = tokens(12)
    want = reference("llama", torch.float32).hidden(ids)
    for taps in ((), (2,), (0, -1), (2, 0), (-1, 1)):
        out = llama.forward(chain(7, 0, ids, select=[11]), taps)
        assert list(out.taps) == list(taps)
        for tap, got in out.taps.items():
            near(got, want[tap])
        near(out.logits, reference("llama", torch.float32)(ids)[-1:])


def test_slices_of_layers_share_the_cache(llama: OpenVinoExecutor, reference: Ref) -> None:
    ids = tokens(20)
    want = reference("llama", torch.float32)(ids)
    llama.forward(chain(8, 0, ids[:15]))
    early = llama.forward(chain(8, 15, ids[15:]), layers=(0, 2))
    assert early.hidden is not None
    late = llama.forward(chain(8, 15, ids[15:]), layers=(2, 3), hidden=early.hidden)
    near(late.logits, want[15:])
    with pytest.raises(TargetError, match="need the hidden states"):
        llama.forward(chain(8, 15, ids[15:]), layers=(2, 3))
    with pytest.raises(TargetError, match="were asked of a model with 3"):
        llama.forward(chain(8, 15, ids[15:]), layers=(2, 9))


def test_blocks_grow_across_many_sequences_and_are_used_again(
    build: Callable[..., OpenVinoExecutor], reference: Ref
) -> None:
    executor = build("llama")
    texts = [tokens(33 + 7 * i, seed=i) for i in range(12)]
    for i, text in enumerate(texts):
        executor.forward(chain(i, 0, text[:-1], select=[0]))
    assert executor._cache.capacity > 16  # it has grown, with content in it
    for i, text in enumerate(texts):
        got = executor.forward(chain(i, len(text) - 1, text[-1:])).logits
        near(got, reference("llama", torch.float32)(text)[-1:])
    held = executor.memory()["kv"]
    for _ in range(3):
        for i in range(12):
            executor.release(i)
        for i, text in enumerate(texts):
            executor.forward(chain(20 + i, 0, text, select=[0]))
        for i in range(12):
            executor.release(20 + i)
    assert executor.memory()["kv"] == held
    executor.release(999)


def test_whatever_was_in_a_block_before_does_not_shine_through(
    build: Callable[..., OpenVinoExecutor],
) -> None:
    executor = build("llama")
    ids = tokens(40)
    want = executor.forward(chain(0, 0, ids)).logits.clone()
    for array in (*executor._cache.keys, *executor._cache.values):
        array[:] = float("nan")
    assert torch.equal(executor.forward(chain(0, 0, ids)).logits, want)


def test_logits_handed_out_earlier_stay_readable(llama: OpenVinoExecutor) -> None:
    ids = tokens(300)
    first = llama.forward(chain(9, 0, ids[:5])).logits
    for n in (1, 70, 200, 2):
        llama.forward(chain(9, 0, ids[:n]))
    assert first.shape == (5, VOCAB)
    assert first.isfinite().all()
    assert llama.forward(Batch([9], torch.tensor(ids[:2]), [0, 1], [0, 2], [0], [None], [], [9])).logits.shape == (
        0,
        VOCAB,
    )


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window"])
def test_a_tree_beyond_the_window_equals_its_chains(
    family: str, build: Callable[..., OpenVinoExecutor], reference: Ref
) -> None:
    of, ids = reference(family, torch.float32), tokens(25)
    executor = build(family)
    executor.forward(chain(0, 0, ids[:20]))
    a, b, c, d, e = ids[20:]
    out = executor.forward(tree(0, 20, [a, b, c, d, e]), taps=(2,))
    near(out.logits[2], of([*ids[:20], a, b, c])[-1])
    near(out.logits[4], of([*ids[:20], a, d, e])[-1])
    near(out.taps[2][4], of.hidden([*ids[:20], a, d, e])[2][-1])
    executor.move(0, [23, 24], [21, 22])
    near(executor.forward(chain(0, 23, [7])).logits[0], of([*ids[:20], a, d, e, 7])[-1])


class Session:
    """Random batches of chains and trees, with branches kept, rolled back, moved and released between them."""

    def __init__(self, seed: int, vocab: int):
        self.random, self.vocab = random.Random(seed), vocab
        self.length: dict[int, int] = {}
        self.drawn: dict[int, tuple[int, list[int]]] = {}  # sequence -> (pending, parents) of the last batch
        self.ids = itertools.count()

    def batch(self) -> Batch:
        draw = self.random
        while len(self.length) < 4:
            self.length[next(self.ids)] = 0
        out = Batch(draw.sample(list(self.length), draw.randint(1, 4)), torch.empty(0), [], [0], [], [], [], [512] * 4)
        for seq_id in out.seq_ids:
            past = self.length[seq_id]
            if draw.random() < 0.2:
                past = draw.randint(0, past)  # forget some
            pending, nodes = draw.choice([1, 1, 3, draw.randint(1, 50)]), draw.randint(0, 8)
            straight = draw.random() < 0.4
            parents = [i - 1 if straight else draw.randint(-1, i - 1) for i in range(nodes)]
            mask = torch.ones(pending + nodes, pending + nodes).tril().bool()
            depths: list[int] = []
            for i, parent in enumerate(parents):
                mask[pending + i, pending:] = mask[pending + parent, pending:] if parent >= 0 else False
                mask[pending + i, pending + i] = True
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
            first = out.splits[-1]
            out.positions.extend([*range(past, past + pending), *(past + pending + d for d in depths)])
            out.splits.append(first + pending + nodes)
            out.past.append(past)
            out.trees.append(None if straight else mask)
            out.select.extend(range(first + pending - 1, first + pending + nodes))
            self.length[seq_id] = past + pending
            self.drawn[seq_id] = pending, parents
        ids = [draw.randrange(self.vocab) for _ in range(out.splits[-1])]
        return dataclasses.replace(out, tokens=torch.tensor(ids), limit=[512] * len(out.seq_ids))

    def settle(self, batch: Batch, executors: list[Executor]) -> None:
        for seq_id in batch.seq_ids:
            _, parents = self.drawn[seq_id]
            base, path, node = self.length[seq_id], [], -1
            while children := [i for i, parent in enumerate(parents) if parent == node]:
                node = self.random.choice(children)
                path.append(node)
            path = path[: self.random.randint(0, len(path))]
            for executor in executors:
                executor.move(seq_id, [base + i for i in path], range(base, base + len(path)))
            self.length[seq_id] += len(path)
            if self.length[seq_id] > 150 or self.random.random() < 0.1:
                for executor in executors:
                    executor.release(seq_id)
                del self.length[seq_id]


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_random_session_equals_the_torch_executor(
    family: str, build: Callable[..., OpenVinoExecutor], checkpoint: Files
) -> None:
    executor = build(family)
    torch_one = TorchExecutor(executor.config, load_weights(checkpoint(family), executor.config), torch.device("cpu"))
    session = Session(seed=7, vocab=VOCAB)
    for _ in range(40):
        batch = session.batch()
        got, want = (e.forward(batch, taps=(1, -1)) for e in (executor, torch_one))
        near(got.logits, want.logits)
        near(got.taps[1], want.taps[1])
        near(got.taps[-1], want.taps[-1])
        session.settle(batch, [executor, torch_one])


class TestInt8:
    def test_rows_are_quantised_to_half_a_step(self) -> None:
        weight = torch.randn(40, 64)
        weight[3] = 0
        values, scale = quantise_rows(weight)
        assert values.dtype == torch.int8
        assert ((values * scale - weight).abs() <= scale / 2 + 1e-6).all()

    @pytest.mark.parametrize("family", ["llama", "llama-tied-mha", "mixtral", "gpt2"])
    def test_equals_the_float_model_with_the_same_rounded_weights(
        self, family: str, build: Callable[..., OpenVinoExecutor], checkpoint: Files
    ) -> None:
        ids = tokens(40)
        of = Reference(checkpoint(family), torch.float32)
        plain = of(ids)
        with torch.no_grad():
            for name, p in of.model.named_parameters():
                if p.ndim >= 2 and not any(s in name for s in ("embed", "wte", "wpe", "gate.weight", "lm_head")):
                    flat = p.t() if "c_" in name else p.flatten(0, -2)  # GPT-2 keeps [in, out]
                    values, scale = quantise_rows(flat.contiguous())
                    whole = values * scale
                    p.copy_(whole.t() if "c_" in name else whole.view_as(p))
            head = of.model.lm_head
            values, scale = quantise_rows(head.weight.detach())
            head.weight = torch.nn.Parameter(values * scale)  # a tied embedding stays as it is
        exact = build(family, quantize="int8")
        exact._properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # activations stay in float32
        near(exact.forward(chain(0, 0, ids)).logits, of(ids))
        if family != "mixtral":  # where rounded activations may turn the router to another expert
            rounded = build(family, quantize="int8").forward(chain(0, 0, ids)).logits
            near(rounded, of(ids), 0.1)
            near(rounded, plain, 0.15)

    def test_a_row_does_not_depend_on_the_rows_beside_it(self, build: Callable[..., OpenVinoExecutor]) -> None:
        executor = build("llama", quantize="int8")
        ids = tokens(24)
        together = executor.forward(chain(0, 0, ids)).logits.clone()
        alone = torch.cat([executor.forward(chain(0, i, ids[i : i + 1])).logits.clone() for i in range(24)])
        near(alone, together)

    def test_weights_take_a_quarter(self, build: Callable[..., OpenVinoExecutor]) -> None:
        whole, small = (build("llama", quantize=q)._constants for q in (None, "int8"))
        assert small.matmul_bytes * 4 == whole.matmul_bytes


class TestUnrolled:
    def stepwise(
        self, executor: OpenVinoExecutor, texts: list[list[int]], steps: int, draws: list[Draws]
    ) -> tuple[Tensor, Tensor]:
        """The same draft with a forward a step, from scratch; draws: of each text alone."""
        tokens_, logits = [], []
        for b, text in enumerate(texts):
            ids, row = list(text), []
            executor.forward(chain(100 + b, 0, ids, select=[len(ids) - 1]))
            for j in range(steps):
                row.append(executor.forward(chain(100 + b, len(ids) - 1, ids[-1:])).logits[0].clone())
                ids.append(int(draws[b].pick(row[-1][None], j)))
            tokens_.append(torch.tensor(ids[len(text) :]))
            logits.append(torch.stack(row))
        return torch.stack(tokens_, 1), torch.stack(logits, 1)

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    @pytest.mark.parametrize("kind", ["maximum", "uniforms", "noise"])
    @pytest.mark.parametrize("vocab", [None, VOCAB - 5])
    def test_equals_one_forward_a_step(
        self, family: str, kind: str, vocab: int | None, build: Callable[..., OpenVinoExecutor]
    ) -> None:
        executor = build(family)
        texts = [tokens(30), tokens(41, seed=1), tokens(3, seed=2)]
        numbers = torch.rand(4, 3, VOCAB, generator=torch.Generator().manual_seed(3))
        heat, noise = torch.tensor([0.7, 2.0, 0.1]), -(-numbers.log()).log()
        draws = {
            "maximum": Draws(vocab=vocab),
            "uniforms": Draws(heat, numbers[..., 0], vocab=vocab),
            "noise": Draws(heat, noise=noise, vocab=vocab),
        }[kind]
        each = [
            Draws(
                heat[b : b + 1],
                None if draws.uniforms is None else numbers[:, b : b + 1, 0],
                None if draws.noise is None else noise[:, b : b + 1],
                vocab,
            )
            for b in range(3)
        ]
        want = self.stepwise(executor, texts, 4, each)
        assert vocab is None or int(want[0].max()) < vocab
        for b, text in enumerate(texts):
            executor.forward(chain(b, 0, text[:-2], select=[0]))
        batch = Batch(
            seq_ids=[0, 1, 2],
            tokens=torch.tensor([t for text in texts for t in text[-2:]]),  # two pending tokens each
            positions=[28, 29, 39, 40, 1, 2],
            splits=[0, 2, 4, 6],
            past=[28, 39, 1],
            trees=[None] * 3,
            select=[1, 3, 5],
            limit=[512] * 3,
        )
        got = executor.unrolled(batch, 4, draws)
        got_tokens, got_logits = got.tokens, got.logits
        assert torch.equal(got_tokens, want[0])
        near(got_logits, want[1])
        for b, text in enumerate(texts):  # the KV of every drafted token but the last is there
            ids = text + want[0][:, b].tolist()
            last = executor.forward(chain(b, len(ids) - 1, ids[-1:])).logits.clone()
            near(last, executor.forward(chain(50 + b, 0, ids, select=[len(ids) - 1])).logits)

    def test_a_greedy_sequence_among_drawn_ones_has_its_first_maximum(
        self, build: Callable[..., OpenVinoExecutor]
    ) -> None:
        """And a uniform next to 1, which rounding may put above the end of the cumulated law, names a token."""
        executor = build("llama")
        batch = Batch([0, 1], torch.tensor([3, 4]), [0, 0], [0, 1, 2], [0, 0], [None] * 2, [0, 1], [512] * 2)
        top = 1 - torch.finfo(torch.float32).eps / 2
        made = executor.unrolled(batch, 3, Draws(torch.tensor([COLD, 0.01]), torch.tensor([[0.0, top]] * 3)))
        assert made.tokens[:, 0].tolist() == made.logits[:, 0].argmax(-1).tolist()
        assert made.tokens[:, 1].tolist() == [VOCAB - 1] * 3

    def test_of_equal_scores_the_first_wins(self, build: Callable[..., OpenVinoExecutor]) -> None:
        executor = build("llama")
        noise = torch.full((2, 1, VOCAB), -1e9)
        noise[:, :, [5, 40, 41]] = 0.0
        drawn = executor.unrolled(
            chain(0, 0, [3, 4]), 2, Draws(torch.zeros(1), noise=noise)
        ).tokens  # only noise counts
        assert drawn.flatten().tolist() == [5, 5]

    def test_the_graphs_used_last_are_kept(
        self, build: Callable[..., OpenVinoExecutor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("slipstream.targets.decoder.openvino_executor.unrolled_kept", lambda weight_bytes: 4)
        executor = build("gpt2")
        for steps in (1, 2, 3, 1, 4, 1, 5):
            key = Unrolling(steps, None, "maximum", None)
            before = executor._unrolled.get(key)
            assert executor.unrolled(chain(0, 0, [3, 4, 5]), steps).tokens.shape == (steps, 1)
            assert before in (None, executor._unrolled[key])
        assert {key.steps for key in executor._unrolled} == {1, 3, 4, 5}

    @pytest.mark.parametrize("kind", ["maximum", "uniforms", "noise"])
    @pytest.mark.parametrize("exit", [None, 2])
    def test_a_graph_for_a_fixed_number_of_rows_says_what_the_general_one_says(
        self, build: Callable[..., OpenVinoExecutor], monkeypatch: pytest.MonkeyPatch, kind: str, exit: int | None
    ) -> None:
        """Over blocks that fill up and a cache that grows; beyond the usual numbers of rows there is no such graph."""
        executor = build("llama")
        numbers = torch.rand(3, 1, VOCAB, generator=torch.Generator().manual_seed(3))
        draws = {"maximum": GREEDY, "uniforms": Draws(None, numbers[..., 0]), "noise": Draws(noise=numbers)}[kind]
        text = tokens(75)

        def chains() -> list[Unrolled]:
            made = []
            for rows, past in ((2, 0), (2, 29), (8, 31), (16, 59), (3, 10), (2, 60)):
                executor.forward(chain(0, 0, text, select=[0]))  # drafts write over what follows
                out = executor.unrolled(chain(0, past, text[past : past + rows]), 3, draws, exit)
                made.append(copy.deepcopy(out))
            return made

        monkeypatch.setattr("slipstream.targets.decoder.openvino_executor._FIXED_AFTER", 1)
        chains()
        assert {key.rows for key in executor._unrolled} == {0, 2}  # two rows were asked for three times
        fixed = chains()
        executor._unrolled.clear()
        monkeypatch.setattr("slipstream.targets.decoder.openvino_executor._FIXED_BYTES", 0)
        for mine, general in zip(fixed, chains(), strict=True):
            assert torch.equal(mine.tokens, general.tokens)
            near(mine.logits, general.logits)
            if exit is not None:
                near(mine.hidden, general.hidden)
                near(mine.later, general.later)
        assert {key.rows for key in executor._unrolled} == {0}

    def test_each_sequence_has_its_own_temperature(self, build: Callable[..., OpenVinoExecutor]) -> None:
        executor = build("llama")
        noise = torch.full((1, 1, VOCAB), 0.0)
        noise[:, :, 7] = 100.0
        batch = Batch([0, 1], torch.tensor([3, 4]), [0, 0], [0, 1, 2], [0, 0], [None] * 2, [0, 1], [512] * 2)
        made = executor.unrolled(batch, 1, Draws(torch.tensor([0.0, 1e9]), noise=noise))
        assert made.tokens.tolist() == [[7, int(made.logits[0, 1].argmax())]]
        assert int(made.logits[0, 1].argmax()) != 7

    def test_minus_infinity_forbids_a_token(self, build: Callable[..., OpenVinoExecutor]) -> None:
        executor = build("llama")
        best = int(executor.unrolled(chain(0, 0, [3, 4]), 1).tokens)
        noise = torch.zeros(1, 1, VOCAB)
        noise[:, :, best] = -torch.inf
        made = executor.unrolled(chain(0, 0, [3, 4]), 1, Draws(noise=noise))
        assert int(made.tokens) == int((made.logits + noise).argmax()) != best

    def test_an_exit_returns_the_stream_of_every_token_and_writes_the_KV_of_its_layers(
        self, build: Callable[..., OpenVinoExecutor]
    ) -> None:
        executor, layers = build("llama"), 2
        text, steps = tokens(9), 3
        executor.forward(chain(0, 0, text[:-2], select=[0]))
        made = executor.unrolled(chain(0, 7, text[-2:]), steps, exit=layers)
        assert made.hidden is not None
        assert made.later is not None
        stream, drafted = torch.cat((made.hidden, made.later[:, 0])).clone(), made.tokens[:, 0].tolist()
        logits, kv = made.logits[:, 0].clone(), executor.kv(0, 12)[:layers]
        for j in range(steps):
            alone = executor.forward(chain(60, 0, text + drafted[:j], select=[8 + j]), layers=(0, layers))
            near(logits[j : j + 1], alone.logits)
            assert drafted[j] == int(alone.logits.argmax())
        whole = executor.forward(chain(61, 0, text + drafted, select=()), layers=(0, layers))
        assert whole.hidden is not None
        near(stream, whole.hidden[7:])
        near(kv, executor.kv(61, 12)[:layers])
        with pytest.raises(TargetError, match="exit after 9 layers"):
            executor.unrolled(chain(0, 7, text[-2:]), steps, exit=9)


def test_nothing_is_left_in_the_folder(checkpoint: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    config = DecoderConfig.load(checkpoint("llama"))
    executor = OpenVinoExecutor(config, load_weights(checkpoint("llama"), config))
    executor.forward(chain(0, 0, [3, 4, 5]))
    assert (tmp_path / "openvino").is_dir()
    assert not list((tmp_path / "openvino").iterdir())


def test_a_folder_that_cannot_be_written_is_named(checkpoint: Files, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = DecoderConfig.load(checkpoint("llama"))
    with pytest.raises(LoadError, match="cache_dir or SLIPSTREAM_CACHE"):
        OpenVinoExecutor(config, load_weights(checkpoint("llama"), config), cache_dir=tmp_path / "file" / "x")


def test_each_constant_is_stored_once_and_merged(checkpoint: Files, tmp_path: Path) -> None:
    config = DecoderConfig.load(checkpoint("llama-tied-mha"))
    weights = load_weights(checkpoint("llama-tied-mha"), config)
    constants = Constants(config, weights, None, tmp_path)
    assert constants.nbytes == weights.nbytes
    assert constants.head == "embed"
    assert constants.matrix("0.qkv").get_output_shape(0) == [3 * 64, 64]
    assert constants.matrix("0.up") is constants.matrix("0.up")
    constants.evict()


@pytest.mark.parametrize("options", [{"quantize": "int4"}, {"threads": 0}])
def test_a_setting_that_cannot_be_honoured_is_refused(options: dict[str, object], checkpoint: Files) -> None:
    config = DecoderConfig.load(checkpoint("llama"))
    with pytest.raises(ParameterError):
        OpenVinoExecutor(config, load_weights(checkpoint("llama"), config), **options)  # type: ignore[arg-type]


def test_a_runtime_that_attends_wrongly_is_refused(
    build: Callable[..., OpenVinoExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_paged, "attention", lambda q, *_: q)
    openvino_paged.probe.cache_clear()
    try:
        with pytest.raises(UnsupportedModelError, match="executor='torch'"):
            build("llama")
    finally:
        openvino_paged.probe.cache_clear()


def test_the_graph_is_fused(llama: OpenVinoExecutor) -> None:
    llama.forward(chain(0, 0, [3, 4]))
    program = llama._program(0, 3, ())
    kinds = [n.get_rt_info()["layerType"].get() for n in program.compiled.get_runtime_model().get_ordered_ops()]
    assert kinds.count("PagedAttention") == kinds.count("RoPE") == 3
    assert kinds.count("RMS") == 7
    assert kinds.count("FullyConnected") == 5 * 3 + 1  # qkv, o, gate, up, down; the head


def test_draft_lengths_tried_in_turns_are_compiled_once() -> None:
    """Nine lengths of a small model all stay; of a large one only as many as there is room for."""
    from slipstream.targets.decoder.openvino_program import unrolled_kept

    assert unrolled_kept(10 << 20) >= 9
    assert unrolled_kept(4 << 30) == 4
    assert unrolled_kept(1) == 32
