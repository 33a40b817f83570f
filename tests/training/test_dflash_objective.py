"""Training of DFlash heads: blocks trained in parallel equal the blocks of drafting, and the loss is theirs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.backends.torch.torch_heads import TorchDFlash
from slipstream.errors import ParameterError
from slipstream.heads.eagle_head import rotary_tables
from slipstream.models.executor import Batch
from slipstream.training.dflash_objective import DFlashObjective, block_states
from slipstream.training.features import Teacher, Window
from slipstream.training.methods import DFlashOptions
from tests.drafters.head_targets import tiny_decoder
from tests.heads.tiny_heads import dflash_config, dflash_head

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
    states = block_states(head, tokens, taps, anchors, (cos, sin))
    for b in range(2):
        for i, anchor in enumerate(anchors[b].tolist()):
            runtime = TorchDFlash(head)
            runtime.extend(
                Batch([0], tokens[b, :anchor], range(anchor), [0, anchor], [0], [None], [0]), taps[b, :anchor]
            )
            block = head.block_tokens(tokens[b, anchor])
            sees = torch.ones(n, n, dtype=torch.bool)
            alone = runtime.run_blocks(
                Batch([0], block, range(anchor, anchor + n), [0, n], [anchor], [sees], range(n)), n
            )[0]
            torch.testing.assert_close(
                head.logits(states[b, i]), alone, atol=1e-6, rtol=1e-6
            )  # angles in float32 there


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

    real = tested._blocks
    tested._blocks = recorded  # type: ignore[method-assign]
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
