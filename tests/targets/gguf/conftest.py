"""GGUF files of tiny checkpoints, and what llama.cpp makes of them. Tests are skipped where
llama-cpp-python is not installed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream.targets.describe import as_target
from slipstream.targets.gguf.gguf_target import GgufTarget

FAMILIES = ("llama", "llama-tied-mha", "llama-bias", "llama3.1", "codellama-linear", "qwen2", "qwen3", "gpt2")
"""Of `tests.tiny_checkpoints`, the ones that are converted."""

File = Callable[..., Path]
"""(family, quantisation) -> GGUF file."""


@pytest.fixture(scope="session")
def gguf_file(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> File:
    folder, files = tmp_path_factory.mktemp("gguf"), dict[tuple[str, str], Path]()

    def get(family: str, quantize: str = "f32") -> Path:
        if (family, quantize) not in files:
            file = folder / f"{family}-{quantize}.gguf"
            files[family, quantize] = convert_to_gguf(checkpoint(family), file, quantize).file
        return files[family, quantize]

    return get


@pytest.fixture(scope="session")
def gguf_target(gguf_file: File) -> Callable[[str], GgufTarget]:
    """Family -> target in float32, loaded once."""
    targets: dict[str, GgufTarget] = {}

    def get(family: str) -> GgufTarget:
        if family not in targets:
            targets[family] = as_target(gguf_file(family), executor="llamacpp", threads=1, kv_tokens=1024)
        return targets[family]

    return get
