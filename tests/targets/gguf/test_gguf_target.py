"""GGUF models against transformers: logits, chains, rollbacks, and what llama.cpp has too little of."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.errors import TargetError
from slipstream.targets.describe import as_target
from slipstream.targets.gguf import gguf_target as module
from slipstream.targets.gguf.cell_memory import MOST_TEXTS
from slipstream.targets.gguf.gguf_target import GgufTarget
from slipstream.targets.gguf.llama_context import IDS
from tests.spying import spied
from tests.targets.conformance import CHAIN, TREE, Case, Conformance
from tests.targets.gguf.conftest import FAMILIES
from tests.targets.reference import Reference

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

CLOSE = 1e-3
"""Of the largest logit. llama.cpp adds in another order; GPT-2's activation it looks up in a table of 16 bits."""

Get = Callable[[str], GgufTarget]
Ref = Callable[[str, torch.dtype], Reference]


@pytest.fixture
def case(request: pytest.FixtureRequest, gguf_target: Get, reference: Ref) -> Iterator[Case]:
    """A Llama, or the family that a test names."""
    family = getattr(request, "param", "llama")
    conformance_case = Case(gguf_target(family), reference(family, torch.float32), CLOSE)
    yield conformance_case
    conformance_case.close()


@pytest.mark.parametrize("case", ["llama", "gpt2"], indirect=True)
class TestGguf(Conformance):
    def test_it_is_a_target(self, case: Case) -> None:
        assert isinstance(case.target, Target)


def free(case: Case) -> list[int]:
    """Sequence ids of llama.cpp that hold nothing."""
    return case.target.memory._free


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_logits_are_those_of_the_checkpoint(case: Case) -> None:
    seq = case.sequence(90)  # longer than the scaled positions of llama3.1
    case.run([seq], case.forest([CHAIN]))


def test_a_prompt_that_is_longer_than_a_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 16)
    long, short, other = case.sequence(45), case.sequence(4), case.sequence(17)
    draft = case.forest([TREE, CHAIN, []])
    case.run([long, short, other], draft)
    case.keep([long, short, other], draft, [[1, 4], [0], []])
    case.run([other, long, short], case.forest([[], CHAIN, TREE]))


def test_all_ids_are_free_again_after_every_sequence_was_released(case: Case) -> None:
    before = sorted(free(case))
    for paths in ([[1, 4], [0]], [[], []]):
        seqs = [case.prefilled(5), case.sequence(6)]
        draft = case.forest([TREE, TREE])
        case.run(seqs, draft)
        case.keep(seqs, draft, paths)
        case.run(seqs, draft)  # and leaves without a commit
        for seq in seqs:
            case.target.release(seq.id)
    assert sorted(free(case)) == before == list(range(IDS))
    assert case.target.capabilities.memory.usage.used == 0


def test_more_sequences_than_ids_are_refused(case: Case) -> None:
    taken = free(case)[2:]
    del free(case)[2:]
    try:
        seqs = [case.sequence(3), case.sequence(3)]
        case.run(seqs, Draft.empty(2))
        with pytest.raises(TargetError, match=r"2 sequences .* 256 sequence ids"):
            case.target.run([case.sequence(3)], Draft.empty(1))
        case.run(seqs, Draft.empty(2))
    finally:
        free(case).extend(taken)


def test_a_full_cache_is_an_error_and_others_go_on(case: Case) -> None:
    other, big = case.prefilled(6), [case.sequence(400) for _ in range(3)]
    memory = case.target.capabilities.memory
    writes = [(seq.id, 0, 400) for seq in big]
    assert memory.capacity == 1024 // memory.block == 32
    assert memory.missing(writes) == 1 + 3 * 13 - 32  # in blocks
    assert memory.missing(writes[:2]) == 0
    with pytest.raises(TargetError, match="no room"):
        case.target.run(big, Draft.empty(3))
    assert memory.usage.used == 1
    case.run([other], case.forest([TREE]))
    assert memory.missing([(other.id, 6, 9)]) == 0


