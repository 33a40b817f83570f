"""Lookahead: what each cell of the window sees, how the window moves, what enters the pool, when it pauses."""

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.lookahead import PAUSE, TRIAL, BackOff, LookaheadConfig, LookaheadDrafter, Pool
from slipstream.errors import RuleError
from slipstream.llm import LLM
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget


def drafter(**options: object) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadConfig(**{"row_cost": 0.0, **options}))  # type: ignore[arg-type]


def window_of(lookahead: LookaheadDrafter, seq: Sequence, levels: list[list[int]]) -> Draft:
    """What is drafted with this window and an empty pool."""
    lookahead.propose([seq], [Budget(1)])
    lookahead._states[seq.id].levels = levels
    return lookahead.propose([seq], [Budget(20)])


def test_a_cell_sees_level_0_up_to_its_column_then_its_own_column_and_is_not_acceptable() -> None:
    """2402.02057, section 3.1: the mask of the window, as sets of ancestors."""
    W, N = 4, 5
    levels = [[10 * level + i for i in range(W)] for level in range(N - 1)]
    draft = window_of(drafter(window=W, ngram=N, from_text=False), Sequence([99]), levels)
    assert draft.ids == [cell for level in levels for cell in level]
    assert list(draft.acceptable or ()) == [False] * W * (N - 1)
    for level in range(N - 1):
        for i in range(W):
            seen = [draft.ids[node] for node in draft.ancestors(0, level * W + i)]
            assert seen == [*range(i + 1), *(10 * above + i for above in range(1, level + 1))]
            assert draft.depths[level * W + i] == level + i + 1, "the position of the token that the cell drafts"


def told(lookahead: LookaheadDrafter, seq: Sequence, draft: Draft, path: list[int], following: int, says: dict) -> None:
    """One step in which the target's next token after each node is says[node]."""
    logits = torch.zeros(len(draft) + 1, 100, dtype=torch.float64)
    for node, token in says.items():
        logits[1 + node, token] = 1.0
    verdict = Verdict([path], [following], [None], [False])
    seq.advance(verdict, draft, 0)
    lookahead.observe([seq], draft, TargetOut(logits), verdict)


def test_a_full_window_makes_n_grams_and_keeps_its_place() -> None:
    lookahead, seq = drafter(window=3, ngram=3, from_text=False), Sequence([9])
    draft = window_of(lookahead, seq, [[1, 2, 3], [4, 5, 6]])
    told(lookahead, seq, draft, [], 50, {3: 11, 4: 12, 5: 13})
    state = lookahead._states[seq.id]
    assert state.levels == [[4, 5, 6], [11, 12, 13]]
    assert [state.pool.tails(t) for t in (1, 2, 3, 4)] == [[(4, 11)], [(5, 12)], [(6, 13)], []]


def test_after_accepted_draft_tokens_columns_are_dropped_on_the_left() -> None:
    lookahead, seq = drafter(window=3, ngram=3, from_text=False), Sequence([9])
    lookahead.propose([seq], [Budget(1)])
    lookahead._states[seq.id].pool.add([9, 20, 21])
    draft = window_of(lookahead, seq, [[1, 2, 3], [4, 5, 6]])
    assert draft.ids[:2] == [20, 21]
    assert list(draft.acceptable or ())[:3] == [True, True, False]
    told(lookahead, seq, draft, [0, 1], 50, {5: 11, 6: 12, 7: 13})
    levels = lookahead._states[seq.id].levels
    assert [level[:1] for level in levels] == [[6], [13]]
    assert all(len(level) == 3 and set(level[1:]) <= set(seq.tokens) for level in levels), "filled up from the text"


def test_the_window_fills_level_by_level() -> None:
    """A new level is one position further than the window's own, so at first a column is dropped in every step."""
    lookahead, seq = drafter(window=3, ngram=4, from_text=False), Sequence([9])
    draft = window_of(lookahead, seq, [[1, 2, 3]])
    told(lookahead, seq, draft, [], 9, {0: 11, 1: 12, 2: 13})
    levels = lookahead._states[seq.id].levels
    assert [level[:2] for level in levels] == [[2, 3], [12, 13]]
    assert not lookahead._states[seq.id].pool._tails


def test_without_verified_rows_the_window_only_moves() -> None:
    """The step verified another draft, so the window learned nothing. It is moved at the next proposal."""
    lookahead, seq = drafter(window=3, ngram=3, from_text=False), Sequence([9])
    window_of(lookahead, seq, [[1, 2, 3], [4, 5, 6]])
    told(lookahead, seq, Draft.empty(1), [], 50, {})
    assert [level[:2] for level in lookahead._state(seq).levels] == [[2, 3], [5, 6]]
    window_of(lookahead, seq, [[1, 2, 3], [4, 5, 6]])
    told(lookahead, seq, Draft.chains([[7, 8]]), [0], 50, {})
    assert [level[:1] for level in lookahead._state(seq).levels] == [[3], [6]]


