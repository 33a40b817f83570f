"""Chains of parallel heads, the draft vocabulary, and the dtype of states. That chains in training equal those of
drafting is tested in tests/heads/test_eagle_runtime.py."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.heads.eagle_head import EagleHead, rotary_tables
from slipstream.training import eagle3_objective
from slipstream.training.eagle3_objective import chain_states, least_frequent, most_frequent, token_counts
from slipstream.training.packing import Stream, write_stream
from tests.heads.dense_eagle import dense
from tests.heads.tiny_heads import config, head

STEPS, T, V, D = 3, 14, 20, 16


def tiny(**changes: Any) -> EagleHead:
    return head(config(3, V, D, D, draft_vocab=12, taps=(1, 2), **changes), spread=0.4)


def inputs() -> tuple[Tensor, list[Tensor]]:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (2, T), generator=rng)
    return tokens, [torch.randn(2, T, D, generator=rng, dtype=torch.float64) for _ in range(2)]


def test_chains_of_a_parallel_head_equal_one_pass_over_mask_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """2602.01469, section 3: the rows after a true row hold the mask token and learned taps, at the next positions."""
    monkeypatch.setattr(eagle3_objective, "BLOCK", 4)
    made = tiny(mask_token=17, fc_norm=True, decoder={"layers": 2, "windows": (None, None)})
    tokens, taps = inputs()
    cos, sin = (x.double() for x in rotary_tables(made.config.decoder, 64))
    states = chain_states(made, tokens, taps, (cos, sin), STEPS)
    for b in range(2):
        for start in (0, 1, 5, T - STEPS - 1):
            n = start + STEPS
            masked = made.mask_hidden.view(2, 1, D).expand(-1, STEPS - 1, -1)
            read = [torch.cat((tap[b, : start + 1], part)) for tap, part in zip(taps, masked, strict=True)]
            shown = [*tokens[b, 1 : start + 2].tolist(), *[17] * (STEPS - 1)]
            _, x = dense(made, shown, made.fuse(read), torch.ones(n, n).tril().bool(), list(range(n)))
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


def test_bfloat16_states_meet_norms_of_their_own_dtype() -> None:
    """PyTorch has no fused norm for a bfloat16 input and a float32 weight, and would warn of it."""
    made, (tokens, taps) = tiny(), inputs()
    rotary = rotary_tables(made.config.decoder, T)
    exact = chain_states(made, tokens, taps, (rotary[0].double(), rotary[1].double()), STEPS)
    made.float().borrow(made.borrowed["embedding"].float())
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            states = chain_states(made, tokens, [tap.bfloat16() for tap in taps], rotary, STEPS)
    finally:
        torch.set_warn_always(False)
    for x, true in zip(states, exact, strict=True):
        assert (x.double() - true).norm() < 0.1 * true.norm()  # a chain of layers, each rounded to 8 bits
