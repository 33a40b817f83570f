"""The planted faults of `tests/mutants` fit the code, and the script that plants them does so."""

import subprocess
import sys

import pytest

from tests.mutants.__main__ import ROOT, source
from tests.mutants.planted import MUTANTS


def test_there_are_forty_of_them_in_each_part_of_the_loop() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    parts = ("warp", "rules", "step", "stop", "dice", "draft", "chains", "engine")
    assert {mutant.module.split(".")[-1] for mutant in MUTANTS} >= set(parts)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_fits_the_code(mutant) -> None:
    text = source(mutant).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.module, "exec")
    assert all((ROOT / "tests" / name).exists() for name in mutant.tests)


def test_a_planted_fault_is_what_the_command_runs() -> None:
    """A test fails that passes without it: it is one of those of `tests/core/test_warp.py`."""
    test = "tests/core/test_warp.py::test_ties_in_top_k_go_to_the_smaller_ids"
    pytest_of_it = ["-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    command = [sys.executable, "-m", "tests.mutants", "top-k keeps one more", "--run", "--", *pytest_of_it]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, f"FAILED {test}" in done.stdout) == (1, True), done.stdout + done.stderr
