"""What every executor promises about its KV cache: forks, growth, rollbacks, a fixed size. The oracle is
transformers for logits, and a fresh prefill by the same executor for keys and values."""

import random
from collections.abc import Callable, Mapping, Sequence as Seq

import pytest

from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK, FIRST_BLOCKS
from slipstream.targets.decoder import Decoder
from tests.targets.conformance import TREE, Case
from tests.targets.conftest import EXECUTORS


class CachedTexts(Case):
    """Between two calls, the cache holds all tokens of each sequence."""

    target: Decoder

    def begin(self, *lengths: int) -> list[Sequence]:
        """New sequences, which are run in one batch."""
        seqs = [self.sequence(n) for n in lengths]
        self._run(seqs)
        return seqs

    def grow(self, rows: Mapping[Sequence, int], past: Mapping[Sequence, int] | None = None) -> None:
        """Run so many random tokens of each sequence in one batch, after its text or the first `past` tokens of it."""
        for seq, n in rows.items():
            seq.kv_len = (past or {}).get(seq, len(seq.tokens))
            seq.tokens = seq.tokens[: seq.kv_len] + self.ids(n)
        self._run(list(rows))

    def tree(self, seq: Sequence, path: Seq[int]) -> None:
        """Run one token and a tree of draft tokens, of which a path is kept."""
        seq.tokens += self.ids(1)
        self._run([seq], self.forest([TREE]), [path])

    def fork(self, parent: Sequence, length: int) -> Sequence:
        child = Sequence(parent.tokens[:length])
        self.target.executor.fork(parent.id, child.id, length)
        child.kv_len = length
        self.born.append(child)
        return child

    def release(self, seq: Sequence) -> None:
        self.target.release(seq.id)
        self.born.remove(seq)

    def check(self) -> None:
        self.check_kv(self.born, bitwise=self.target.executor.runtime.backend == "native")

    def _run(self, seqs: Seq[Sequence], draft: Draft | None = None, paths: Seq[Seq[int]] | None = None) -> None:
        draft, paths = draft or Draft.empty(len(seqs)), paths or [[]] * len(seqs)
        self.run(seqs, draft)
        self.target.commit(seqs, paths)
        for b, seq in enumerate(seqs):
            seq.tokens += [draft.ids[draft.splits[b] + node] for node in paths[b]]
            seq.kv_len = len(seq.tokens)