def test_siblings_ids_outside_the_vocabulary_and_hidden_states_are_refused(case: Case) -> None:
    assert not case.target.capabilities.trees
    with pytest.raises(TargetError, match="a draft with siblings was given to a model that runs chains only"):
        case.target.run([case.prefilled(4)], Draft.trees([([5, 6], [-1, -1])]))
    seq = case.prefilled(4)
    with pytest.raises(TargetError, match=r"token id 96 is outside .* 96"):
        case.target.run([seq], Draft.chains([[5, 96]]))
    with pytest.raises(TargetError, match="token id -1"):
        case.target.run([Sequence([3, -1])], Draft.empty(1))
    case.run([seq], case.forest([CHAIN]))
    assert case.target.capabilities.head_host is None
    with pytest.raises(TargetError, match="hidden states"):
        case.target.run([case.sequence(3)], Draft.empty(1), (-1,))


def test_a_pass_that_was_interrupted_is_made_good(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What llama.cpp holds is then unknown: it is read again."""
    seqs, context = [case.prefilled(8), case.prefilled(5)], case.target.memory.context
    decode = context.decode

    def interrupted(rows: object) -> None:
        decode(rows)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.target.run(seqs, case.forest([TREE, CHAIN]))
    monkeypatch.undo()
    case.run(seqs, case.forest([CHAIN, TREE]))


def test_a_text_that_begins_like_an_earlier_one_reads_only_the_rest(case, monkeypatch):
    """In whole blocks; the earlier sequence may still run, may have been rolled back, or be gone."""
    target, memory = case.target, case.target.capabilities.memory
    first = case.prefilled(70)
    draft = case.forest([CHAIN])
    case.run([first], draft)
    case.keep([first], draft, [[0]])
    text = first.tokens[: first.kv_len]
    memory.keep(first.id, text)
    rows = spied(monkeypatch, target.memory.context, "decode", len)
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
            case.run([seq], case.forest([TREE]))
            assert sum(rows) == len(tokens) - shared + len(TREE)
            target.release(seq.id)
    assert memory.usage.used == 0
    assert memory.usage.kept > 0
    target.memory._drop(*target.memory._kept)
    assert memory.usage.kept == 0
    assert memory.match(text) == 0


def test_a_longer_text_takes_the_place_of_its_beginning_and_old_ones_go(case: Case) -> None:
    memory, before = case.target.capabilities.memory, len(free(case))
    seq = case.prefilled(40)
    memory.keep(seq.id, seq.tokens[:40])
    case.run([seq], Draft.empty(1))
    memory.keep(seq.id, seq.tokens[:41])
    memory.keep(seq.id, seq.tokens[:35])  # is there already
    memory.keep(seq.id, seq.tokens[:20])  # less than a block
    memory.keep(seq.id + 10_000, [1] * 40)  # no such sequence
    assert len(free(case)) == before - 2
    case.target.release(seq.id)
    for i in range(MOST_TEXTS + 3):
        other = Sequence([i, *[j % 90 for j in range(33)]])
        case.target.run([other], Draft.empty(1))
        case.target.commit([other], [[]])
        memory.keep(other.id, other.tokens[:33])
        case.target.release(other.id)
    assert len(free(case)) == before - MOST_TEXTS
    assert memory.match(seq.tokens) == 0
    assert memory.match([4, *[j % 90 for j in range(33)]]) == 32
    for kept in list(memory._kept):
        memory._drop(kept)
    assert len(free(case)) == before


def test_kept_texts_give_way_to_requests(gguf_file: Callable[..., Path], reference: Ref) -> None:
    """Where cells run short, and where ids do."""
    target = as_target(gguf_file("llama"), executor="llamacpp", threads=1, kv_tokens=512)
    case = Case(target, reference("llama", torch.float32), CLOSE)
    memory = target.capabilities.memory

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
    for seq in big:
        target.release(seq.id)
    keep(3, 40)
    before = memory.usage.kept
    del free(case)[1:]  # two more are kept texts
    case.run([case.sequence(4) for _ in range(3)], Draft.empty(3))
    assert memory.usage.kept < before
