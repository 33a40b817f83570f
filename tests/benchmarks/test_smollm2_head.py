"""The EAGLE-3 head for SmolLM2, which is kept beside the benchmarks. SmolLM2 itself is a package of its own."""

from benchmarks.protocol import ROOT
from slipstream.heads.eagle_format import load_eagle

WIDTH, LAYERS, IDS, DRAFT_IDS = 576, 30, 49_152, 8_192
END = 2
"""<|im_end|>."""


def test_the_head_has_the_sizes_of_smollm2() -> None:
    head = load_eagle(ROOT / "benchmarks" / "heads" / "smollm2-eagle3", LAYERS)
    assert (head.config.hidden_size, head.config.target_hidden, head.config.decoder.vocab_size) == (WIDTH, WIDTH, IDS)
    assert head.config.taps == (2, 15, 27)
    ids = set(head.target_ids.tolist())
    assert len(ids) == DRAFT_IDS
    assert END in ids
