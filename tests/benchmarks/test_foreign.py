"""The models of `benchmarks.foreign`."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.foreign import SHARE, cut, renamed
from slipstream import zoo
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.string_match import vocabularies
from slipstream.models.config import DecoderConfig
from slipstream.models.text import load_tokenizer
from slipstream.targets.describe import as_target

TEXT = "def add(first, second):\n    return first + second  # naïve ☃\n"


def test_other_tokenizers_share_what_they_should(tmp_path: Path) -> None:
    target_tokenizer = load_tokenizer(zoo.target_dir())
    for path, share in ((renamed(tmp_path / "renamed"), 1.0), (cut(tmp_path / "cut"), SHARE)):
        tokenizer, width = load_tokenizer(path), DecoderConfig.load(path).vocab_size
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        shared = vocabularies(target_tokenizer, tokenizer, (len(target_tokenizer), width))
        assert len(shared.to_draft) == round(share * len(target_tokenizer)) == width
        assert shared.to_draft[0] == DecoderConfig.load(path).eos_ids[0] != 0
        long = zoo.prompts("code")[0]["prompt"]
        one, other = target_tokenizer.encode(long), tokenizer.encode(long)
        assert (len(other) > len(one)) == (share < 1)


def test_a_renamed_draft_model_predicts_the_same(tmp_path: Path) -> None:
    target_tokenizer, path = load_tokenizer(zoo.draft_dir()), renamed(tmp_path / "renamed")
    tokenizer = load_tokenizer(path)
    shared = vocabularies(target_tokenizer, tokenizer, (len(target_tokenizer), len(tokenizer)))
    a = (
        as_target(zoo.draft_dir(), executor="torch")
        .run([Sequence(target_tokenizer.encode(TEXT))], Draft.empty(1))
        .logits
    )
    b = as_target(path, executor="torch").run([Sequence(tokenizer.encode(TEXT))], Draft.empty(1)).logits
    torch.testing.assert_close(a[:, list(shared.to_draft)], b[:, list(shared.to_target)])
