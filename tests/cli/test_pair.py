"""`slipstream info TARGET DRAFT`."""

from __future__ import annotations

import json

from tests.checkpoints import OTHER_TEXTS, make_model, make_tokenizer


def test_a_pair_of_compatible_models(cli, tiny, tmp_path):
    make_model(tmp_path, num_hidden_layers=8)
    make_tokenizer(tmp_path)
    result = cli("info", tmp_path, tiny.draft)
    said = " ".join(result.out.split())
    assert result.code == 0
    assert "The models are compatible: all 316 common token ids agree." in said
    assert "target steps" in said
    assert "at 80% acceptance: 1." in said
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads(cli("info", tmp_path, tiny.draft, "--json").out)
    assert (found["fits"], found["differing_ids"]) == (True, 0)


def test_a_pair_of_incompatible_models(cli, tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    result = cli("info", tiny.target, tmp_path)
    assert result.code == 1
    said = " ".join(result.out.split())
    assert "do not share a vocabulary" in said
    assert "with --draft-tokenizer intersection or string the draft model keeps its tokenizer: 2" in said
    assert "tokens are shared" in said
    found = json.loads(cli("info", tiny.target, tmp_path, "--json").out)
    assert found["fits"] is False
    assert len(found["differences"]) == 5
