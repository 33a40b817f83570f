"""Rows that drafting has computed through the first layers: verification resumes from them and gets the result of a
full pass, whether or not the draft is used."""

import weakref
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import TargetError
from slipstream.targets.decoder import Decoder
from slipstream.targets.early_exit import EarlyExits
from tests.spying import spied
from tests.targets.conformance import Case

EXIT = 2


pytestmark = pytest.mark.parametrize("case", ["llama", "gpt2", "qwen2-window"], indirect=True)


def passes_of(target: Decoder, patch: pytest.MonkeyPatch) -> list[tuple[tuple[int, int] | None, int]]:
    """The layers and the number of rows of every pass from now on."""
    return spied(
        patch, target.executor, "forward", lambda batch, taps=(), layers=None, hidden=None: (layers, len(batch.tokens))
    )


def taken(passes: list[Any]) -> list[Any]:
    """What was noted since the last call."""
    noted, passes[:] = list(passes), []
    return noted


def step_by_step(target: Decoder, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> None:
    """Compute with the early exit what drafting these chains would compute: all but the last draft token of each."""
    for n in range(max(map(len, chains))):
        rows = [b for b, chain in enumerate(chains) if len(chain) > n]
        target.exits.run_first_layers([seqs[b] for b in rows], [chains[b][:n] for b in rows], EXIT)


def test_the_exit_is_the_first_layers_with_norm_and_head(case: Case) -> None:
    target = case.target
    seq = case.prefilled(6)
    seq.tokens += case.ids(2)
    early = target.exits.run_first_layers([seq], [[5, 7]], EXIT).clone()
    whole = target.exits.run_layers([seq], Draft.chains([[5, 7]]), (0, EXIT)).logits[-1:]
    case.same(early, whole)


def test_steps_that_resume_equal_the_oracle_and_leave_the_KV_of_a_prefill(case, monkeypatch):
    """Ragged depths, one sequence without a draft, rollbacks of differing depth, one after another."""
    target = case.target
    seqs = [case.prefilled(5), case.prefilled(9), case.prefilled(3)]
    passes = passes_of(target, monkeypatch)
    layers = target.config.layers
    for depths, kept in (
        ((3, 1, 0), (3, 0, 0)),
        ((2, 4, 0), (0, 4, 0)),
        ((1, 0, 3), (1, 0, 1)),
        ((4, 4, 4), (2, 0, 3)),
    ):
        chains = [case.ids(n) for n in depths]
        step_by_step(target, seqs, chains)
        taken(passes)
        draft = Draft.chains(chains)
        case.run(seqs, draft)
        assert taken(passes) == [((0, EXIT), 3), ((EXIT, layers), sum(depths) + 3)]
        case.keep(seqs, draft, [list(range(n)) for n in kept])
        case.check_kv(seqs)


def test_rows_of_the_first_layers_are_reused_as_far_as_they_are_verified(case, monkeypatch):
    target = case.target
    layers = target.config.layers
    a, b, c = case.ids(3)
    other = (b + 1) % target.vocab_size
    drafts = [
        (Draft.chains([[a, b, c]]), 3, 1),
        (Draft.chains([[a, other, c]]), 2, 2),
        (Draft.chains([[a]]), 2, 0),
        (Draft.empty(1), 1, 0),  # not used: the pending token alone
        (Draft(torch.tensor([a, b, c]), [-1, 0, 0], [0, 3]), 2, 2),  # with another branch, which does not see b
        (Draft(torch.tensor([a, b, c]), [-1, 0, -1], [0, 3]), 1, 3),
    ]
    for draft, known, fresh in drafts:
        seq = case.prefilled(4)
        passes = passes_of(target, monkeypatch)
        step_by_step(target, [seq], [[a, b, c]])
        taken(passes)
        case.run([seq], draft)
        early = [((0, EXIT), fresh)] if fresh else []
        assert passes == [*early, ((EXIT, layers), known + fresh)]
        case.keep([seq], draft, [[0] if len(draft) else []])
        case.check_kv([seq])
        case.run([seq], Draft.empty(1))
        monkeypatch.undo()


def test_rows_of_the_first_layers_are_used_once_and_dropped_with_their_sequence(case, monkeypatch):
    target = case.target
    seq = case.prefilled(4)
    chain = case.ids(3)
    passes = passes_of(target, monkeypatch)
    for forget in (
        lambda: target.run([seq], Draft.chains([[1, 2]])),
        lambda: target.exits.run_layers([seq], Draft.chains([[1, 2]]), (0, 1)),
        lambda: target.release(seq.id),
    ):
        step_by_step(target, [seq], [chain])
        forget()
        if seq.id not in target.exits.rows:
            seq.kv_len = 0  # after a release everything is pending
        taken(passes)
        case.run([seq], Draft.chains([chain]))
        assert [layers for layers, _ in taken(passes)] == [None]
        assert not target.exits.rows
        case.keep([seq], Draft.empty(1), [[]])


def test_drafting_again_without_a_run_reuses_the_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    target = case.target
    seq = case.prefilled(4)
    passes = passes_of(target, monkeypatch)
    first, second = case.ids(3), case.ids(3)
    step_by_step(target, [seq], [first])
    step_by_step(target, [seq], [second])
    assert [rows for _, rows in taken(passes)] == [1] * 6
    draft = Draft.chains([second])
    case.run([seq], draft)
    case.keep([seq], draft, [[0, 1, 2]])
    case.check_kv([seq])


def test_taps_work_before_and_after_the_exit(case: Case) -> None:
    target = case.target
    layers = target.config.layers
    for taps in ((EXIT, layers, -1), (0, 1, EXIT), (-1,)):
        seqs = [case.prefilled(5), case.prefilled(3)]
        chains = [case.ids(3), case.ids(2)]
        draft = Draft.chains(chains)
        want = {tap: h.clone() for tap, h in target.run(seqs, draft, taps).hidden.items()}
        step_by_step(target, seqs, chains)
        out = target.run(seqs, draft, taps)
        assert list(out.splits) == [0, 4, 7]
        for tap in taps:
            case.same(out.hidden[tap], want[tap])


def test_a_long_prompt_in_the_same_batch_is_run_in_pieces(case: Case) -> None:
    case.target = target = Decoder(case.target.executor, chunk=5)
    for _ in range(2):
        seq, prompt, chain = case.prefilled(4), case.sequence(13), case.ids(2)
        step_by_step(target, [seq], [chain])
        draft = Draft.chains([chain, []])
        case.run([seq, prompt], draft)
        case.keep([seq, prompt], draft, [[0], []])
        case.check_kv([seq, prompt])


def test_after_an_unrolled_exit_only_the_later_layers_run(case, executor, monkeypatch):
    target, steps = case.target, case.target.capabilities.multi_step
    assert (steps is not None) == (executor == "native")
    if steps is None:
        pytest.skip("torch drafts step by step")
    layers = target.config.layers
    seqs = [case.prefilled(5), case.prefilled(8)]
    passes = passes_of(target, monkeypatch)
    for kept in ((0, 3), (2, 1), (3, 0)):
        tokens = steps.decode_steps(seqs, 3, exit=EXIT)[0].T.tolist()
        draft = Draft.chains([tokens[0], tokens[1][:2]])  # one is cut
        case.run(seqs, draft)
        assert taken(passes) == [((EXIT, layers), 7)]
        case.keep(seqs, draft, [list(range(kept[0])), list(range(min(2, kept[1])))])
        case.check_kv(seqs)
        taken(passes)
    steps.decode_steps(seqs, 2, exit=EXIT)
    tokens = target.capabilities.multi_step.decode_steps(seqs, 2)[
        0
    ].T.tolist()  # the whole model: the rows of the first layers are dropped
    case.run(seqs, Draft.chains(tokens))
    assert [ran for ran, _ in taken(passes)] == [None]


def test_hidden_states_must_come_with_a_later_slice(case: Case) -> None:
    with pytest.raises(TargetError, match="hidden states"):
        case.target.exits.run_layers([Sequence([1, 2])], Draft.empty(1), (EXIT, 3))


def test_without_an_exit_in_use_no_line_of_it_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("forward", "keep", "drop"):
        monkeypatch.delattr(EarlyExits, name)
    seq = case.prefilled(4)
    case.run([seq], Draft.chains([case.ids(2)]))
    if steps := case.target.capabilities.multi_step:
        steps.decode_steps([seq], 2)
    case.target.release(seq.id)


def test_what_a_target_can_do_is_declared_once_and_does_not_keep_it(case: Case) -> None:
    target = Decoder(case.target.executor)
    assert target.capabilities is target.capabilities
    gone = weakref.ref(target)
    del target
    assert gone() is None
