"""Stored results."""

import json
from pathlib import Path

import pytest

from slipstream.measure.provenance import ROOT, public_values

FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_result_names_no_folder_of_the_machine(file: Path) -> None:
    result = json.loads(file.read_text())
    assert public_values(result) == result
