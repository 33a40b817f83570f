"""Result files: written completely or not at all, refused if of another version, kept after an interruption; data are
dataclasses before and after."""

import json
import os
from pathlib import Path

import pytest

from slipstream.cli.report import make_section
from slipstream.errors import ResultError
from slipstream.measure.results import (
    Result,
    check_writable,
    from_json,
    read,
    read_all,
    record,
    to_json,
    write,
)  # fmt: skip
from slipstream.measure.tables import Estimate

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results"


def result() -> Result:
    return Result("bench", {"tokens": 4}, {"date": "2026-11-21"}, {"arms": [1]}, ["a warning"], complete=True)


def test_what_is_written_is_read(tmp_path):
    write(result(), tmp_path / "a.json")
    assert read(tmp_path / "a.json") == result()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]  # nothing temporary stays


def test_numbers_that_json_cannot_represent_become_null(tmp_path):
    write(Result("bench", {}, {}, {"a": [float("nan"), float("inf"), 1.5]}), tmp_path / "a.json")
    assert read(tmp_path / "a.json").data == {"a": [None, None, 1.5]}


def test_measurements_are_the_same_after_they_were_written_and_read(bench_result, grid_result, trace_result):
    for result in (bench_result, grid_result, trace_result):
        content = json.loads(json.dumps(to_json(result.data), allow_nan=False))
        assert Result("", {}, {}, content).read_data(type(result.data)) == result.data


def test_what_has_no_form_in_json_is_refused_and_a_missing_field_is_named():
    with pytest.raises(TypeError, match="a object cannot be written as JSON"):
        to_json({"a": object()})
    with pytest.raises(KeyError, match="high"):
        from_json(Estimate, {"value": 1.0, "low": 0.5})
    with pytest.raises(TypeError, match="Estimate must be a JSON object"):
        from_json(list[Estimate], [1.0])
    assert from_json(Estimate, {"value": 1.0, "low": 0.5, "high": 2.0, "from a later version": 1}).note == ""


@pytest.mark.parametrize("name", ["drafters", "serve", "serve-vllm"])
def test_recorded_files_stay_readable(name):
    """Also of earlier versions, which lack fields."""
    for result in read_all(RECORDED / f"{name}.json"):
        assert make_section(result).tables[0].texts()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"), ("[]", "not a result file"), ('{"format": "other"}', "not a result file"),
        ('{"format": "slipstream-lab", "format_version": 2, "kind": "bench"}', "lacks the fields settings, provenance"),
    ],
)  # fmt: skip
def test_an_invalid_result_is_refused(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ResultError, match=said):
        read(tmp_path / "a.json")


def test_an_unwritable_place_is_refused_before_anything_runs(tmp_path):
    ran = []
    with pytest.raises(ResultError, match="does not exist"), record(result(), tmp_path / "no" / "a.json", dict):
        ran.append(1)
    assert not ran
    with pytest.raises(ResultError, match="is a folder"):
        check_writable(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ResultError, match="cannot be written to"):
        check_writable(tmp_path / "a.json")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_what_was_measured_survives_an_interruption(tmp_path, fault):
    seen: list[int] = []
    result = Result("bench", {}, {})

    def measure() -> None:
        with record(result, tmp_path / "a.json", lambda: {"arms": list(seen)}) as save:
            seen.append(1)
            save()
            assert not read(tmp_path / "a.json").complete
            seen.append(2)
            raise fault

    with pytest.raises(fault):
        measure()
    kept = read(tmp_path / "a.json")
    assert (kept.data, kept.complete) == ({"arms": [1, 2]}, False)


def test_a_finished_run_is_marked_complete(tmp_path):
    with record(Result("bench", {}, {}), tmp_path / "a.json", lambda: {"x": 1}):
        pass
    assert read(tmp_path / "a.json").complete
    result = Result("bench", {}, {})
    with record(result, None, lambda: {"x": 2}):
        pass
    assert (result.data, result.complete) == ({"x": 2}, True)
