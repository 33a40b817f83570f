"""Nothing that a prompt, a draft or a cache can hold makes the torch backend read what is not the model's."""

import dataclasses

import pytest
import torch

from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.backends.torch.torch_heads import TorchEagle
from slipstream.errors import TargetError
from slipstream.models.executor import Batch
from tests.backends.native.models import SHAPES, VOCAB, chain, config, forest, ids, tree, weights
from tests.heads.tiny_heads import config as head_config, head

OUTSIDE = [-1, -VOCAB, VOCAB, VOCAB + 1000, 1 << 40, -(1 << 62)]


def last(batch: Batch) -> Batch:
    return dataclasses.replace(batch, select=[s - 1 for s in batch.splits[1:]])


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_token_outside_the_vocabulary_is_refused_before_the_embedding_is_read(shape: str) -> None:
    made, text = config(**SHAPES[shape]), ids(6)
    model = TorchExecutor(made, weights(made))
    wanted = model.forward(chain(0, 0, text)).logits.clone()
    for token in OUTSIDE:
        for batch in (
            chain(0, 0, [token]),
            tree(0, 3, [3, token, 4], [-1, -1]),
            forest([(0, 0, [3], []), (1, 0, [token], [])]),
        ):
            with pytest.raises(TargetError, match="outside the model's embedding"):
                model.forward(batch)
    assert torch.equal(model.forward(chain(0, 0, text)).logits, wanted)


def test_a_learned_position_beyond_the_last_one_is_refused() -> None:
    made = config(**SHAPES["gpt2"] | {"context": 20})
    model = TorchExecutor(made, weights(made))
    with pytest.raises(TargetError, match="a position is outside"):
        model.forward(chain(0, 0, ids(21)))


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_refuses_tokens_outside_its_embedding(version: int) -> None:
    made = head_config(version, 40, target=8, **({"draft_vocab": 24} if version == 3 else {}))
    runtime = TorchEagle(head(made))
    features = torch.ones(3, len(made.taps) * made.target_hidden)
    for token in (-1, 40, 1 << 40):
        bad = last(forest([(0, 0, [3, token, 5], [])]))
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.decode_steps(bad, features, 2)
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.extend(bad, features)


def test_whatever_was_in_a_block_of_a_head_before_changes_no_draft() -> None:
    """Blocks of finished sequences are used again, and a batch reads as far as its longest sequence."""
    made = head_config(3, 40, target=8, draft_vocab=24)
    batch = last(forest([(0, 0, ids(40, 1, 40), []), (1, 0, [3, 4, 5], []), (2, 0, ids(33, 2, 40), [])]))
    features = torch.randn(76, len(made.taps) * made.target_hidden, generator=torch.Generator().manual_seed(1))
    branches = forest([(0, 40, [5, 6, 7], [-1, -1, 0]), (1, 3, [8], [-1])])
    own = torch.randn(4, made.hidden_size, generator=torch.Generator().manual_seed(2))

    def drafted(before: float) -> list[torch.Tensor]:
        runtime = TorchEagle(head(made))
        runtime.decode_steps(batch, features, 3)
        for seq_id in range(3):
            runtime.release(seq_id)
        with torch.inference_mode():
            for layer in runtime._blocks.layers:
                layer[:] = before
        made_at_once = runtime.decode_steps(batch, features, 3)
        return [made_at_once.tokens, made_at_once.logits, *runtime.extend(branches, own, own=True)]

    for found, wanted in zip(drafted(float("nan")), drafted(0.0), strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, wanted)
