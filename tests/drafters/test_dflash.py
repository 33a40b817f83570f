"""The DFlash drafter: its draft tokens against transformers' implementation and a recomputation from the target's true
states, an always-right head, its q, its limits, and how it is made."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.backends.native.native_heads import NativeDFlash
from slipstream.backends.torch.torch_heads import TorchDFlash
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.drafter import Budget
from slipstream.core.rules import RULES
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.drafters.dflash import DFlashDrafter, make
from slipstream.drafters.registry import make_drafter
from slipstream.errors import PairError
from slipstream.heads.dflash_head import DFlashHead
from slipstream.targets.decoder import Decoder
from tests.drafters import head_targets
from tests.drafters.conformance import Recorder
from tests.drafters.head_targets import PROMPTS, V, features, fitting_head, greedy_drafts, prefilled, tiny_decoder, toy
from tests.heads.tiny_heads import dflash_config, dflash_drafter, dflash_head
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import random_llama

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {}, "causal": {"causal": True}, "dspark": {"from_anchor": True, "markov_rank": 3},
    "one layer with a window": {"decoder": {"windows": (5, None)}, "causal_windows": True},
    "windows on both sides": {"decoder": {"windows": (4, 4)}},
    "a draft vocabulary": {"draft_vocab": V - 2, "own_lm_head": True, "markov_rank": 3},
}  # fmt: skip
RUNTIMES: dict[Any, dict[str, float]] = {TorchDFlash: {}, NativeDFlash: {"rtol": 1e-4, "atol": 1e-6}}
"""Tolerances; torch computes in float64 here."""


def drafts_with(kind: str) -> DFlashHead:
    return dflash_head(dflash_config(V, target=V, **KINDS[kind]), 3)


def by_hand(head: DFlashHead, target: Target, text: list[int], drafted: list[int]) -> Tensor:
    """Logits of each draft token of the block after a text, everything recomputed without a cache: [K, V]. drafted: the
    draft tokens that the Markov head reads."""
    c, d = head.config, head.config.decoder
    context = head.hidden_norm(head.fc(features(target, text, c.taps)[:-1]))  # [m, d]
    m, n = len(context), c.block
    x = head.embedding[[text[-1], *[c.mask_token] * (n - 1)]]
    inverse = 1 / 10000 ** (torch.arange(0, d.head_dim, 2, dtype=torch.float32) / d.head_dim).double()
    turn = torch.polar(torch.ones(m + n, len(inverse)).double(), torch.outer(torch.arange(m + n).double(), inverse))

    def rotated(rows: Tensor, first: int) -> Tensor:  # [rows, H, D]
        pairs = torch.complex(*rows.chunk(2, -1)) * turn[first : first + len(rows), None]
        return torch.cat((pairs.real, pairs.imag), -1)

    for i, layer in enumerate(head.layers):
        a, normed = layer.self_attn, layer.input_layernorm(x)
        states = torch.cat((context, normed))
        q = rotated(a.q_norm(a.q_proj(normed).unflatten(-1, (-1, d.head_dim))), m)
        k = rotated(a.k_norm(a.k_proj(states).unflatten(-1, (-1, d.head_dim))), 0)
        v = a.v_proj(states).unflatten(-1, (-1, d.head_dim))
        k, v = (part.repeat_interleave(d.heads // d.kv_heads, 1) for part in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * d.head_dim**-0.5
        after = torch.arange(m + n) - m - torch.arange(n)[:, None]  # of each key to each query
        if c.causal or (c.causal_windows and d.windows[i]):
            scores = scores.masked_fill(after > 0, -torch.inf)
        if window := d.windows[i]:
            scores = scores.masked_fill(after.abs() >= window, -torch.inf)
        x = x + a.o_proj(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits = F.linear(head.norm(x)[n - c.depth :], head.output_head)
    if c.markov_rank:
        before = torch.tensor([text[-1], *drafted])[: c.depth]
        bias = head.markov_head["markov_w1"].weight[before] @ head.markov_head["markov_w2"].weight.T
        logits[: len(before)] += bias
    if c.draft_vocab is not None:
        wide = torch.full((len(logits), d.vocab_size), -torch.inf).double()
        wide[:, head.t2d] = logits
        return wide
    return logits


class TestDraftTokens:
    def test_they_are_those_of_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its `DFlashTokenCandidateGenerator` with its only model of that kind, at temperature 0, step by step."""
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Theirs

        lm = random_llama(1, **head_targets.SHAPE).double()
        torch.manual_seed(5)
        assistant = MuseGlimmerAssistantModel(
            MuseGlimmerAssistantConfig(
                hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=1e-5,
                layer_types=["full_attention"] * 2, block_size=6, mask_token_id=39, target_layer_ids=[0, 1, 2],
            )
        )  # fmt: skip
        for name, parameter in assistant.named_parameters():
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
        assistant = assistant.double().eval()
        expected: list[list[int]] = []
        real = Theirs.get_candidates

        def recorded(self: Any, input_ids: Tensor, *args: Any, **more: Any) -> Any:
            output = real(self, input_ids, *args, **more)
            expected.append(output[0][0, input_ids.shape[1] :].tolist())
            return output

        monkeypatch.setattr(Theirs, "get_candidates", recorded)
        text = lm.generate(
            torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), max_new_tokens=24, do_sample=False, assistant_model=assistant,
            speculation_type="dflash",
        )[0].tolist()  # fmt: skip

        decoder = {"hidden_size": 24, "head_dim": 8, "intermediate_size": 32}
        head = DFlashHead(dflash_config(40, 24, 24, taps=(1, 2, 3), decoder=decoder)).double()
        names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
        state = assistant.state_dict()
        for old, new in names.items():
            state = {name.replace(old, new): tensor for name, tensor in state.items()}
        head.load_state_dict(state)
        target = Decoder.of_module(lm, LoadSettings(executor="torch", dtype="float64"))
        recorder = Recorder(make(target, head=head), 40)
        (seq,) = prefilled(recorder, [text[:8]], target, max_tokens=24)
        while not seq.finish:
            step([seq], target, recorder, RULES["rejection"], 5)
        assert seq.tokens == text
        drafts = [proposal.ids for proposal in recorder.proposed[seq.id][1:]]
        assert len(drafts) > 5
        compared = [a[: len(b)] for a, b in zip(expected[1:], drafts, strict=False)]  # max_tokens cuts the last drafts
        assert compared == drafts[: len(compared)]
        assert len(compared) >= len(drafts) - 1

    @pytest.mark.parametrize("runs", RUNTIMES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_greedy_chains_are_what_true_states_give_at_every_step(self, kind: str, runs: Any) -> None:
        head, other = drafts_with(kind), toy()
        for text, drafted in greedy_drafts(DFlashDrafter(runs(head), V), 5, steps=6, max_tokens=24):
            assert drafted == by_hand(head, other, text, drafted)[:5].argmax(-1).tolist()

    def test_a_short_draft_is_the_beginning_of_a_long_one(self) -> None:
        drafter = dflash_drafter(V)
        seqs = prefilled(drafter, [PROMPTS[2], PROMPTS[2]])
        long, short = (drafter.propose([seq], [Budget(depth)]).ids for seq, depth in zip(seqs, (9, 2), strict=True))
        assert len(long) == 5  # a block of 6
        assert short == long[:2]


class TestDistributions:
    @pytest.mark.parametrize("runs", RUNTIMES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_q_is_the_heads_distribution_at_every_draft_token(self, kind: str, runs: Any) -> None:
        """Plain softmaxes are drafted in one call, others token by token."""
        for options in ({"temperature": 0.7}, {"temperature": 1.5, "top_k": 2}):
            head = drafts_with(kind)
            drafter = DFlashDrafter(runs(head), V)
            (seq,) = prefilled(drafter, PROMPTS[2:], seed=4, **options)
            draft = drafter.propose([seq], [Budget(5)])
            assert len(draft) == 5
            assert draft.q is not None
            logits = by_hand(head, toy(), seq.tokens, draft.ids)[:5] / options["temperature"]
            if "top_k" in options:
                logits = logits.masked_fill(logits < logits.topk(2).values[:, -1:], -torch.inf)
            torch.testing.assert_close(draft.q, logits.softmax(-1), **RUNTIMES[runs])

    @pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
    @pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 3}], ids=str)
    def test_a_markov_head_that_knows_the_target_is_always_accepted(self, rule: str, options: dict[str, Any]) -> None:
        """A `ToyTarget` of order 1: its logits after each token are the Markov head's, and the block adds nothing."""
        target = ToyTarget(V, order=1, seed=3)
        head = dflash_head(dflash_config(V, target=V, markov_rank=V))
        head.borrow(head.embedding, torch.zeros(V, 8).double())
        head.markov_head["markov_w1"].weight.copy_(torch.eye(V))
        head.markov_head["markov_w2"].weight.copy_(torch.stack([target.logits([t]) for t in range(V)]).T)
        llm = LLM(target, DFlashDrafter(TorchDFlash(head), V), draft_tokens=4, rule=rule)
        for done in llm.generate(PROMPTS, SamplingParams(max_tokens=33, seed=5, **options)):
            assert done.stats.acceptance_rate == 1
            assert done.stats.drafter_faults == 0


