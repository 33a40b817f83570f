"""The head that ships for SmolLM2, without the model, which is a package of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import zoo
from slipstream.errors import ParameterError
from slipstream.heads.eagle_format import load_eagle

WIDTH, LAYERS, IDS, DRAFT_IDS = 576, 30, 49_152, 8_192
END = 2
"""<|im_end|>."""


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What stands for SmolLM2's file."""
    monkeypatch.setattr(zoo, "has_smollm2", lambda: True)
    monkeypatch.setattr(zoo, "smollm2_file", lambda: tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def test_each_target_has_its_own_head(file: Path) -> None:
    assert zoo.head_dir("eagle3", file).name == "smollm2-eagle3"
    assert zoo.head_dir("eagle3", zoo.target_dir()).name == "eagle3"


def test_no_head_of_another_kind_or_for_another_file(file: Path, tmp_path: Path) -> None:
    for kind, target in (("medusa", file), ("eagle3", tmp_path / "another.gguf")):
        with pytest.raises(ParameterError, match=f"no {kind} head ships for"):
            zoo.head_dir(kind, target)


def test_the_head_has_the_sizes_of_smollm2(file: Path) -> None:
    head = load_eagle(zoo.head_dir("eagle3", file), LAYERS)
    assert (head.config.hidden_size, head.config.target_hidden, head.config.decoder.vocab_size) == (WIDTH, WIDTH, IDS)
    assert head.config.taps == (2, 15, 27)
    ids = set(head.target_ids.tolist())
    assert len(ids) == DRAFT_IDS
    assert END in ids
