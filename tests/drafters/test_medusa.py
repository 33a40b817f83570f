"""The Medusa drafter: which row the heads read, which position each head drafts, shapes and distributions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import TargetOut
from slipstream.drafters.medusa import MedusaDraftConfig, MedusaDrafter
from slipstream.drafters.registry import make_drafter
from slipstream.errors import CheckpointError, PairError, ParameterError
from slipstream.heads.medusa_format import save_medusa
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads
from slipstream.llm import LLM
from slipstream.targets.decoder import Decoder
from slipstream.theory.trees import optimal_tree
from tests.drafters.head_targets import prefilled
from tests.heads.tiny_heads import medusa_drafter, tiny_heads
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import Tiny

V, TOY = 7, ToyTarget(7, seed=4)
ACCURACIES = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.2, 0.1))


class Counting(ToyTarget):
    """Generates 0, 1, 2, ... modulo V: its hidden state, the row of logits, is a one-hot of the next token."""

    def _row(self, tokens: tuple[int, ...]) -> int:
        row = super()._row(tokens)
        self._table[row] = 9.0 * np.eye(self.vocab_size)[(tokens[-1] + 1) % self.vocab_size]
        return row


def knowing(heads: int = 3, rank: int = 0) -> MedusaHeads:
    """Heads for `Counting` whose candidate of that rank is right: head k at token t proposes t + 2 + k."""
    medusa = MedusaHeads(MedusaConfig(heads, 1, V, V)).double().requires_grad_(False)
    for k in range(heads):
        for t in range(V):  # the hidden state of token t - 1 is the one-hot of t
            medusa.lm_heads[k, (t + 1 + k) % V, t] = 1.0  # type: ignore[index]
            for better in range(rank):
                medusa.lm_heads[k, (t + 3 + k + better) % V, t] = 2.0 + better  # type: ignore[index]
    return medusa


def counting(heads: MedusaHeads, **options: Any) -> MedusaDrafter:
    return MedusaDrafter(heads, V, MedusaDraftConfig(**options))


@pytest.mark.parametrize("options", [{"tree": "1,1,1"}, {"tree": "2,2,1"}, {"nodes": 9}])
@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 8])
def test_heads_that_know_the_text_are_always_right(options: dict[str, Any], draft_tokens: int) -> None:
    """With a row or a position off by one, no draft token would be accepted."""
    llm = LLM(Counting(V), counting(knowing(), **options), draft_tokens=draft_tokens, max_batch=2)
    for prompt, done in zip(
        [[3], [0, 4, 1]], llm.generate([[3], [0, 4, 1]], SamplingParams(max_tokens=25)), strict=True
    ):
        assert done.token_ids == [(prompt[-1] + 1 + i) % V for i in range(25)]
        deep = min(draft_tokens, 3)
        assert done.stats.steps == 1 + -(-24 // (deep + 1))
        assert done.stats.drafter_faults == 0


@pytest.mark.parametrize("rank", [1, 2])
def test_the_state_is_that_of_the_accepted_node_at_any_place_of_the_tree(rank: int) -> None:
    """The right candidate is a later sibling at every depth, so that the accepted nodes lie apart."""
    llm = LLM(Counting(V), counting(knowing(rank=rank), tree="3,3,3"), draft_tokens=3)
    done = llm.generate([[3]], SamplingParams(max_tokens=25))[0]
    assert done.token_ids == [(4 + i) % V for i in range(25)]
    assert done.stats.steps == 1 + 6


def test_outputs_that_the_target_overwrites_do_no_harm() -> None:
    """Hidden states are valid until the next run: what is kept is a copy."""
    target, drafter = Counting(V), counting(knowing(), tree="1,1,1")
    seq = Sequence([1, 2], SamplingParams(max_tokens=20))

    class Reusing:
        vocab_size, context, device = V, target.context, target.device
        commit, release, capabilities = target.commit, target.release, target.capabilities
        last: TargetOut | None = None

        def run(self, seqs: Any, draft: Draft, taps: Any = ()) -> TargetOut:
            if self.last is not None:
                self.last.hidden[-1].zero_()
            self.last = target.run(seqs, draft, taps)
            return self.last

    again = Reusing()
    while not seq.finish:
        step([seq], again, drafter, RULES["greedy"], 3)
    assert seq.stats.accepted == seq.stats.proposed > 0


def test_a_state_of_another_text_is_not_used() -> None:
    drafter = counting(knowing(), tree="1,1,1")
    (seq,) = prefilled(drafter, [[1, 2]], Counting(V))
    assert len(drafter.propose([seq], [Budget(3)])) == 3
    seq.tokens.append(5)  # a step that the drafter did not see
    assert len(drafter.propose([seq], [Budget(3)])) == 0
    seq.tokens.pop()
    drafter.release(seq.id)
    assert len(drafter.propose([seq], [Budget(3)])) == 0
    assert not drafter._states


def test_the_tree_is_the_optimal_one_for_the_remaining_depth() -> None:
    accuracies = (*ACCURACIES, (0.2, 0.1, 0.1))
    drafter = MedusaDrafter(tiny_heads(V, V, 4, accuracies=accuracies), V, MedusaDraftConfig(nodes=7))
    seqs = prefilled(drafter, [[1], [2, 3], [4], [5], [6]], TOY)
    draft = drafter.propose(seqs, list(map(Budget, (1, 0, 2, 9, 3))))
    draft.check([1, 0, 2, 4, 3], V, 7)
    for b, depth in enumerate([1, 0, 2, 4, 3]):
        tree = optimal_tree(accuracies, 7 if depth else 0, depth)
        nodes = slice(draft.splits[b], draft.splits[b + 1])
        assert tuple(draft.parents[nodes]) == tree.parents
        alone = drafter.propose([seqs[b]], [Budget(depth)])
        assert (alone.ids, tuple(alone.parents)) == (draft.ids[nodes], tree.parents)
    assert draft.q is None


def test_each_node_is_the_candidate_that_the_shape_names() -> None:
    drafter = medusa_drafter(V, tree=[[0], [2], [2, 1], [2, 1, 0]])
    (seq,) = prefilled(drafter, [[1, 2]], TOY)
    hidden = drafter._states[seq.id][1]
    best = drafter.heads(hidden[None])[0].argsort(-1, descending=True)  # [K, V]
    draft = drafter.propose([seq], [Budget(8)])
    assert draft.ids == [int(best[0, 0]), int(best[0, 2]), int(best[1, 1]), int(best[2, 0])]
    assert draft.parents == [-1, -1, 1, 2]
    assert drafter.propose([seq], [Budget(1)]).ids == draft.ids[:2]
    assert drafter.propose([seq], [Budget(2)]).ids == draft.ids[:3]


def test_a_truncated_vocabulary_proposes_target_ids() -> None:
    for tree in (None, "1,1,1"):
        heads = tiny_heads(V, V, draft_vocab=3)
        drafter = MedusaDrafter(heads, V, MedusaDraftConfig(tree=tree))
        seqs = prefilled(drafter, [[1, 2], [3]], TOY, temperature=1.0, seed=1)
        draft = drafter.propose(seqs, [Budget(3), Budget(2)])
        draft.check([3, 2], V, 64)
        assert set(draft.ids) <= set(heads.token_map.tolist())


def test_the_size_follows_the_measured_accuracies_and_the_costs() -> None:
    def nodes(row_cost: float, accuracies: Any = ACCURACIES) -> int:
        heads = tiny_heads(V, V, accuracies=accuracies)
        drafter = MedusaDrafter(heads, V, MedusaDraftConfig(row_cost=row_cost))
        return len(drafter.propose(prefilled(drafter, [[1]], TOY), [Budget(3)]))

    assert nodes(0.0) == 3 + 9 + 27  # all nodes
    assert nodes(0.6) == 0
    assert 0 < nodes(0.2) < nodes(0.1) < nodes(0.01)
    assert nodes(0.1, ((0.01, 0.0, 0.0),) * 3) == 0


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    save_medusa(tiny_heads(48, 320, 3, seed=2, accuracies=ACCURACIES).float(), folder)
    return folder


@pytest.mark.parametrize(("executor", "dtype"), [("torch", "float64"), ("native", "float32")])
def test_a_head_named_by_its_folder_drafts_losslessly(tiny: Tiny, head: Path, executor: str, dtype: str) -> None:
    plain = LLM(tiny.target, executor="torch", dtype="float64", device="cpu", draft_tokens=4)
    wanted = [d.token_ids for d in plain.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))]
    llm = LLM(
        tiny.target, head, executor=executor, dtype=dtype, device="cpu", draft_options={"nodes": 10}, draft_tokens=4
    )
    assert llm.drafter.name == "medusa"
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [d.token_ids for d in done] == wanted
    assert all(d.stats.proposed > 0 and not d.stats.drafter_faults for d in done)


def test_heads_that_share_the_targets_lm_head_draft_as_with_their_own(tiny: Tiny, tmp_path: Path) -> None:
    """Untrained heads are the identity, so each proposes the target's next token."""
    save_medusa(MedusaHeads(MedusaConfig(2, 1, 48, 320, own_lm_head=False)), tmp_path)
    target = Decoder.load(tiny.target, "torch", torch.float64, "cpu")
    drafter = make_drafter("medusa", target, head=tmp_path, tree="1,1")
    seqs = prefilled(drafter, PROMPTS, target)
    assert drafter.propose(seqs, [Budget(2)] * 3).ids == [token for seq in seqs for token in [seq.tokens[-1]] * 2]


def test_a_head_of_another_target_is_refused_at_load_with_both_values(tiny: Tiny, tmp_path: Path) -> None:
    target = Decoder.load(tiny.target, "torch", torch.float32, "cpu")
    save_medusa(tiny_heads(64, 320), tmp_path / "wide")
    save_medusa(tiny_heads(48, 512), tmp_path / "long")
    with pytest.raises(PairError, match="width 64, but the target has states of width 48"):
        make_drafter("medusa", target, head=tmp_path / "wide")
    with pytest.raises(PairError, match="512 ids, but the target has one of 320"):
        make_drafter("medusa", target, head=tmp_path / "long")
    with pytest.raises(CheckpointError, match="do not have"):
        make_drafter("medusa", target, head=tiny.draft)
    with pytest.raises(ParameterError, match="brings no medusa head"):
        make_drafter("medusa", target)


def test_a_tree_may_be_one_number() -> None:
    assert MedusaDraftConfig(tree=3).read_tree() == MedusaDraftConfig(tree="3").read_tree()
