"""A stand-in of vLLM's environment."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FAKE = Path(__file__).parent / "fake_vllm.py"


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Path]:
    """A Python of an environment with that version of vLLM, whose server is the stand-in."""

    def interpreter(mode: str = "serves", version: str = "0.32.0") -> Path:
        script = tmp_path / f"python-{mode}"
        script.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit; fi\nshift 2\n'
            f'exec {sys.executable} {FAKE} {mode} "$@"\n'
        )
        script.chmod(0o755)
        return script

    return interpreter
