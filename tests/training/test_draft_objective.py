"""Draft models: the rows of a parallel one are those of drafting."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.errors import ParameterError
from slipstream.training.draft_objective import compute_masked_states
from slipstream.training.methods import DraftOptions
from slipstream.training.run import prepare
from slipstream.training.trainable import load_trainable
from tests.tiny_checkpoints import make_family
from tests.training.tiny_runs import quiet, run_config

MASK = 7


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_masks_after_all_tokens_at_once_equal_a_pass_for_each(family: str, tmp_path: Path) -> None:
    make_family(family, tmp_path)
    model = load_trainable(tmp_path).double()
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        states = compute_masked_states(model, tokens, 4, MASK)  # [4, 2, 9, d]
        for b, i in ((0, 0), (0, 5), (1, 8)):
            [alone] = model.states(torch.cat((tokens[b, : i + 1], torch.full((3,), MASK)))[None])
            torch.testing.assert_close(states[:, b, i], alone[0, i:])


def test_one_token_is_not_drafted_in_parallel() -> None:
    with pytest.raises(ParameterError, match="--depth 2"):
        DraftOptions(parallel=True, depth=1)


def test_a_parallel_draft_model_that_is_trained_further_keeps_its_mask_token(
    tiny_target: Path, tiny_data: Path, tmp_path: Path
) -> None:
    shape = SimpleNamespace(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate=32, depth=2)
    few = {"budget_tokens": 256, "texts": 2, "text_tokens": 6, "temperatures": (0.0,)}

    def trained(out: str, **options: object) -> int | None:
        options = vars(shape) | options
        config = run_config("draft", DraftOptions(**options), tiny_target, tiny_data, tmp_path / out, **few)
        run = prepare(config, quiet)
        run.train(quiet)
        return getattr(load_trainable(tmp_path / out / "final").lm.config, "pard_token", None)

    assert trained("plain") is None
    assert trained("first", parallel=True) == 1  # the id that never occurs
    assert trained("second", start=str(tmp_path / "first" / "final")) == 1
