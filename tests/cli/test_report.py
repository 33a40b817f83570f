"""`slipstream report`."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def result_file(cli, pair, tmp_path):
    path = tmp_path / "t.json"
    assert cli("trace", "def add", *pair, "--drafter", "ngram", "-n", "12", "--out", path).code == 0
    return path


def test_one_page_of_several_results(cli, result_file, tmp_path):
    result = cli("report", result_file, result_file, "-o", tmp_path / "out.html")
    assert result.code == 0, result.err
    text = (tmp_path / "out.html").read_text()
    assert text.count("<h1") == 2
    assert 'aria-label="Contents"' in text
    assert f"wrote {tmp_path / 'out.html'}" in result.said


def test_plots_for_papers(cli, result_file, tmp_path):
    result = cli("report", result_file, "--svg", tmp_path / "svg")
    assert result.code == 0, result.err
    assert (tmp_path / "svg" / "accepted-histogram.svg").read_text().startswith("<?xml")


def test_a_folder_that_does_not_exist_is_refused(cli, result_file, tmp_path):
    result = cli("report", result_file, "--svg", tmp_path / "no" / "deep")
    assert (result.code, result.out) == (2, "")
    assert "does not exist" in result.said


def test_a_file_with_several_runs_of_a_benchmark_is_one_page(cli, result_file, tmp_path):
    run, several = json.loads(result_file.read_text()), tmp_path / "several.json"
    several.write_text(json.dumps({"figures": [], "runs": {"one": run, "two": run}}))
    result = cli("report", several, "-o", tmp_path / "out.html")
    assert result.code == 0, result.err
    assert (tmp_path / "out.html").read_text().count("<h1") == 2
    several.write_text(json.dumps({"runs": {"one": run, "two": {}}}))
    assert "run 'two', is not a result file" in cli("report", several).said