def test_no_cell_lies_deeper_than_the_budget() -> None:
    lookahead, seq = drafter(window=4, ngram=4, from_text=False), Sequence([1])
    for depth in range(1, 12):
        window_of(lookahead, seq, [[1] * 4, [2] * 4, [3] * 4])
        draft = lookahead.propose([seq], [Budget(depth)])
        draft.check([depth], 100, MAX_NODES)
        assert len(draft) == 3 * max(0, min(4, depth - 2))


def test_n_grams_with_a_common_prefix_share_a_branch_and_the_latest_comes_first() -> None:
    lookahead, seq = drafter(window=1, ngram=4, guesses=3, from_text=False), Sequence([5])
    lookahead.propose([seq], [Budget(1)])
    pool = lookahead._states[seq.id].pool
    for gram in ([5, 8, 8, 8], [5, 1, 2, 3], [5, 1, 2, 4], [5, 6, 6, 6]):
        pool.add(gram)
    draft = lookahead.propose([seq], [Budget(3)])
    acceptable = list(draft.acceptable or [True] * len(draft))
    assert [t for t, v in zip(draft.ids, acceptable, strict=True) if v] == [6, 6, 6, 1, 2, 4, 3]
    assert list(draft.parents)[:7] == [-1, 0, 1, -1, 3, 4, 4]


def test_the_pool_is_bounded_and_keeps_the_latest() -> None:
    pool = Pool(tokens=3, guesses=2)
    for gram in ([1, 10], [1, 11], [1, 10], [1, 12], [2, 20], [3, 30], [1, 13], [4, 40]):
        pool.add(gram)
    assert pool.tails(1) == [(13,), (12,)]
    assert pool.tails(2) == []
    assert pool.tails(4) == [(40,)]
    assert sum(map(len, pool._tails.values())) == 4


def test_the_text_itself_fills_the_pool() -> None:
    seq = Sequence([1, 2, 3, 4, 1])
    draft = drafter(window=1, ngram=3).propose([seq], [Budget(2)])
    assert draft.ids[:2] == [2, 3]
    assert len(draft.ids) == 3, "and one cell"
    assert drafter(window=1, ngram=3, from_text=False).propose([seq], [Budget(2)]).ids[1:] == []


def test_jacobi_n_grams_alone_are_right_if_the_target_depends_on_one_token() -> None:
    """The window finds the target's n-grams before they occur in the text: no n-gram of the text is given."""
    target = ToyTarget(12, order=1, seed=4)
    options = {"from_text": False, "row_cost": 0.0, "window": 6}
    llm = LLM(target, "lookahead", draft_tokens=10, draft_options=options)
    done = llm.generate([1, 2, 3], SamplingParams(max_tokens=200, seed=1))[0]
    assert done.token_ids == Oracle(ToyTarget(12, order=1, seed=4)).greedy([1, 2, 3], 200)
    assert done.stats.mean_acceptance_length > 2


def test_cells_of_the_window_are_not_counted_as_draft_tokens() -> None:
    target = ToyTarget(64, order=1, seed=1, sharpness=0.1)
    options = {"from_text": False, "row_cost": 0.0}
    llm = LLM(target, "lookahead", draft_tokens=8, draft_options=options)
    stats = llm.generate([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=40, seed=1))[0].stats
    assert stats.proposed / stats.steps < 4


def test_it_pauses_ever_longer_if_it_is_too_slow() -> None:
    back_off, pauses, paused = BackOff(0.05), [], 0
    for _ in range(600):
        if back_off.is_pausing():
            paused += 1
        else:
            if paused:
                pauses.append(paused)
            paused = 0
            back_off.learn(20, 0)
    assert pauses[:3] == [PAUSE, 2 * PAUSE, 4 * PAUSE]
    back_off = BackOff(0.05)
    for n in range(200):
        assert not back_off.is_pausing()
        assert back_off.saves_time == (n >= TRIAL)
        back_off.learn(20, 2)
    assert not any(BackOff(0.0).is_pausing() for _ in range(10))


def test_rule_block_refuses_it() -> None:
    llm = LLM(ToyTarget(), "lookahead", draft_tokens=8, rule="block")
    with pytest.raises(RuleError, match="tree"):
        llm.generate([1, 2, 3, 1, 2], SamplingParams(temperature=1.0, max_tokens=40, seed=1))
