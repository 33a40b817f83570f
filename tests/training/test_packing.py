from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import ParameterError
from slipstream.training.packing import Batches, HeldOut, Mix, Stream, answer_mask, prepare, write_stream
from slipstream.zoo.corpus import Package, build_corpus


def stream(tmp_path: Path, lengths: list[int], whole: bool) -> Stream:
    """Documents of the given lengths (their closing 0 not counted); document `i` consists of the id `i + 1`."""
    write_stream(tmp_path / "s.bin", ([i + 1] * n for i, n in enumerate(lengths)), eos=0)
    return Stream.open(tmp_path / "s.bin", whole)


def test_pairs_start_a_window_at_their_first_token(tmp_path: Path) -> None:
    s = stream(tmp_path, [3, 5, 4, 6, 2], whole=True)
    # Documents with EOS start at 0, 4, 10, 15, 22 and end at 25. A window of 8 + 1 tokens takes document 0 and
    # half of document 1, so the next one begins with document 1 again.
    assert s.windows(8).tolist() == [0, 4, 10, 15]
    assert s.rows([0], 8).tolist() == [[1, 1, 1, 0, 2, 2, 2, 2, 2]]


def test_long_document_does_not_stall(tmp_path: Path) -> None:
    assert stream(tmp_path, [30, 5, 4, 9], whole=True).windows(8).tolist() == [0, 31, 37, 42]


def test_files_are_cut_on_a_grid(tmp_path: Path) -> None:
    assert stream(tmp_path, [20, 9], whole=False).windows(8).tolist() == [0, 8, 16]


def test_short_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="too short"):
        stream(tmp_path, [3], whole=False).windows(8)


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


def test_an_epoch_shows_every_window_once(cache: Path) -> None:
    batches = Batches(cache, Mix(raw=1, write=0, edit=0), seed=0)
    count = len(batches.streams["raw"].windows(64))
    drawn = [batches._next("raw", 64) for _ in range(2 * count)]
    assert sorted(drawn[:count]) == sorted(drawn[count:]) == list(range(count))
    assert drawn[:count] != drawn[count:]


def test_held_out_edits_have_answers(cache: Path) -> None:
    held = HeldOut.open(cache, rows=4, length=384, assistant=2, end=3)
    assert held.edit_mask.shape == (len(held.edit), 384)
    assert 0.1 < float(held.edit_mask.float().mean()) < 0.9
    assert np.asarray(held.raw).max() < 400
