"""Checkpoints made out of the embedded ones, by `benchmarks.derived_models` and `benchmarks.foreign`."""

from pathlib import Path

import torch

from benchmarks.derived_models import deeper, random_weights, wider
from benchmarks.foreign import SHARE, cut, renamed
from slipstream import zoo
from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.string_match import vocabularies
from slipstream.targets.describe import as_target
from slipstream.tokens.text import load_tokenizer

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


def test_other_tokenizers_share_what_they_should_and_a_renamed_model_predicts_the_same(tmp_path: Path) -> None:
    embedded = load_tokenizer(zoo.target_dir())
    for path, share in ((renamed(tmp_path / "renamed"), 1.0), (cut(tmp_path / "cut"), SHARE)):
        tokenizer, width = load_tokenizer(path), DecoderConfig.load(path).vocab_size
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        shared = vocabularies(embedded, tokenizer, (len(embedded), width))
        assert len(shared.to_draft) == round(share * len(embedded)) == width
        assert shared.to_draft[0] == DecoderConfig.load(path).eos_ids[0] != 0
        long = zoo.prompts("code")[0]["prompt"]
        assert (len(tokenizer.encode(long)) > len(embedded.encode(long))) == (share < 1)
        if share == 1:
            a, b = logits(zoo.draft_dir()), logits(path)
            torch.testing.assert_close(a[:, list(shared.to_draft)], b[:, list(shared.to_target)])
