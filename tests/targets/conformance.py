"""Tests of the promises that every `Target` makes. A target's test module subclasses `Conformance` and provides the
fixture `case`. The oracle of the case uses neither drafts nor caches."""

import random
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from tests.targets.reference import assert_close, held


@dataclass
class Case:
    """A target under test. `oracle(texts)` returns, for each text, the logits [T, V] after each of its tokens;
    `tolerance` is the largest difference allowed, relative to the largest logit."""

    target: Target
    oracle: Callable[[Seq[list[int]]], Seq[Tensor]]
    tolerance: float
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.born: list[Sequence] = []

    def ids(self, n: int) -> list[int]:
        return [self.random.randrange(self.target.vocab_size) for _ in range(n)]

    def sequence(self, n: int) -> Sequence:
        seq = Sequence(self.ids(n))
        self.born.append(seq)
        return seq

    def same(self, rows: Tensor, wanted: Tensor) -> None:
        assert_close(rows, wanted, self.tolerance)

    def run(self, seqs: Seq[Sequence], draft: Draft) -> Tensor:
        """Run the target, compare every row of the logits with the oracle, and return a copy of the logits."""
        out = self.target.run(seqs, draft)
        assert len(out.logits) == len(seqs) + len(draft)
        texts: list[list[int]] = []
        rows: list[list[int]] = []
        for b, seq in enumerate(seqs):
            root = draft.splits[b] + b  # row of the last pending token; node i is i + 1 rows below
            parents = draft.parents[draft.splits[b] : draft.splits[b + 1]]
            for leaf in [n for n in range(-1, len(parents)) if n not in parents]:
                path = draft.ancestors(b, leaf)
                texts.append(seq.tokens + [draft.ids[draft.splits[b] + i] for i in path])
                rows.append([root, *(root + 1 + i for i in path)])
        for text, wanted, truth in zip(texts, rows, self.oracle(texts), strict=True):
            self.same(out.logits[wanted], truth[len(text) - len(wanted) :])
        return out.logits.clone()

    def keep(self, seqs: Seq[Sequence], draft: Draft, path: Seq[Seq[int]]) -> None:
        """Commit `path`, and append the accepted draft tokens and one random token to each sequence."""
        if not self.target.capabilities.trees:
            path = [range(len(each)) for each in path]
        self.target.commit(seqs, path)
        for b, seq in enumerate(seqs):
            run = [draft.ids[draft.splits[b] + i] for i in path[b]]
            seq.kv_len = len(seq.tokens) + len(run)
            seq.tokens += run + self.ids(1)

    def check_kv(self, seqs: Seq[Sequence], bitwise: bool = False) -> None:
        """Assert that the keys and values of each sequence of a decoder are the same as after a new prefill."""
        target: Any = self.target
        for seq in seqs:
            fresh = Sequence(seq.tokens[: seq.kv_len])
            target.run([fresh], Draft.empty(1))
            kv, wanted = (target.executor.kv(each.id, seq.kv_len) for each in (seq, fresh))
            target.release(fresh.id)
            self.same(kv, wanted)
            assert not bitwise or torch.equal(kv, wanted), f"sequence {seq.id}"

    def prefilled(self, n: int) -> Sequence:
        seq = self.sequence(n)
        self.run([seq], Draft.empty(1))
        self.keep([seq], Draft.empty(1), [[]])
        return seq

    def roll_back(self, seq: Sequence) -> None:
        """Run drafts one after another, of which different numbers of tokens are accepted."""
        for accepted in (0, 4, 1, 0, 3, 2, 5, 0):
            draft = self.forest([CHAIN])
            self.run([seq], draft)
            self.keep([seq], draft, [list(range(accepted))])

    def check_held(self, seq: Sequence) -> None:
        """Assert that after one more run, the keys, values and states of a sequence are the same as those of a new
        sequence."""
        fresh = seq.copy_for(seq.context)
        self.born.append(fresh)
        for each in (seq, fresh):
            self.target.run([each], Draft.empty(1))
        for a, b in zip(held(self.target, seq), held(self.target, fresh), strict=True):
            assert_close(a, b)

    def check_taps(self, taps: Seq[int], hidden: Callable[[list[int]], Mapping[int, Tensor]]) -> None:
        """Compare the hidden states at taps with a reference. hidden: function from a text to the states [T, d] of its
        tokens at some of the taps."""
        a, b = self.sequence(10), self.sequence(3)
        out = self.target.run([a, b], Draft.chains([[5, 7], [9]]), taps)
        assert list(out.splits) == [0, 12, 16]
        assert set(out.hidden) == set(taps)
        for text, rows in (([*a.tokens, 5, 7], slice(0, 12)), ([*b.tokens, 9], slice(12, 16))):
            for tap, states in hidden(text).items():
                self.same(out.hidden[tap][rows], states)

    def forest(self, shapes: Seq[Seq[int]]) -> Draft:
        """Make a draft of random tokens on trees, which are given by the parents of their nodes. For a target that runs
        only chains, make chains with the same numbers of tokens."""
        if not self.target.capabilities.trees:
            shapes = [range(-1, len(parents) - 1) for parents in shapes]
        return Draft.trees([(self.ids(len(parents)), parents) for parents in shapes])

    def close(self) -> None:
        for seq in self.born:
            self.target.release(seq.id)


CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, -1, 0, 0, 1, 4, 2]  # two children of the pending token, both with descendants at depth 3


class Conformance:
    def test_prefill_returns_the_distribution_after_the_last_token(self, case: Case) -> None:
        for n in (13, 1):
            case.run([case.sequence(n)], Draft.empty(1))

    def test_decode_step_by_step_equals_one_pass(self, case: Case) -> None:
        seq = case.prefilled(4)
        for _ in range(8):
            case.run([seq], Draft.empty(1))
            case.keep([seq], Draft.empty(1), [[]])

    def test_several_pending_tokens_run_together(self, case: Case) -> None:
        seq = case.prefilled(5)
        seq.tokens += case.ids(3)
        case.run([seq], Draft.empty(1))

    def test_draft_directly_after_a_prompt(self, case: Case) -> None:
        case.run([case.sequence(6)], case.forest([TREE]))

    def test_running_again_without_commit_changes_nothing(self, case: Case) -> None:
        seq = case.prefilled(6)
        case.run([seq], case.forest([CHAIN]))
        case.run([seq], case.forest([TREE]))
        case.run([seq], Draft.empty(1))

    def test_the_bonus_token_after_a_completely_accepted_draft(self, case: Case) -> None:
        seq = case.prefilled(5)
        for k in (1, 2, 5, 3):
            draft = case.forest([CHAIN[:k]])
            case.run([seq], draft)
            case.keep([seq], draft, [list(range(k))])
        case.run([seq], case.forest([CHAIN]))

    def test_rollbacks_of_differing_depth_one_after_another(self, case: Case) -> None:
        case.roll_back(case.prefilled(5))

    def test_commit_of_a_branch_that_is_not_the_first(self, case: Case) -> None:
        """Tests a sequence alone, and several sequences in a batch."""
        for paths in ([[1, 4, 5]], [[0, 3], [1], [0, 2, 6], [1, 4]]):
            seqs = [case.prefilled(7) for _ in paths]
            draft = case.forest([TREE] * len(seqs))
            case.run(seqs, draft)
            case.keep(seqs, draft, paths)
            again = case.forest([TREE] * len(seqs))
            case.run(seqs, again)
            case.keep(seqs, again, [[] for _ in seqs])
            case.run(seqs, case.forest([CHAIN] * len(seqs)))

    def test_ragged_batches_equal_each_sequence_alone(self, case: Case) -> None:
        shapes = [CHAIN, TREE, [], [-1, -1, -1], [-1]]
        for size in range(1, 6):
            seqs = [case.prefilled(n) if n % 2 else case.sequence(n) for n in range(3, 3 + size)]
            paths = [[0, 1, 2], [1, 4], [], [2], [0]][:size]
            for _ in range(2):
                draft = case.forest(shapes[:size])
                case.run(seqs, draft)
                case.keep(seqs, draft, paths)
            for seq in seqs:
                case.target.release(seq.id)

    def test_a_fork_goes_on_by_itself(self, case: Case) -> None:
        """Parent and child run together, each with its own draft; then the parent is released."""
        fork = case.target.capabilities.fork
        for n in (3, 9):
            parent = case.prefilled(n)
            child = Sequence(parent.tokens[:n] + case.ids(1))
            case.born.append(child)
            fork(parent.id, child.id, n)
            child.kv_len = n
            for paths in ([[1, 4], [0]], [[], [0, 1, 2]]):
                draft = case.forest([TREE, CHAIN])
                case.run([parent, child], draft)
                case.keep([parent, child], draft, paths)
            case.target.release(parent.id)
            case.run([child], case.forest([TREE]))

    def test_sequences_join_and_leave_between_steps(self, case: Case) -> None:
        first, second = case.prefilled(5), case.prefilled(8)
        case.run([second], case.forest([CHAIN]))
        case.target.release(second.id)
        case.target.release(second.id)  # unknown ids are ignored
        third = case.sequence(4)
        case.run([third, first], case.forest([TREE, CHAIN]))
