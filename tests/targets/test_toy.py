"""The toy target fulfils the contract and detects violations of it."""

from collections.abc import Iterator, Sequence as Seq

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.errors import TargetError
from tests.targets.conformance import TREE, Case, Conformance
from tests.targets.toy import ToyTarget


@pytest.fixture
def case() -> Iterator[Case]:
    target = ToyTarget(vocab=11, order=3, seed=5)

    def oracle(texts: Seq[list[int]]) -> list[torch.Tensor]:
        return [torch.stack([target.logits(ids[: i + 1]) for i in range(len(ids))]) for ids in texts]

    conformance_case = Case(target, oracle, 0.0)
    yield conformance_case
    conformance_case.close()


class TestToy(Conformance):
    def test_it_is_a_target(self, case: Case) -> None:
        assert isinstance(case.target, Target)

    def test_taps_cover_every_token_that_was_run(self, case: Case) -> None:
        seq, draft = case.sequence(6), case.forest([TREE])
        out = case.target.run([seq], draft, (-1, 2))
        assert out.hidden[-1].shape == out.hidden[2].shape == (13, 11)
        assert list(out.splits) == [0, 13]
        assert torch.equal(out.hidden[-1][5:], out.logits)


def test_the_distribution_depends_on_seed_and_last_tokens_only() -> None:
    a, b = ToyTarget(order=2, seed=1), ToyTarget(order=2, seed=1)
    b.logits([7, 7])  # the order of calls must not matter
    assert torch.equal(a.logits([1, 2, 3]), b.logits([5, 2, 3]))
    assert not torch.equal(a.logits([1, 2, 3]), a.logits([1, 3, 3]))
    assert not torch.equal(a.logits([2, 3]), ToyTarget(order=2, seed=2).logits([2, 3]))


@pytest.mark.parametrize(("path", "held"), [([0], "3, its token is 4"), ([], "nothing")])
def test_a_wrong_branch_in_the_cache_and_a_length_advanced_too_far_are_detected(path: list[int], held: str) -> None:
    target, seq = ToyTarget(), Sequence([1, 2])
    target.run([seq], Draft(torch.tensor([3, 4]), [-1, -1], [0, 2]))
    target.commit([seq], [path])
    seq.kv_len, seq.tokens = 3, [1, 2, 4, 5]  # the other sibling
    with pytest.raises(TargetError, match=rf"slot 2 of sequence .* holds {held}"):
        target.run([seq], Draft.empty(1))


@pytest.mark.parametrize("path", [[1, 2], [2], [0, 0], [5]])
def test_an_invalid_path_is_detected(path: list[int]) -> None:
    target, seq = ToyTarget(), Sequence([1, 2])
    target.run([seq], Draft(torch.tensor([3, 4, 5]), [-1, -1, 0], [0, 3]))
    with pytest.raises(TargetError, match="not a path"):
        target.commit([seq], [path])


def test_a_commit_without_a_run_and_a_run_without_pending_tokens_are_detected() -> None:
    target, seq = ToyTarget(), Sequence([1, 2])
    with pytest.raises(TargetError, match="does not follow a run"):
        target.commit([seq], [[]])
    seq.kv_len = 2
    with pytest.raises(TargetError, match="one must be pending"):
        target.run([seq], Draft.empty(1))


def test_the_table_of_distributions_grows_while_it_is_read() -> None:
    target = ToyTarget(vocab=80, order=1)
    first = target.logits([0])
    assert all(target.logits([i]).shape == (80,) for i in range(80))
    assert torch.equal(first, target.logits([0]))
