"""What each objective trains: its chains or blocks equal those of drafting, and its loss is that of its definition.

That chains of EAGLE heads in training equal those of drafting is tested in tests/heads/test_eagle_runtime.py.
"""

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.backends.torch.torch_heads import TorchDFlash
from slipstream.errors import ParameterError
from slipstream.executor.executor import Batch
from slipstream.heads.eagle_head import EagleHead, rotary_tables
from slipstream.training import eagle3_objective
from slipstream.training.dflash_objective import DFlashObjective, compute_block_states
from slipstream.training.eagle3_objective import (
    compute_chain_states,
    count_tokens,
    find_least_frequent,
    find_most_frequent,
)
from slipstream.training.features import Teacher, Window
from slipstream.training.layerskip_objective import choose_layers_to_run, dropout_rates, exit_weights
from slipstream.training.methods import DFlashOptions, LayerSkipOptions
from slipstream.training.packing import TokenStream, write_stream
from tests.drafters.head_targets import tiny_decoder
from tests.heads.dense_eagle import dense
from tests.heads.tiny_heads import config, dflash_config, dflash_head, head


def test_dropout_rates_follow_the_paper_and_grow_over_training() -> None:
    rates = dropout_rates(8, 0.1)
    assert rates[0] == 0.0
    assert rates[-1] == pytest.approx(0.1)
    # D(l) doubles from 1 to 2 over the depth: (1 + D(l+1)) / (1 + D(l)) is constant.
    ratios = [(1 + b / 0.1) / (1 + a / 0.1) for a, b in pairwise(rates)]
    assert ratios == pytest.approx([2 ** (1 / 7)] * 7)
    assert dropout_rates(8, 0.1, progress=0.0) == [0.0] * 8
    assert dropout_rates(8, 0.1, progress=0.5)[-1] == pytest.approx(0.1 * (2**0.5 - 1))
    assert dropout_rates(1, 0.5) == [0.0]


def test_kept_layers_are_a_function_of_seed_and_step() -> None:
    rates = [0.5] * 8
    assert choose_layers_to_run(rates, 1, 5) == choose_layers_to_run(rates, 1, 5)
    draws = [choose_layers_to_run(rates, 1, step) for step in range(400)]
    assert 0.45 < sum(map(sum, draws)) / (400 * 8) < 0.55
    assert all(choose_layers_to_run([0.0] * 8, 3, step) == [True] * 8 for step in range(50))


def test_exit_weights_follow_the_paper_and_their_rotation_visits_every_layer() -> None:
    settings = LayerSkipOptions(exit_scale=0.2, rotation=7)
    # Step 3: exit 3 and the last layer. e(3) = 0.2 * (0+1+2+3), e(7) = 7 + 0.2 * (0+...+6).
    weights = exit_weights(8, settings, 3)
    assert list(weights) == [3, 7]
    assert weights[3] / weights[7] == pytest.approx(1.2 / 11.2)
    assert sum(weights.values()) == pytest.approx(1.0)
    seen = [set(exit_weights(8, LayerSkipOptions(rotation=7), step)) - {7} for step in range(7)]
    assert set().union(*seen) == {1, 2, 3, 4, 5, 6}  # e(0) = 0: an exit without weight is not computed
    assert exit_weights(8, LayerSkipOptions(rotation=0), 3) == {7: 1.0}
    with pytest.raises(ParameterError, match=r"p_max is 1\.5"):
        LayerSkipOptions(p_max=1.5)


T = 14


