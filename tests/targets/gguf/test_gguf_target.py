"""GGUF models against transformers: logits, trees, rollbacks, and what llama.cpp has too little of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slipstream.core.decode_steps import ARGMAX, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.errors import TargetError
from slipstream.targets.describe import as_target
from slipstream.targets.gguf import draft_rows
from slipstream.targets.gguf.gguf_target import GgufTarget
from slipstream.targets.gguf.kept_texts import MOST_TEXTS
from slipstream.targets.gguf.llama_context import FEW_IDS, IDS
from tests.targets.conformance import CHAIN, TREE, Case, Conformance
from tests.targets.gguf.conftest import FAMILIES
from tests.targets.reference import Reference

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

CLOSE = 1e-3
"""Of the largest logit. llama.cpp adds in another order; GPT-2's activation it looks up in a table of 16 bits."""

Get = Callable[[str], GgufTarget]
Ref = Callable[[str, torch.dtype], Reference]


@pytest.fixture(params=("llama", "gpt2"))
def case(request: pytest.FixtureRequest, gguf_target: Get, reference: Ref) -> Iterator[Case]:
    made = Case(gguf_target(request.param), reference(request.param, torch.float32), CLOSE)
    yield made
    made.close()


class TestGguf(Conformance):
    def test_it_is_a_target(self, case: Case) -> None:
        assert isinstance(case.target, Target)


@pytest.fixture
def llama(gguf_target: Get, reference: Ref) -> Iterator[Case]:
    made = Case(gguf_target("llama"), reference("llama", torch.float32), CLOSE)
    yield made
    made.close()


def spare(case: Case, count: int) -> list[int]:
    """Leave so many free ids beside those in use; returns the others."""
    assert isinstance(case.target, GgufTarget)
    taken = case.target.ids.free[: len(case.target.ids.free) - count]
    del case.target.ids.free[: len(taken)]
    return taken


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_checkpoint(family: str, gguf_target: Get, reference: Ref) -> None:
    case = Case(gguf_target(family), reference(family, torch.float32), CLOSE)
    seq = case.sequence(90)  # longer than the scaled positions of llama3.1
    case.run([seq], case.forest([CHAIN]))
    case.close()


def test_a_tree_equals_its_chains(llama: Case) -> None:
    """Bit for bit where a row is computed among as many others; else to rounding."""
    target, seq = llama.target, llama.prefilled(9)
    tree = llama.forest([TREE])
    whole = target.run([seq], tree).logits.clone()
    for leaf in (3, 5, 6):
        path = tree.ancestors(0, leaf)
        chain = target.run([seq], Draft.chains([[tree.ids[i] for i in path]])).logits
        llama.same(whole[[0, *(1 + i for i in path)]], chain)


@pytest.mark.parametrize("ids", [0, 1, 2, 5])
def test_with_too_few_ids_a_tree_is_run_in_parts(llama: Case, ids: int) -> None:
    """With none free, in chains. What is accepted afterwards may be a branch that is not held any more."""
    seqs = [llama.prefilled(7), llama.prefilled(5), llama.sequence(3)]
    taken = spare(llama, ids + 1)  # one for the sequence that is new
    try:
        for paths in ([[1, 4, 5], [0, 3], []], [[0], [1, 4], [1]], [[0, 2, 6], [], [0, 2]], [[], [1, 4, 5], [1]]):
            draft = llama.forest([TREE, TREE, [-1, -1, 0]])
            llama.run(seqs, draft)
            llama.keep(seqs, draft, paths)
        llama.run(seqs, llama.forest([CHAIN, [], [-1]]))
    finally:
        llama.target.ids.free[:0] = taken  # type: ignore[attr-defined]


def test_a_prompt_that_is_longer_than_a_pass(gguf_target: Get, reference: Ref, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rows, "ROWS", 16)
    case = Case(gguf_target("llama"), reference("llama", torch.float32), CLOSE)
    long, short, other = case.sequence(45), case.sequence(4), case.sequence(17)
    draft = case.forest([TREE, CHAIN, []])
    case.run([long, short, other], draft)
    case.keep([long, short, other], draft, [[1, 4], [0], []])
    case.run([other, long, short], case.forest([[], CHAIN, TREE]))
    case.close()


