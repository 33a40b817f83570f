"""Fixtures of a tiny training set-up: generated packages, a two-layer model, a run of a few steps."""

from pathlib import Path

import pytest

from recipes.embedded.compact import ModelShape
from recipes.embedded.corpus import Package
from recipes.embedded.trainer import BaseConfig

SHAPE = ModelShape(
    vocab_size=400, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=128,
)  # fmt: skip


def function(i: int, j: int) -> str:
    return (
        f"def compute_{i}_{j}(value_{j}, other):\n"
        f'    """Return the sum of value number {i} and the other one, times {j}."""\n'
        f"    first_{j} = value_{j} + {i}\n"
        f"    second = first_{j} * other\n"
        f"    if second > {i * j}:\n"
        f'        return "large {i}"\n'
        f"    return second\n"
    )


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Package]:
    """Two packages of generated files, no two of which are near-duplicates."""
    root = tmp_path_factory.mktemp("packages")
    written = []
    for name in ("alpha", "beta"):
        files = []
        for i in range(40):
            path = root / f"{name}_{i}.py"
            number = i + 100 * (name == "beta")
            path.write_text("\n\n".join(function(number, j) for j in range(1, 9)))
            files.append((path.name, path))
        written.append(Package(name, "1.0", "MIT", tuple(files)))
    return written


def tiny_run(out: Path, data: Path | None = None) -> BaseConfig:
    """Return the configuration of a run that trains a target in 12 steps of 256 tokens, in float32, eager, on one
    thread."""
    return BaseConfig(
        out=out, data=data, shape=SHAPE, budget_tokens=12 * 256, length=64, long_length=128, step_tokens=256,
        micro_tokens=128, warmup_steps=2, bf16=False, compile=False, threads=1, eval_steps=6, eval_rows=4,
    )  # fmt: skip


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of tokenised data, which the first run writes."""
    return tmp_path_factory.mktemp("tokens") / "data"


@pytest.fixture
def tiny(tmp_path: Path, token_cache: Path) -> BaseConfig:
    return tiny_run(tmp_path / "run", token_cache)
