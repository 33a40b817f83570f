"""Tie or bug."""

from slipstream.measure.identity import Divergence, find_divergence
from slipstream.targets.decoder import Decoder
from tests.tiny_checkpoints import EXACT, clone, rewrite


def test_divergence_tells_near_ties_from_bugs(tiny, tmp_path):
    target = Decoder.load(tiny.target, **EXACT)
    prompt = [5, 6, 7]
    assert find_divergence(target, prompt, [1, 2], [1, 2]) is None
    difference = find_divergence(target, prompt, [1, 2, 3], [1, 2, 4])
    assert difference.position == 2
    assert not difference.near_tie
    assert "bug" in str(difference)
    assert find_divergence(target, prompt, [1, 2], [1, 2, 4]).position == 2
    assert Divergence(3, 1e-7, 1e-6).near_tie
    tied = rewrite(clone(tiny.target, tmp_path / "tied"), lambda tensors: tensors["lm_head.weight"].zero_())
    assert find_divergence(Decoder.load(tied, **EXACT), prompt, [8], [9]).near_tie
    assert not target.executor._pool.tables  # every sequence was released
