"""Each command imports what it uses: importing torch takes longer than everything else that a short text needs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.loading import uncollected

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "jinja2",
    "numba",
    "matplotlib",
    "fastapi",
    "uvicorn",
    "prometheus_client",
)


def imported(*arguments: str) -> tuple[int, set[str]]:
    """Exit code of a command in a process of its own, and which of HEAVY it has imported."""
    code = f"""
import json, sys
from slipstream.cli.main import main
try:
    main({arguments!r})
except SystemExit as left:
    print("\\n" + json.dumps([left.code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    left, found = json.loads(done.stdout.splitlines()[-1])
    return left, set(found)


@pytest.mark.parametrize(
    "line",
    [
        "--version",
        "--help",
        "generate --help",
        "bench --help",
        "train --help",
        "simulate --help",
        "drafters",
        "serve --help",
    ],
)
def test_help_and_lists_import_nothing_heavy(line):
    assert imported(*line.split()) == (0, set())


@pytest.mark.parametrize(
    "line",
    [
        "generate", "generate x --tpo-k 2", "generate x --top-p 2", "generate x --dtype int4",
        "generate x --rule exact",
        "generate x --executor openvino", "generate x --quantize int4", "generate x --kv-dtype int8",
        "generate x --threads 0", "generate x --drafter sufix", "generate x --draft-quantize int4",
        "generate x --draft-tokens -1", "generate x -o wrong", "chat --temperature -1", "verify --drafter sufix",
        "bench nowhere.jsonl", "bench --temperature cold", "bench --batch 1,x", "bench --context x",
        "sweep --draft-tokens x", "sweep --option x", "sweep --temperature x", "trace --number 999",
        "doctor nowhere.jsonl", "report nowhere", "serve --port 70000", "serve --max-batch 0", "serve --drafter sufix",
    ],
)  # fmt: skip
def test_mistakes_in_the_options_are_reported_before_anything_heavy_is_imported(line):
    assert imported(*line.split()) == (2, set())


def test_generating_imports_neither_transformers_nor_what_plots_need():
    code, found = imported("generate", "def f(", "--max-tokens", "2")
    assert code == 0
    assert found == {"torch", "numpy", "tokenizers", "numba"}


def test_a_chat_template_needs_no_transformers():
    code, found = imported("generate", "--chat", "def f(", "--max-tokens", "2")
    assert code == 0
    assert found == {"torch", "numpy", "tokenizers", "numba", "jinja2"}


@pytest.mark.parametrize("fault", [None, ValueError])
def test_garbage_is_not_collected_while_loading_and_is_again_afterwards(fault: Any) -> None:
    def load() -> None:
        with uncollected():
            assert not gc.isenabled()
            if fault:
                raise fault

    if fault:
        with pytest.raises(fault):
            load()
    else:
        load()
    assert gc.isenabled()


def test_only_what_the_first_load_imported_is_left_out_of_collections() -> None:
    code = """
import gc
from slipstream.cli.loading import uncollected
with uncollected():
    first = [[] for _ in range(1000)]
count = gc.get_freeze_count()
assert count >= 1000
with uncollected():
    second = [[] for _ in range(1000)]
assert gc.get_freeze_count() <= count
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=Path(__file__).parents[2])
