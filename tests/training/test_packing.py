from pathlib import Path

import pytest

from slipstream.errors import ParameterError, TrainingError
from slipstream.training import packing
from slipstream.training.packing import Stream, write_stream


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


def test_a_stream_on_a_full_disk_is_named_and_nothing_of_it_is_left(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError("80 requested and 0 written")  # as numpy says it

    monkeypatch.setattr(packing.np, "save", full)
    with pytest.raises(TrainingError, match=r"token stream .*ids.bin could not be written .*free some space"):
        write_stream(tmp_path / "ids.bin", [[1, 2, 3]], eos=0)
    assert not list(tmp_path.iterdir())
