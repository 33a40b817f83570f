"""What the drafters of heads with a KV cache have in common: the rows that they keep of each text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.backends.native.native_heads import NativeDFlash
from slipstream.core.drafter import Budget
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.drafters.registry import DRAFTERS, Needs, make_drafter
from slipstream.errors import PairError
from slipstream.heads import eagle_rows
from slipstream.heads.dflash_format import save_dflash
from slipstream.heads.eagle_format import save_eagle
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_rows import Rows
from tests.core.worlds import Shape
from tests.drafters.conformance import Recorder
from tests.drafters.head_targets import PROMPTS, V, features, fitting_head, prefilled, tiny_decoder, toy
from tests.heads.tiny_heads import dflash_drafter, eagle_drafter
from tests.oracle import Oracle

Make = Callable[..., Any]
KINDS: dict[str, Make] = {
    "chain": lambda **changes: eagle_drafter(V, 3, changes),
    "tree": lambda **changes: eagle_drafter(V, 3, changes, shape="tree", width=3, nodes=9),
    "dflash": lambda **changes: dflash_drafter(V, changes=changes),
    "dflash, native": lambda **changes: dflash_drafter(V, changes=changes, runs=NativeDFlash),
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_equals_a_recomputation_from_true_features_for_any_accepted_path(kind: str) -> None:
    """Accepted siblings that are not the first included."""
    target, other, drafter, strayed = toy(), toy(), KINDS[kind](), 0
    seqs = [Sequence(p, SamplingParams(max_tokens=40, temperature=1.0, seed=i)) for i, p in enumerate(PROMPTS)]
    for index in range(9):
        _, verdict = step(seqs, target, drafter, RULES["rejection"], 3 if index else 0)
        strayed += sum(path != list(range(len(path))) for path in verdict.path)
        for seq in seqs:
            rows, true = drafter.rows[seq.id], features(other, seq.tokens, drafter.traits.taps)[:-1]
            assert torch.equal(torch.cat(rows.todo), true[rows.done :])
            if rows.done:
                fresh = KINDS[kind]()
                fresh.rows[seq.id] = Rows(0)
                fresh.rows[seq.id].add(true[: rows.done])
                fresh.runtime.extend(*fresh.collect_pending([seq]))
                torch.testing.assert_close(drafter.runtime.kv(seq.id, rows.done), fresh.runtime.kv(seq.id, rows.done))
    assert (strayed > 0) == (kind == "tree")


def test_a_text_first_seen_in_its_middle_gets_drafts_from_what_is_known(make: Make) -> None:
    target, drafter = toy(), make()
    (seq,) = prefilled(drafter, PROMPTS[:1], target)
    step([seq], target, drafter, RULES["rejection"], 3)
    drafter.release(seq.id)
    assert len(drafter.propose([seq], [Budget(3)])) == 0
    step([seq], target, drafter, RULES["rejection"], 3)
    assert drafter.rows[seq.id].begin > 0
    assert max(drafter.propose([seq], [Budget(3)]).depths) == 3


def test_a_long_prompt_in_pieces_gives_the_same_draft_tokens(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_draft() -> tuple[list[int], int]:
        drafter = make()
        (seq,) = prefilled(drafter, [[i * i % V for i in range(23)]], max_tokens=9)
        return drafter.propose([seq], [Budget(5)]).ids, drafter.rows[seq.id].done

    whole = first_draft()
    monkeypatch.setattr(eagle_rows, "CHUNK", 4)
    assert first_draft() == whole


def test_nothing_is_kept_for_a_request_without_speculation(make: Make) -> None:
    target, drafter = toy(), make()
    seqs = prefilled(drafter, PROMPTS[:1], target, draft_tokens=0)
    for _ in range(2):
        step(seqs, target, drafter, RULES["rejection"], 3)
    assert drafter.rows == {}


def test_drafting_ends_at_the_heads_context_length_and_logs_it_once(make, caplog):
    target, recorder = toy(), Recorder(make(decoder={"context": 12}), V)
    seq = Sequence(PROMPTS[2], SamplingParams(max_tokens=20))
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


FITTING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle": ("eagle", {}, {}), "eagle, tree": ("eagle", {}, {"shape": "tree", "width": 3, "nodes": 8}),
    "eagle3": ("eagle3", {}, {}), "eagle3, tree": ("eagle3", {}, {"shape": "tree", "width": 3, "nodes": 8}),
    "dflash": ("dflash", {}, {}), "dflash, causal": ("dflash", {"causal": True}, {}),
    "dspark": ("dflash", {"from_anchor": True, "markov_rank": 3}, {}),
}  # fmt: skip
"""Drafter, changes to its head, and options."""


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("kind", FITTING)
def test_a_head_in_a_folder_drafts_for_a_target_of_each_backend(tmp_path: Path, executor: str, kind: str) -> None:
    name, changes, options = FITTING[kind]
    (save_dflash if name == "dflash" else save_eagle)(fitting_head(name, **changes), tmp_path, torch.float64)
    target = tiny_decoder(executor, "float64" if executor == "torch" else "float32")
    prompts = [[1, 2, 3, 4], [7, 8], list(range(20))]
    for sampled in ({}, {"temperature": 1.0, "seed": 1}):
        params = SamplingParams(max_tokens=16, **sampled)
        llm = LLM(target, draft=tmp_path, draft_tokens=4, draft_options=options)
        assert (llm.drafter.name, llm.drafter.runtime.name) == (name, executor)
        assert llm.drafter.traits.taps == ((-1,) if name == "eagle" else (1, 2, 4))
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        assert all(c.stats.drafter_faults == 0 and c.stats.proposed > 0 for c in together)
        in_memory = make_drafter(name, target, head=fitting_head(name, **changes), **options)
        for done, same in zip(together, LLM(target, in_memory, draft_tokens=4).generate(prompts, params), strict=True):
            assert done.stats.accepted_at == same.stats.accepted_at
        if not sampled:
            assert [c.token_ids for c in together] == [c.token_ids for c in LLM(target).generate(prompts, params)]


@pytest.mark.parametrize(
    ("name", "changes", "values"),
    [
        *((name, {"target_hidden": 32}, ("32", "24")) for name in ("eagle3", "dflash")),
        *((name, {"decoder": {"vocab_size": 50}}, ("50", "40")) for name in ("eagle3", "dflash")),
        *((name, {"decoder": {"hidden_size": 16}}, ("width 16", "24")) for name in ("eagle3", "dflash")),
        ("eagle3", {"taps": (1, 2, 9)}, ("[9]", "0..4")),
        ("dflash", {"taps": (1, 2, 9)}, ("[8]", "0..3")),
        ("dflash", {"mask_token": 40}, ("mask_token_id 40", "40 embeddings")),
        ("dflash", {"target_layers": 6}, ("6 layers", "4 layers")),
    ],
)
def test_a_head_for_another_target_is_refused_with_both_values(name, changes, values):
    given = fitting_head(name, **changes)
    with pytest.raises(PairError) as refused:
        make_drafter(name, tiny_decoder(), head=EagleHead(given.config) if name == "eagle3" else given)
    assert all(value in str(refused.value) for value in values)
