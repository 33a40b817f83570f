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
    result = cli("report", result_file, "--png", tmp_path / "png", "--svg", tmp_path / "svg")
    assert result.code == 0, result.err
    assert (tmp_path / "png" / "accepted-histogram.png").stat().st_size > 1000
    assert (tmp_path / "svg" / "accepted-histogram.svg").read_text().startswith("<?xml")


def test_bad_input_is_one_clear_error(cli, result_file, tmp_path):
    found = json.loads(result_file.read_text())
    (tmp_path / "old.json").write_text(json.dumps(found | {"format_version": 0}))
    (tmp_path / "new.json").write_text(json.dumps(found | {"kind": "forecast"}))
    for arguments, said in (
        ([tmp_path / "none.json"], "cannot be read"),
        ([tmp_path / "old.json"], "has format version 0, this Slipstream reads version 1"),
        ([tmp_path / "new.json"], "no page can be made of a result of 'forecast'"),
        ([result_file, "-o", tmp_path / "no" / "x.html"], "does not exist"),
        ([result_file, "--png", result_file], "which is a file"),
        ([result_file, "--svg", tmp_path / "no" / "deep"], "does not exist"),
    ):
        result = cli("report", *arguments)
        assert (result.code, result.out) == (2, "")
        assert said in result.said
        assert result.err.count("error:") == 1