class TestMaking:
    def test_vocabularies_that_are_padded_differently_fit_unless_a_markov_head_lacks_ids(self) -> None:
        target, taps = tiny_decoder(vocab_size=400), (1, 2, 4)
        wider = dflash_head(dflash_config(402, 24, 24, taps=taps, mask_token=7, markov_rank=2), spread=0.3)
        for head in (wider, dflash_head(dflash_config(398, 24, 24, taps=taps), spread=0.3)):
            done = LLM(target, make(target, head=head), draft_tokens=4).generate(
                [1, 2, 3], SamplingParams(max_tokens=9)
            )
            assert done[0].stats.proposed > 0
            assert done[0].stats.drafter_faults == 0
        with pytest.raises(PairError, match=r"398 ids.*400 ids"):
            make(target, head=dflash_head(dflash_config(398, 24, 24, taps=taps, markov_rank=2)))

    def test_more_draft_tokens_than_a_block_holds_are_named_in_a_warning(self, caplog):
        target = tiny_decoder()
        drafter = make_drafter("dflash", target, head=fitting_head("dflash"))
        assert LLM(target, drafter).most_draft_tokens == 5
        LLM(target, drafter, draft_tokens=5)
        assert not caplog.records
        LLM(target, drafter, draft_tokens=9)
        assert [
            r.message.startswith("draft_tokens is 9, but the drafter 'dflash' drafts at most 5") for r in caplog.records
        ] == [True]
