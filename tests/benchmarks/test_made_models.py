"""Checkpoints made out of the embedded ones."""

from pathlib import Path

import torch

from benchmarks.made_models import deeper, random_weights, wider
from slipstream import zoo
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.models.config import DecoderConfig
from slipstream.models.text import load_tokenizer
from slipstream.targets.describe import as_target

TEXT = "def add(first, second):\n    return first + second  # naïve ☃\n"


def logits(path: Path) -> torch.Tensor:
    target = as_target(path, executor="torch", dtype="float32")
    return target.run([Sequence(load_tokenizer(path).encode(TEXT))], Draft.empty(1)).logits


def test_layers_that_do_nothing_change_no_logit(tmp_path: Path) -> None:
    path = deeper(tmp_path / "deep", zoo.draft_dir(), 2)
    assert DecoderConfig.load(path).layers == DecoderConfig.load(zoo.draft_dir()).layers + 2
    assert torch.equal(logits(path), logits(zoo.draft_dir()))


def test_a_wider_model_computes_the_same(tmp_path: Path) -> None:
    path, source = (
        DecoderConfig.load(wider(tmp_path / "wide", zoo.target_dir(), 2)),
        DecoderConfig.load(zoo.target_dir()),
    )
    assert (path.hidden_size, path.layers, path.head_dim) == (2 * source.hidden_size, source.layers, source.head_dim)
    computed, wanted = logits(tmp_path / "wide"), logits(zoo.target_dir())
    assert float((computed - wanted).abs().max() / wanted.abs().max()) < 1e-4  # sums of float32 in another order


def test_random_weights_have_the_shapes_and_norms_of_their_source(tmp_path: Path) -> None:
    path = random_weights(tmp_path / "random", zoo.draft_dir())
    assert DecoderConfig.load(path).shapes() == DecoderConfig.load(zoo.draft_dir()).shapes()
    assert not torch.allclose(logits(path), logits(zoo.draft_dir()), atol=0.1)
