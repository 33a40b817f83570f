"""What every executor promises about its KV cache: forks, growth, rollbacks, a fixed size. The oracle is
transformers for logits, and a fresh prefill by the same executor for keys and values."""

import itertools
import random
from collections.abc import Callable, Sequence as Seq

import pytest
import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK, FIRST_BLOCKS
from slipstream.models.executor import Batch, Executor
from slipstream.models.load_settings import LoadSettings
from tests.checkpoints import FAMILY_VOCAB
from tests.targets.conftest import EXECUTORS
from tests.targets.reference import Reference

FRESH = 10_000  # id of the sequence that a text is compared with


class Texts:
    """An executor, and the text of each of its sequences."""

    def __init__(self, executor: Executor, oracle: Reference, tolerance: float):
        self.executor, self.oracle, self.tolerance = executor, oracle, tolerance
        self.random = random.Random(0)
        self.texts: dict[int, list[int]] = {}

    def ids(self, n: int) -> list[int]:
        return [self.random.randrange(FAMILY_VOCAB) for _ in range(n)]

    def run(self, rows: dict[int, int], past: dict[int, int] | None = None) -> None:
        """Run that many random tokens of each sequence in one batch, after its text or the first `past` tokens of it;
        all logits are compared with the oracle's."""
        starts = {s: (past or {}).get(s, len(self.texts.get(s, []))) for s in rows}
        for seq_id, n in rows.items():
            self.texts[seq_id] = self.texts.get(seq_id, [])[: starts[seq_id]] + self.ids(n)
        splits = [0, *itertools.accumulate(rows.values())]
        out = self.executor.forward(
            Batch(
                seq_ids=list(rows), tokens=torch.tensor([t for s in rows for t in self.texts[s][starts[s] :]]),
                positions=[p for s in rows for p in range(starts[s], len(self.texts[s]))], splits=splits,
                past=[starts[s] for s in rows], trees=[None] * len(rows), select=range(splits[-1]),
            )
        )  # fmt: skip
        for b, seq_id in enumerate(rows):
            self.near(out.logits[splits[b] : splits[b + 1]], self.oracle(self.texts[seq_id])[starts[seq_id] :])

    def tree(self, seq_id: int, parents: Seq[int]) -> list[int]:
        """Run one token after a text and a tree of nodes below it; returns the nodes' tokens."""
        past, tokens, depths = len(self.texts[seq_id]), self.ids(1 + len(parents)), list[int]()
        mask = torch.eye(len(tokens), dtype=torch.bool)
        mask[:, 0] = True
        for i, parent in enumerate(parents):
            mask[i + 1] |= mask[parent + 1]
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        positions = [past, *(past + d for d in depths)]
        self.executor.forward(
            Batch([seq_id], torch.tensor(tokens), positions, [0, len(tokens)], [past], [mask], range(len(tokens)))
        )
        self.texts[seq_id] += tokens[:1]
        return tokens[1:]

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        self.executor.fork(parent_id, child_id, length)
        self.texts[child_id] = self.texts[parent_id][:length]

    def release(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.executor.release(seq_id)
            self.texts.pop(seq_id, None)

    def check(self) -> None:
        """The KV of each sequence is that of a fresh prefill."""
        for seq_id, text in self.texts.items():
            found = self.executor.kv(seq_id, len(text))
            n = len(text)
            self.executor.forward(Batch([FRESH], torch.tensor(text), range(n), [0, n], [0], [None], []))
            wanted = self.executor.kv(FRESH, n)
            self.executor.release(FRESH)
            if self.executor.runtime.backend == "native":  # batch-invariant: bitwise
                assert torch.equal(found, wanted), f"sequence {seq_id}"
            self.near(found, wanted)

    def near(self, found: Tensor, wanted: Tensor) -> None:
        assert found.shape == wanted.shape
        assert (found.double() - wanted.double()).abs().max() <= self.tolerance * wanted.abs().max()


@pytest.fixture(params=list(EXECUTORS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["llama", "mistral-window", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


Make = Callable[..., Texts]


@pytest.fixture
def make(decoder, reference, name, family):
    """A new executor, with a cache of `kv_blocks` blocks."""

    def made(kv_blocks: int | None = None) -> Texts:
        _, dtype, tolerance = EXECUTORS[name]
        loaded = decoder(family, name)
        assert loaded.weights is not None
        settings = LoadSettings(kv_tokens=None if kv_blocks is None else BLOCK * kv_blocks)
        own = type(loaded.executor)(loaded.config, loaded.weights, settings)  # type: ignore[call-arg]
        return Texts(own, reference(family, dtype), tolerance)

    return made


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 70])
def test_after_a_fork_each_sequence_continues_independently(make: Make, length: int) -> None:
    own = make()
    own.run({1: 70})
    own.fork(1, 2, length)
    own.check()
    own.run({2: 9})
    own.fork(2, 3, min(length + 4, 74))
    own.run({1: 3, 2: 2, 3: 8})
    own.check()
    own.run({3: 30, 1: 1})
    own.run({1: 5, 2: 5}, past={1: length // 2, 2: length // 2})  # both roll back into blocks that they share
    own.check()


def test_sequences_that_share_blocks_can_be_released_in_any_order(make: Make) -> None:
    own = make(kv_blocks=6)
    for order in itertools.permutations(range(3)):
        released_in(order, own)


def released_in(order: Seq[int], own: Texts) -> None:
    own.run({0: 50})
    own.fork(0, 1, 45)
    own.fork(1, 2, 40)
    for seq_id in order:
        own.run(dict.fromkeys(own.texts, 1))
        own.check()
        own.release(seq_id)
    own.release(9)  # unknown ids are ignored
    own.run(dict.fromkeys(range(6), BLOCK))  # all of the cache is free again
    own.release(*range(6))


def test_the_cache_grows_while_others_hold_blocks(make: Make) -> None:
    own = make()
    for _ in range(6):
        for seq_id in range(FIRST_BLOCKS // 2):
            own.run({seq_id: 15})
    own.run(dict.fromkeys(range(FIRST_BLOCKS // 2), 2))
    own.check()
    assert own.executor.memory()["kv"] > 0


def test_a_full_cache_is_reported_by_sequence_and_the_others_continue(make: Make) -> None:
    own = make(kv_blocks=6)
    own.run({0: 2 * BLOCK - 3})
    own.run({1: 3 * BLOCK})
    with pytest.raises(TargetError, match=r"out of KV blocks: sequence 2 needs 2 more .* and 1 of 6 are free"):
        own.executor.forward(Batch([2], torch.tensor([3] * 40), range(40), [0, 40], [0], [None], [39]))
    own.run({0: 3, 1: 1})
    with pytest.raises(TargetError, match="sequence 0 needs 1 more to hold 65 slots, and 0 of 6 are free"):
        own.executor.forward(Batch([0], torch.tensor([3]), [64], [0, 1], [64], [None], [0]))
    own.fork(0, 2, 2 * BLOCK)  # shares full blocks and needs none
    own.fork(0, 3, BLOCK + 1)
    with pytest.raises(TargetError, match="sequence 3 needs 1 more"):  # to copy a block that it shares
        own.executor.forward(Batch([3], torch.tensor([3]), [33], [0, 1], [33], [None], [0]))
    own.run({1: 20})
    own.release(1)
    own.check()
    own.run({2: 7, 3: 7})
    own.release(2)
    own.check()


@pytest.mark.parametrize("past", [BLOCK - 4, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 3])
def test_branches_are_moved_and_rolled_back_across_a_block_boundary(make: Make, past: int) -> None:
    own = make()
    own.run({0: 5, 1: past, 2: 40})
    for path in ([1, 4, 5], [0, 3], [], [0, 2, 6]):
        for seq_id in (1, 2):
            tokens = own.tree(seq_id, [-1, -1, 0, 0, 1, 4, 2])
            base = len(own.texts[seq_id])
            own.executor.move(seq_id, [base + node for node in path], range(base, base + len(path)))
            own.texts[seq_id] += [tokens[node] for node in path]
        own.check()
        own.run({1: 1, 0: 7, 2: 3})
    own.run({1: 6}, past={1: past - 5})
    own.check()


def test_a_branch_is_moved_in_a_block_that_another_sequence_shares(make: Make) -> None:
    own = make()
    own.run({1: BLOCK - 3})
    tokens = own.tree(1, [-1, -1, 0, 0, 1])
    base = len(own.texts[1])
    own.fork(1, 2, base)
    own.executor.fork(1, 3, base + 5)  # a copy of the whole tree
    own.texts[3] = [*own.texts[1], tokens[1], tokens[4]]
    own.executor.move(1, [base, base + 3], [base, base + 1])
    own.texts[1] += [tokens[0], tokens[3]]
    own.executor.move(3, [base + 1, base + 4], [base, base + 1])
    own.check()
    own.run({1: 4, 2: 4, 3: 4})
    own.check()


def test_random_sessions_of_forks_rollbacks_and_releases(make: Make) -> None:
    own, draw = make(), random.Random(1)
    for _ in range(40):
        ids = list(own.texts)
        kind = draw.random()
        if len(ids) < 2 or (kind < 0.2 and len(ids) < 5):
            own.run({draw.randrange(9000): draw.randint(1, 50)})
        elif kind < 0.7:
            chosen = draw.sample(ids, draw.randint(1, len(ids)))
            past = {s: draw.randint(1, len(own.texts[s])) for s in chosen if draw.random() < 0.3}
            own.run({s: draw.randint(1, 6) for s in chosen}, past)
        elif kind < 0.9 and len(ids) < 5:
            parent = draw.choice(ids)
            own.fork(parent, draw.randrange(9000), draw.randint(1, len(own.texts[parent])))
        else:
            own.release(draw.choice(ids))
        own.release(*[s for s, text in list(own.texts.items()) if len(text) > 110])  # gpt2 ends at 128
    own.check()


def test_slots_that_are_not_held_are_refused_and_the_sequences_continue(make: Make) -> None:
    """By every member; which numbers are refused is held by `tests/kv/test_blocks.py`."""
    own = make()
    own.run({1: 40})
    held = 2 * BLOCK
    for message, call in {
        f"first {held + 1} KV slots": lambda: own.executor.kv(1, held + 1),
        f"not slot {held}": lambda: own.executor.move(1, [held], [0]),
        "sequence 7 holds no KV": lambda: own.executor.fork(7, 2, 0),
        "sequence 8 holds 0 KV slots": lambda: own.executor.forward(
            Batch([8], torch.tensor([3]), [3], [0, 1], [3], [None], [0])
        ),
    }.items():
        with pytest.raises(TargetError, match=message):
            call()
    own.check()
    own.run({1: 3})


def test_out_of_memory_is_an_error_and_the_sequences_continue(make: Make) -> None:
    own = make()
    own.run({1: 40})
    with pytest.raises(TargetError, match="no memory for 1099511627776 KV blocks"):
        own.executor._blocks.grow(1 << 40)  # type: ignore[attr-defined]
    own.run({1: 40, 2: 3})
    own.check()
