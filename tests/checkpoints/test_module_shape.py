"""`ModuleShape`: what is no language model is refused by name, before any weight is looked for."""

import json
from pathlib import Path

import pytest

from slipstream.checkpoints.module_shape import UNBOUNDED, shape_in
from slipstream.errors import UnsupportedModelError


@pytest.mark.parametrize("kind", ["vit", "clip", "whisper"])
def test_what_is_no_language_model_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UnsupportedModelError, match=f"{kind!r} is neither a causal language model"):
        shape_in(tmp_path, kind)


def test_the_bounds_of_an_encoder_decoder_are_those_of_its_two_parts(tmp_path: Path) -> None:
    """T5's positions are distances: `n_positions` in its config.json is the length of its training texts."""
    bounds = []
    for config in (
        {"model_type": "bart", "max_position_embeddings": 77, "decoder_layers": 3, "encoder_layers": 5},
        {"model_type": "t5", "n_positions": 512, "num_layers": 2, "num_decoder_layers": 4},
        {"model_type": "led", "max_encoder_position_embeddings": 99, "max_decoder_position_embeddings": 33},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        shape = shape_in(tmp_path, config["model_type"])
        bounds.append((shape.source_context, shape.context, shape.layers))
    assert bounds == [(77, 77, 3), (UNBOUNDED, UNBOUNDED, 4), (99, 33, 12)]


def test_a_mask_token_is_that_of_the_configuration(tmp_path: Path) -> None:
    for more, token in (({}, None), ({"pard_token": 9}, 9)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi", **more}))
        assert shape_in(tmp_path, "phi").mask_token == token
