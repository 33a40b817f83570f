"""What the drafters of heads with a KV cache have in common: the rows that they keep of each text."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.drafters.registry import DRAFTERS, Needs, make_drafter
from slipstream.errors import PairError
from slipstream.heads import eagle_rows
from slipstream.heads.eagle_rows import Rows
from tests.core.worlds import Shape
from tests.drafters.conformance import Recorder
from tests.drafters.head_targets import PROMPTS, V, features, prefilled, toy
from tests.heads.tiny_heads import dflash_drafter, eagle_drafter
from tests.oracle import Oracle

Make = Callable[..., Any]
KINDS: dict[str, Make] = {
    "chain": lambda **changes: eagle_drafter(V, 3, changes),
    "tree": lambda **changes: eagle_drafter(V, 3, changes, shape="tree", width=3, nodes=9),
    "dflash": lambda **changes: dflash_drafter(V, changes=changes),
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_equals_a_recomputation_from_true_features_for_any_accepted_path(kind: str) -> None:
    """R23, with accepted siblings that are not the first."""
    target, other, drafter, strayed = toy(), toy(), KINDS[kind](), 0
    seqs = [Sequence(p, SamplingParams(max_tokens=40, temperature=1.0, seed=i)) for i, p in enumerate(PROMPTS)]
    for index in range(9):
        verdict = step(seqs, target, drafter, RULES["rejection"], 3 if index else 0)
        strayed += sum(path != list(range(len(path))) for path in verdict.path)
        for seq in seqs:
            rows, true = drafter.rows[seq.id], features(other, seq.tokens, drafter.traits.taps)[:-1]
            assert torch.equal(torch.cat(rows.todo), true[rows.done :])
            if rows.done:
                fresh = KINDS[kind]()
                fresh.rows[seq.id] = Rows(0)
                fresh.rows[seq.id].add(true[: rows.done])
                fresh.runtime.extend(*fresh.pending([seq]))
                torch.testing.assert_close(drafter.runtime.kv(seq.id, rows.done), fresh.runtime.kv(seq.id, rows.done))
    assert (strayed > 0) == (kind == "tree")


def test_a_text_first_seen_in_its_middle_gets_drafts_from_what_is_known(make: Make) -> None:
    target, drafter = toy(), make()
    (seq,) = prefilled(drafter, PROMPTS[:1], target)
    step([seq], target, drafter, RULES["rejection"], 3)
    drafter.release(seq.id)
    assert len(drafter.propose([seq], [3])) == 0
    step([seq], target, drafter, RULES["rejection"], 3)
    assert drafter.rows[seq.id].begin > 0
    assert max(drafter.propose([seq], [3]).depths) == 3


def test_a_long_prompt_in_pieces_gives_the_same_draft_tokens(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_draft() -> tuple[list[int], int]:
        drafter = make()
        (seq,) = prefilled(drafter, [[i * i % V for i in range(23)]], max_tokens=9)
        return drafter.propose([seq], [5]).ids, drafter.rows[seq.id].done

    whole = first_draft()
    monkeypatch.setattr(eagle_rows, "CHUNK", 4)
    assert first_draft() == whole


def test_nothing_is_kept_for_a_request_without_speculation(make: Make) -> None:
    target, drafter = toy(), make()
    seqs = prefilled(drafter, PROMPTS[:1], target, draft_tokens=0)
    for _ in range(2):
        step(seqs, target, drafter, RULES["rejection"], 3)
    assert drafter.rows == {}


def test_drafting_ends_at_the_heads_context_length_and_logs_it_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    target, recorder = toy(), Recorder(make(decoder={"context": 12}), V)
    seq = Sequence(PROMPTS[2], SamplingParams(max_tokens=20))
    with caplog.at_level(logging.WARNING):
        while not seq.finish:
            before = len(seq.tokens)
            step([seq], target, recorder, RULES["rejection"], 3)
            assert before + Shape(tuple(recorder.proposed[seq.id][-1].parents), "").height <= max(12, before)
    assert seq.output == Oracle(toy()).greedy(PROMPTS[2], 20)
    assert sum("context of 12 tokens" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("name", [name for name, spec in DRAFTERS.items() if spec.needs is Needs.DRAFT_HEAD])
def test_a_target_without_hidden_states_is_refused_by_name(name: str) -> None:
    with pytest.raises(PairError, match="ToyTarget"):
        make_drafter(name, toy())
