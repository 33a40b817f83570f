"""What is stored: results, and the EAGLE-3 head for SmolLM2, which is a package of its own."""

import json
from pathlib import Path

import pytest

from slipstream.bench.provenance import ROOT, public_values
from slipstream.heads.eagle_format import load_eagle

FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
WIDTH, LAYERS, IDS, DRAFT_IDS = 576, 30, 49_152, 8_192
END = 2
"""<|im_end|>."""


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_result_names_no_folder_of_the_machine(file: Path) -> None:
    result = json.loads(file.read_text())
    assert public_values(result) == result


def test_the_head_has_the_sizes_of_smollm2() -> None:
    head = load_eagle(ROOT / "benchmarks" / "heads" / "smollm2-eagle3", LAYERS)
    assert (head.config.hidden_size, head.config.target_hidden, head.config.decoder.vocab_size) == (WIDTH, WIDTH, IDS)
    assert head.config.taps == (2, 15, 27)
    ids = set(head.target_ids.tolist())
    assert len(ids) == DRAFT_IDS
    assert END in ids