def test_all_ids_are_free_again_after_every_sequence_was_released(llama: Case) -> None:
    assert isinstance(llama.target, GgufTarget)
    before = sorted(llama.target.ids.free)
    for paths in ([[1, 4], [0]], [[], []]):
        seqs = [llama.prefilled(5), llama.sequence(6)]
        draft = llama.forest([TREE, TREE])
        llama.run(seqs, draft)
        llama.keep(seqs, draft, paths)
        llama.run(seqs, draft)  # and leaves without a commit
        for seq in seqs:
            llama.target.release(seq.id)
    assert sorted(llama.target.ids.free) == before == list(range(IDS))
    assert llama.target.capabilities.memory is not None
    assert llama.target.capabilities.memory.usage.used == 0


def test_more_sequences_than_ids_are_refused(llama: Case) -> None:
    taken = spare(llama, 2)
    try:
        seqs = [llama.sequence(3), llama.sequence(3)]
        llama.run(seqs, Draft.empty(2))
        with pytest.raises(TargetError, match=r"2 sequences .* 256 sequence ids"):
            llama.target.run([llama.sequence(3)], Draft.empty(1))
        llama.run(seqs, Draft.empty(2))
    finally:
        llama.target.ids.free[:0] = taken  # type: ignore[attr-defined]


def test_a_full_cache_is_an_error_and_others_go_on(llama: Case) -> None:
    other, big = llama.prefilled(6), [llama.sequence(400) for _ in range(3)]
    memory = llama.target.capabilities.memory
    assert memory is not None
    writes = [(seq.id, 0, 400) for seq in big]
    assert memory.capacity == 1024 // memory.block == 32
    assert memory.missing(writes) == 1 + 3 * 13 - 32  # in blocks
    assert memory.missing(writes[:2]) == 0
    with pytest.raises(TargetError, match="no room"):
        llama.target.run(big, Draft.empty(3))
    assert memory.usage.used == 1
    llama.run([other], llama.forest([TREE]))
    assert memory.missing([(other.id, 6, 9)]) == 0


def test_an_id_outside_the_vocabulary_is_refused(llama: Case) -> None:
    seq = llama.prefilled(4)
    with pytest.raises(TargetError, match=r"token id 96 is outside .* 96"):
        llama.target.run([seq], Draft.chains([[5, 96]]))
    with pytest.raises(TargetError, match="token id -1"):
        llama.target.run([Sequence([3, -1])], Draft.empty(1))
    llama.run([seq], llama.forest([CHAIN]))


def test_hidden_states_are_refused(llama: Case) -> None:
    assert llama.target.capabilities.head_host is None
    with pytest.raises(TargetError, match="hidden states"):
        llama.target.run([llama.sequence(3)], Draft.empty(1), (-1,))


