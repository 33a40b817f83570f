from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.embedded.corpus import Package, build_corpus
from recipes.embedded.token_cache import Batches, HeldOut, Mix, answer_mask, prepare


def test_answers_are_masked() -> None:
    # 1 user, 2 assistant, 3 end
    tokens = torch.tensor([[9, 1, 8, 3, 2, 7, 7, 3, 9, 1, 8, 3, 2, 6, 3]])
    assert answer_mask(tokens, assistant=2, end=3).int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]]


@pytest.fixture(scope="module")
def cache(packages: list[Package], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    prepare(folder, build_corpus(packages, heldout=0.2), {}, vocab_size=400)
    return folder


def test_batches_depend_on_seed_step_and_counters_only(cache: Path) -> None:
    one, two = Batches(cache, Mix(), seed=3), Batches(cache, Mix(), seed=3)
    first = [one.draw(step, 4, 32) for step in range(6)]
    for step in range(3):
        two.draw(step, 4, 32)
    resumed = Batches(cache, Mix(), seed=3)
    resumed.counters = dict(two.counters)
    assert all(torch.equal(a, resumed.draw(step, 4, 32)) for step, a in enumerate(first) if step >= 3)
    assert not torch.equal(first[0], Batches(cache, Mix(), seed=4).draw(0, 4, 32))


def test_an_epoch_shows_every_window_once_and_held_out_edits_have_answers(cache: Path) -> None:
    batches = Batches(cache, Mix(raw=1, write=0, edit=0), seed=0)
    count = len(batches.streams["raw"].windows(64))
    drawn = [batches._next("raw", 64) for _ in range(2 * count)]
    assert sorted(drawn[:count]) == sorted(drawn[count:]) == list(range(count))
    assert drawn[:count] != drawn[count:]
    heldout = HeldOut.open(cache, rows=4, length=384, assistant=2, end=3)
    assert heldout.edit_mask.shape == (len(heldout.edit), 384)
    assert 0.1 < float(heldout.edit_mask.float().mean()) < 0.9
    assert np.asarray(heldout.raw).max() < 400