@pytest.mark.parametrize("changes", [{}, {"from_anchor": True}], ids=str)
def test_blocks_in_parallel_equal_blocks_one_by_one(changes: dict[str, Any]) -> None:
    head = dflash_head(dflash_config(20, target=6, **changes))
    n = head.config.block
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (2, T), generator=generator)
    taps = torch.randn(2, T, 18, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([[1, 5, 5, 12], [13, 2, 7, 3]])
    cos, sin = (table.double() for table in rotary_tables(head.config.decoder, T + n))
    states = compute_block_states(head, tokens, taps, anchors, (cos, sin))
    for b in range(2):
        for i, anchor in enumerate(anchors[b].tolist()):
            runtime = TorchDFlash(head)
            before = Batch([0], tokens[b, :anchor], range(anchor), [0, anchor], [0], [None], [0])
            runtime.extend(before, taps[b, :anchor])
            block = head.block_tokens(tokens[b, anchor])
            sees = torch.ones(n, n, dtype=torch.bool)
            select = range(n - head.config.depth, n)
            alone = runtime.run_blocks(Batch([0], block, range(anchor, anchor + n), [0, n], [anchor], [sees], select))
            torch.testing.assert_close(head.logits(states[b, i]), alone, atol=1e-6, rtol=1e-6)  # float32 angles


def objective(**options: Any) -> DFlashObjective:
    tested = DFlashObjective(Teacher(tiny_decoder()), DFlashOptions(block=4, layers=1, anchors=3, **options))
    for name, parameter in tested.module.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return tested


def window(tested: DFlashObjective) -> Window:
    tokens = torch.randint(0, 40, (2, T), generator=torch.Generator().manual_seed(2))
    counts = torch.ones(2, T, dtype=torch.bool)
    counts[0, :6] = False  # a prompt
    return Window(tokens, counts, tested.teacher.read(tokens, tested.taps))


@pytest.mark.parametrize("markov_rank", [0, 3])
def test_the_loss_is_that_of_drafts_from_the_anchors_and_decays_with_their_length(markov_rank, monkeypatch):
    tested = objective(decay=0.5, markov_rank=markov_rank)
    given = window(tested)
    anchors = torch.tensor([[4, 6, 12], [1, 11, 9]])
    monkeypatch.setattr(torch, "multinomial", lambda *args, **more: anchors - 1)
    with torch.no_grad():
        loss, _ = tested(given)
        drafts, p = tested.draft_logits(given)
    total, weight = 0.0, 0.0
    for b in range(2):
        for anchor in anchors[b].tolist():
            for k in range(3):
                at = anchor + 1 + k
                if at < T and given.counts[b, at]:
                    logp, logq = p[b, at - 1].log_softmax(-1), drafts[k][b, anchor - 1].log_softmax(-1)
                    total += 0.5**k * float((logp.exp() * (logp - logq)).sum())
                    weight += 0.5**k
    assert float(loss) == pytest.approx(total / weight, rel=1e-9)


def test_anchors_are_drawn_anew_in_each_step_where_a_draft_token_counts() -> None:
    tested = objective()
    given, drawn = window(tested), list[Tensor]()

    def recorded(window: Window, anchors: Tensor) -> Any:
        drawn.append(anchors)
        return real(window, anchors)

    real = tested._compute_blocks
    tested._compute_blocks = recorded  # type: ignore[method-assign]
    for step in (0, 1, 0):
        tested.begin_step(step)
        tested.predictions(given)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    for anchors in drawn:
        assert anchors.min() >= 1
        assert anchors.max() <= T - 2
        assert anchors[0].min() >= 5  # the token after it is the first that counts


def test_settings_that_no_checkpoint_can_hold_are_refused() -> None:
    with pytest.raises(ParameterError, match="mask_token is 40"):
        objective(mask_token=40)
    with pytest.raises(ParameterError, match=r"leave out \[0\]"):
        objective(taps=(0, 2))


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
    head = tiny(mask_token=17, fc_norm=True, decoder={"layers": 2, "windows": (None, None)})
    tokens, taps = inputs()
    cos, sin = (x.double() for x in rotary_tables(head.config.decoder, 64))
    states = compute_chain_states(head, tokens, taps, (cos, sin), STEPS)
    for b in range(2):
        for start in (0, 1, 5, T - STEPS - 1):
            n = start + STEPS
            masked = head.mask_hidden.view(2, 1, D).expand(-1, STEPS - 1, -1)
            read = [torch.cat((tap[b, : start + 1], part)) for tap, part in zip(taps, masked, strict=True)]
            shown = [*tokens[b, 1 : start + 2].tolist(), *[17] * (STEPS - 1)]
            _, x = dense(head, shown, head.fuse(read), torch.ones(n, n).tril().bool(), list(range(n)))
            for j in range(STEPS):
                assert torch.allclose(states[j][b, start], x[start + j], atol=1e-4), (b, start, j)


def test_the_mask_token_is_the_last_of_the_rarest() -> None:
    assert find_least_frequent(np.array([0.0, 3.0, 0.0, 1.0])) == 2


def test_the_draft_vocabulary_has_the_most_frequent_tokens_of_the_data(tmp_path) -> None:  # type: ignore[no-untyped-def]
    write_stream(tmp_path / "a.bin", [[5] * 6 + [7] * 3 + [9]], eos=None)
    write_stream(tmp_path / "b.bin", [[3] * 50 + [7] * 50], eos=None)
    streams = [TokenStream.open(tmp_path / f"{name}.bin", whole=False) for name in "ab"]
    counts = count_tokens(streams, (0.9, 0.1), 12)
    assert counts.sum() == pytest.approx(1.0)
    assert counts[5] == pytest.approx(0.54)
    assert counts[7] == pytest.approx(0.27 + 0.05)
    assert find_most_frequent(counts, 3, always=(0,)).tolist() == [0, 5, 7]


def test_bfloat16_states_meet_norms_of_their_own_dtype() -> None:
    """PyTorch has no fused norm for a bfloat16 input and a float32 weight, and would warn of it."""
    head, (tokens, taps) = tiny(), inputs()
    rotary = rotary_tables(head.config.decoder, T)
    exact = compute_chain_states(head, tokens, taps, (rotary[0].double(), rotary[1].double()), STEPS)
    head.float().borrow(head.borrowed("embedding").float())
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            states = compute_chain_states(head, tokens, [tap.bfloat16() for tap in taps], rotary, STEPS)
    finally:
        torch.set_warn_always(False)
    for x, true in zip(states, exact, strict=True):
        assert (x.double() - true).norm() < 0.1 * true.norm()  # a chain of layers, each rounded to 8 bits
