"""Chains of parallel heads, the draft vocabulary, and the dtype of states. That chains in training equal those of
drafting is tested in tests/heads/test_eagle_runtime.py."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.heads.eagle_head import EagleConfig, EagleHead, rotary_tables
from slipstream.models.config import DecoderConfig
from slipstream.training import eagle3_objective
from slipstream.training.eagle3_objective import chain_states, least_frequent, most_frequent, token_counts
from slipstream.training.packing import Stream, write_stream

STEPS, T, V, DV, D = 3, 14, 20, 12, 16
DECODER = DecoderConfig(
    model_type="llama", vocab_size=V, hidden_size=D, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=24,
    context=64, norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100.0}, windows=(None,),
)  # fmt: skip


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(EagleConfig(3, DECODER, (1, 2), D, DV)).double()
    for p in head.parameters():
        torch.nn.init.normal_(p, 0.0, 0.4)
    head.select_vocabulary(torch.arange(DV) + torch.arange(DV) // 2)
    return head.borrow(torch.randn(V, D, dtype=torch.float64))


def inputs() -> tuple[Tensor, list[Tensor]]:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (2, T), generator=rng)
    return tokens, [torch.randn(2, T, D, generator=rng, dtype=torch.float64) for _ in range(2)]


def test_chains_of_a_parallel_head_equal_one_pass_over_mask_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """2602.01469, section 3: the rows after a true row hold the mask token and learned taps, at the next positions."""
    monkeypatch.setattr(eagle3_objective, "BLOCK", 4)
    torch.manual_seed(0)
    two = replace(DECODER, layers=2, windows=(None, None))
    head = EagleHead(EagleConfig(3, two, (1, 2), D, DV, fc_norm=True, mask_token=17)).double()
    for p in head.parameters():
        torch.nn.init.normal_(p, 0.0, 0.4)
    head.borrow(torch.randn(V, D, dtype=torch.float64))
    tokens, taps = inputs()
    cos, sin = (x.double() for x in rotary_tables(two, 64))
    states = chain_states(head, tokens, taps, (cos, sin), STEPS)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [n, H, D]
        scores = torch.einsum("nhd,mhd->hnm", q, k.expand(-1, 2, -1)) * 8**-0.5
        unseen = torch.ones(len(q), len(q)).triu(1).bool()
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v.expand(-1, 2, -1))

    for b in range(2):
        for start in (0, 1, 5, T - STEPS - 1):
            n = start + STEPS
            masked = head.mask_hidden.view(2, 1, D).expand(-1, STEPS - 1, -1)
            read = [torch.cat((tap[b, : start + 1], part)) for tap, part in zip(taps, masked, strict=True)]
            shown = torch.cat((tokens[b, 1 : start + 2], torch.full((STEPS - 1,), 17)))
            _, x = head(shown, head.fuse(read), (cos[:n], sin[:n]), attend)
            for j in range(STEPS):
                assert torch.allclose(states[j][b, start], x[start + j], atol=1e-4), (b, start, j)


def test_the_mask_token_is_the_last_of_the_rarest() -> None:
    assert least_frequent(np.array([0.0, 3.0, 0.0, 1.0])) == 2


def test_the_draft_vocabulary_has_the_most_frequent_tokens_of_the_data(tmp_path) -> None:  # type: ignore[no-untyped-def]
    write_stream(tmp_path / "a.bin", [[5] * 6 + [7] * 3 + [9]], eos=None)
    write_stream(tmp_path / "b.bin", [[3] * 50 + [7] * 50], eos=None)
    streams = [Stream.open(tmp_path / f"{name}.bin", whole=False) for name in "ab"]
    counts = token_counts(streams, (0.9, 0.1), 12)
    assert counts.sum() == pytest.approx(1.0)
    assert counts[5] == pytest.approx(0.54)
    assert counts[7] == pytest.approx(0.27 + 0.05)
    assert most_frequent(counts, 3, always=(0,)).tolist() == [0, 5, 7]


def test_bfloat16_states_meet_norms_of_their_own_dtype(head: EagleHead) -> None:
    """PyTorch has no fused norm for a bfloat16 input and a float32 weight, and would warn of it."""
    tokens, taps = inputs()
    rotary = rotary_tables(DECODER, T)
    exact = chain_states(head, tokens, taps, (rotary[0].double(), rotary[1].double()), STEPS)
    head.float().borrow(head.borrowed["embedding"].float())
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            states = chain_states(head, tokens, [tap.bfloat16() for tap in taps], rotary, STEPS)
    finally:
        torch.set_warn_always(False)
    for x, true in zip(states, exact, strict=True):
        assert (x.double() - true).norm() < 0.1 * true.norm()  # a chain of layers, each rounded to 8 bits
