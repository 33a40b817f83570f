"""Logits of a GGUF file of every family against llama.cpp's on the same file, which are recorded
(`python -m benchmarks.gguf.family_logits --record`)."""

from pathlib import Path

import pytest
import torch

from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import MODEL_TYPES
from slipstream.checkpoints.weights import load_weights
from tests.backends.native.models import chain
from tests.checkpoints.gguf_files import RECORDED, RECORDED_TEXT, recorded_logits, write_recorded

WITHOUT_A_FILE = {"qwen2vl", "qwen3vl", "qwen3vlmoe", "nemotron_h"}
"""Architectures whose files are those of others: see test_gguf_families.py, and `nemotron_h_moe`."""

ROUGH = {"glm4-moe-lite"}
"""Families in which llama.cpp computes something a little else: its norms inside latent attention have the epsilon of
other norms. So does it in families with GELU, which it reads from a table of float16."""


@pytest.mark.parametrize("family", [family for family, stored in RECORDED.items() if "logits" in stored])
def test_logits_are_those_of_llamacpp_on_the_same_file(family: str, tmp_path: Path) -> None:
    stored = RECORDED[family]
    file = write_recorded(stored, tmp_path / "model.gguf")
    weights = load_weights(file, DecoderConfig.load(file))
    logits = NativeExecutor(weights.config, weights).forward(chain(0, 0, RECORDED_TEXT)).logits
    difference = recorded_logits(logits[:, : weights.config.vocab_size]) - torch.tensor(stored["logits"])
    rough = weights.config.activation.startswith("gelu") or family in ROUGH
    assert difference.abs().max() < (2e-3 if rough else 1e-4) * stored["largest"]


def test_every_architecture_of_our_decoder_is_recorded() -> None:
    recorded = {each["metadata"]["general.architecture"] for each in RECORDED.values() if "logits" in each}
    assert recorded == set(MODEL_TYPES) - WITHOUT_A_FILE