@pytest.fixture(params=["llama", "mistral-window", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


Make = Callable[..., CachedTexts]


@pytest.fixture
def make(decoder, reference, executor, family):
    """A new executor, with a cache of `kv_blocks` blocks."""

    def made(kv_blocks: int | None = None) -> CachedTexts:
        _, dtype, tolerance = EXECUTORS[executor]
        loaded = decoder(family, executor)
        settings = LoadSettings(kv_tokens=None if kv_blocks is None else BLOCK * kv_blocks)
        again = type(loaded.executor)(loaded.config, loaded.weights, settings)
        return CachedTexts(Decoder(again), reference(family, dtype), tolerance)

    return made


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 70])
def test_after_a_fork_each_sequence_continues_independently(make: Make, length: int) -> None:
    case = make()
    [first] = case.begin(70)
    second = case.fork(first, length)
    case.check()
    case.grow({second: 9})
    third = case.fork(second, min(length + 4, 74))
    case.grow({first: 3, second: 2, third: 8})
    case.check()
    case.grow({third: 30, first: 1})
    case.grow({first: 5, second: 5}, past={first: length // 2, second: length // 2})  # into blocks that they share
    case.check()


def test_the_cache_grows_while_others_hold_blocks(make: Make) -> None:
    case = make()
    seqs = [case.begin(15)[0] for _ in range(FIRST_BLOCKS // 2)]
    for _ in range(5):
        for seq in seqs:
            case.grow({seq: 15})
    case.grow(dict.fromkeys(seqs, 2))
    case.check()
    assert case.target.executor.memory()["kv"] > 0


def test_a_full_cache_is_reported_by_sequence_and_the_others_continue(make: Make) -> None:
    case = make(kv_blocks=6)
    [one], [two], new = case.begin(2 * BLOCK - 3), case.begin(3 * BLOCK), Sequence([3] * 40)

    def refused(seq: Sequence, says: str) -> None:
        with pytest.raises(TargetError, match=f"sequence {seq.id} needs {says}"):
            case.target.run([seq], Draft.empty(1))

    refused(new, "2 more .* and 1 of 6 are free")
    case.grow({one: 3, two: 1})
    one.tokens.append(3)
    refused(one, "1 more to hold 65 slots, and 0 of 6 are free")
    one.tokens.pop()
    three, four = case.fork(one, 2 * BLOCK), case.fork(one, BLOCK + 1)  # share blocks and need none
    four.tokens.append(3)
    refused(four, "1 more")  # to copy a block that it shares
    four.tokens.pop()
    case.grow({two: 20})
    case.release(two)
    case.check()
    case.grow({three: 7, four: 7})
    case.release(three)
    case.check()


@pytest.mark.parametrize("past", [BLOCK - 4, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 3])
def test_branches_are_moved_and_rolled_back_across_a_block_boundary(make: Make, past: int) -> None:
    case = make()
    other, one, two = case.begin(5, past, 40)
    for path in ([1, 4, 5], [0, 3], [], [0, 2, 6]):
        case.tree(one, path)
        case.tree(two, path)
        case.check()
        case.grow({one: 1, other: 7, two: 3})
    case.grow({one: 6}, past={one: past - 5})
    case.check()


def test_a_branch_is_moved_in_a_block_that_another_sequence_shares(make: Make) -> None:
    case = make()
    [one] = case.begin(BLOCK - 3)
    one.tokens += case.ids(1)
    draft = case.forest([[-1, -1, 0, 0, 1]])
    case.run([one], draft)
    end = len(one.tokens)
    two, three = case.fork(one, end), Sequence(list(one.tokens))
    case.born.append(three)
    case.target.executor.fork(one.id, three.id, end + 5)  # a copy of the whole tree
    case.target.commit([one, three], [[0, 3], [1, 4]])
    for seq, path in ((one, [0, 3]), (three, [1, 4])):
        seq.tokens += [draft.ids[node] for node in path]
        seq.kv_len = len(seq.tokens)
    case.check()
    case.grow({one: 4, two: 4, three: 4})
    case.check()


def test_random_sessions_of_forks_rollbacks_and_releases(make: Make) -> None:
    case, draw = make(), random.Random(1)
    for _ in range(40):
        seqs, kind = list(case.born), draw.random()
        if len(seqs) < 2 or (kind < 0.2 and len(seqs) < 5):
            case.begin(draw.randint(1, 50))
        elif kind < 0.7:
            chosen = draw.sample(seqs, draw.randint(1, len(seqs)))
            past = {seq: draw.randint(1, len(seq.tokens)) for seq in chosen if draw.random() < 0.3}
            case.grow({seq: draw.randint(1, 6) for seq in chosen}, past)
        elif kind < 0.9 and len(seqs) < 5:
            parent = draw.choice(seqs)
            case.fork(parent, draw.randint(1, len(parent.tokens)))
        else:
            case.release(draw.choice(seqs))
        for seq in [seq for seq in case.born if len(seq.tokens) > 110]:  # gpt2 ends at 128
            case.release(seq)
    case.check()


def test_slots_that_are_not_held_are_refused_and_the_sequences_continue(make: Make) -> None:
    """By every member; which numbers are refused is held by `tests/kv/test_blocks.py`."""
    case, unknown = make(), Sequence([3] * 4)
    [seq], executor, slots, unknown.kv_len = case.begin(40), case.target.executor, 2 * BLOCK, 3
    for message, call in {
        f"has {slots} KV slots, but slot {slots} was requested": lambda: executor.kv(seq.id, slots + 1),
        f"but slot {slots} was requested": lambda: executor.move(seq.id, [slots], [0]),
        f"sequence {unknown.id} has no KV": lambda: executor.fork(unknown.id, 2, 0),
        f"sequence {unknown.id} has 0 KV slots": lambda: case.target.run([unknown], Draft.empty(1)),
    }.items():
        with pytest.raises(TargetError, match=message):
            call()
    case.check()
    case.grow({seq: 3})


def test_out_of_memory_is_an_error_and_the_sequences_continue(make: Make) -> None:
    case = make()
    [seq] = case.begin(40)
    with pytest.raises(TargetError, match="no memory for 1099511627776 KV blocks"):
        case.target.executor._blocks.grow(1 << 40)  # type: ignore[attr-defined]
    case.grow({seq: 40})
    case.check()