def test_a_pass_that_was_interrupted_is_made_good(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What llama.cpp holds is then unknown: it is read again."""
    assert isinstance(llama.target, GgufTarget)
    seqs, context = [llama.prefilled(8), llama.prefilled(5)], llama.target.ids.context
    decode = context.decode

    def interrupted(rows: object) -> None:
        decode(rows)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llama.target.run(seqs, llama.forest([TREE, CHAIN]))
    monkeypatch.undo()
    llama.run(seqs, llama.forest([CHAIN, TREE]))


@pytest.mark.parametrize("kind", ["maximum", "uniforms", "noise"])
def test_several_steps_in_one_call_are_single_steps(llama: Case, kind: str) -> None:
    assert isinstance(llama.target, GgufTarget)
    steps, seqs = 5, [llama.prefilled(6), llama.sequence(20), llama.prefilled(3)]
    generator = torch.Generator().manual_seed(3)
    inverse = torch.tensor([1.0, 0.7, 2.0], dtype=torch.float64)
    sampling = {
        "maximum": ARGMAX,
        "uniforms": StepSampling(
            inverse, uniforms=torch.rand(steps, 3, generator=generator, dtype=torch.float64), vocab=90
        ),
        "noise": StepSampling(inverse, noise=torch.randn(steps, 3, 96, generator=generator, dtype=torch.float64)),
    }[kind]
    made = llama.target.decode_steps(seqs, steps, sampling)
    tokens, logits = made.tokens.clone(), made.logits.clone()
    assert (made.probs is not None) == (kind == "uniforms")
    for b, seq in enumerate(seqs):
        truth = llama.oracle(seq.tokens + tokens[:-1, b].tolist())[-steps:]  # [K, V]
        llama.same(logits[:, b], truth)
        seq.kv_len = len(seq.tokens) + 2  # two were kept
        seq.tokens += [*tokens[:2, b].tolist(), 7]
    for j in range(steps):
        picked = sampling.pick(logits[j].double(), j)
        assert tokens[j].tolist() == picked.tolist()
    llama.run(seqs, llama.forest([CHAIN, [], TREE]))


def test_a_context_gets_more_ids_when_they_are_needed(gguf_file: Callable[..., Path], reference: Ref) -> None:
    """By a tree with many branches, by many sequences, and by a fork; what was read before is read again."""
    for reason in ("tree", "sequences", "fork"):
        target = as_target(gguf_file("llama"), executor="llamacpp", threads=1)
        case = Case(target, reference("llama", torch.float32), CLOSE)
        seqs = [case.prefilled(7), case.prefilled(4)]
        assert target.ids.context.ids == FEW_IDS
        wide = case.forest([[-1] * FEW_IDS, CHAIN])
        if reason == "sequences":
            seqs += [case.sequence(2) for _ in range(FEW_IDS)]
            wide = case.forest([TREE, CHAIN] + [[]] * FEW_IDS)
        if reason == "fork":
            others = [case.sequence(1) for _ in range(FEW_IDS - 2)]
            case.run(others, Draft.empty(len(others)))
            child = Sequence([*seqs[0].tokens[:5], 9])
            target.ids.fork(seqs[0].id, child.id, 5)
            child.kv_len = 5
            seqs[0] = child
        case.run(seqs, wide)
        case.keep(seqs, wide, [[0], [0, 1], *[[]] * (len(seqs) - 2)])
        case.run(seqs, case.forest([TREE, CHAIN] + [[]] * (len(seqs) - 2)))
        assert target.ids.context.ids == IDS
        assert len(target.ids) + len(target.ids.free) <= IDS


def test_steps_in_one_call_may_need_more_ids(gguf_file: Callable[..., Path], reference: Ref) -> None:
    target = as_target(gguf_file("llama"), executor="llamacpp", threads=1)
    case = Case(target, reference("llama", torch.float32), CLOSE)
    seqs = [case.sequence(3) for _ in range(FEW_IDS + 1)]
    made = target.decode_steps(seqs, 3)
    for b in (0, FEW_IDS):
        case.same(made.logits[:, b], case.oracle(seqs[b].tokens + made.tokens[:-1, b].tolist())[-3:])


# --- texts that are kept for later ones -----------------------------------------------------------------------------


def test_a_text_that_begins_like_an_earlier_one_reads_only_the_rest(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole blocks; the earlier sequence may still run, may have been rolled back, or be gone."""
    assert isinstance(llama.target, GgufTarget)
    target, memory = llama.target, llama.target.capabilities.memory
    assert memory is not None
    first = llama.prefilled(70)
    draft = llama.forest([CHAIN])
    llama.run([first], draft)
    llama.keep([first], draft, [[0]])
    text = first.tokens[: first.kv_len]
    memory.keep(first.id, text)
    rows = list[int]()
    decode = target.ids.context.decode
    monkeypatch.setattr(target.ids.context, "decode", lambda run: (rows.append(len(run)), decode(run))[1])
    for gone in (False, True):
        if gone:
            target.release(first.id)
        for tokens, most, shared in (
            ([*text[:65], 9, 8, 7], 67, 64),
            ([*text[:40], 9], 40, 32),
            (text, 50, 32),
            ([*text[:31], 9, 9], 32, 0),
            ([7, *text], 60, 0),
        ):
            seq = Sequence(tokens)
            assert memory.match(tokens) >= shared
            seq.kv_len = memory.begin(seq.id, tokens, most)
            assert seq.kv_len == shared
            rows.clear()
            llama.run([seq], llama.forest([TREE]))
            assert sum(rows) == len(tokens) - shared + len(TREE)
            target.release(seq.id)
    assert memory.usage.used == 0
    assert memory.usage.kept > 0
    target.ids.kept.drop_oldest()
    assert memory.usage.kept == 0
    assert memory.match(text) == 0


def test_a_longer_text_takes_the_place_of_its_beginning_and_old_ones_go(llama: Case) -> None:
    assert isinstance(llama.target, GgufTarget)
    memory, free = llama.target.capabilities.memory, len(llama.target.ids.free)
    assert memory is not None
    seq = llama.prefilled(40)
    memory.keep(seq.id, seq.tokens[:40])
    llama.run([seq], Draft.empty(1))
    memory.keep(seq.id, seq.tokens[:41])
    memory.keep(seq.id, seq.tokens[:35])  # is there already
    memory.keep(seq.id, seq.tokens[:20])  # less than a block
    memory.keep(seq.id + 10_000, [1] * 40)  # no such sequence
    assert len(llama.target.ids.free) == free - 2
    llama.target.release(seq.id)
    for i in range(MOST_TEXTS + 3):
        other = Sequence([i, *[j % 90 for j in range(33)]])
        llama.target.run([other], Draft.empty(1))
        llama.target.commit([other], [[]])
        memory.keep(other.id, other.tokens[:33])
        llama.target.release(other.id)
    assert len(llama.target.ids.free) == free - MOST_TEXTS
    assert memory.match(seq.tokens) == 0
    assert memory.match([4, *[j % 90 for j in range(33)]]) == 32
    while llama.target.ids.kept.drop_oldest():
        pass
    assert len(llama.target.ids.free) == free


def test_kept_texts_give_way_to_requests(gguf_file: Callable[..., Path], reference: Ref) -> None:
    """Where cells run short, where ids do, and when a context gets more ids, which empties it."""
    target = as_target(gguf_file("llama"), executor="llamacpp", threads=1, kv_tokens=512)
    case = Case(target, reference("llama", torch.float32), CLOSE)
    memory = target.capabilities.memory
    assert memory is not None

    def keep(count: int, length: int) -> None:
        for _ in range(count):
            seq = case.prefilled(length)
            memory.keep(seq.id, seq.tokens[: seq.kv_len])
            target.release(seq.id)

    keep(4, 100)
    assert memory.usage.kept == 16
    big = [case.sequence(200), case.sequence(90)]
    assert memory.missing([(seq.id, 0, 240) for seq in big]) == 0
    case.run(big, case.forest([TREE, CHAIN]))
    assert 0 < memory.usage.kept < 16
    made = target.decode_steps([big[0]], 4)
    case.same(made.logits[:, 0], case.oracle(big[0].tokens + made.tokens[:-1, 0].tolist())[-4:])
    for seq in big:
        target.release(seq.id)
    keep(3, 40)
    before = memory.usage.kept
    taken = target.ids.free[1:]
    del target.ids.free[1:]  # two more are kept texts
    case.run([case.sequence(4) for _ in range(3)], Draft.empty(3))
    assert memory.usage.kept < before
    target.ids.free[:0] = taken
    keep(1, 64)
    target.ids.widen()
    assert memory.usage.kept == 0
    case.run([case.sequence(9)], case.forest([TREE]))
