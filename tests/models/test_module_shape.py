"""`ModuleShape`: what is no causal language model is refused by name, before any weight is looked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import UnsupportedModelError
from slipstream.models.module_shape import shape_in


@pytest.mark.parametrize("kind", ["t5", "bart", "vit", "clip"])
def test_what_is_no_causal_language_model_is_refused(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind} | ({"is_encoder_decoder": True} if kind == "bart" else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"{kind!r} is not that of a causal language model"):
        shape_in(tmp_path)
