"""The wheel holds the package, the embedded models and the licences, and nothing else. `make wheel-check` installs it
into an empty environment and runs it."""

import importlib
import importlib.util
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEGABYTES = 52
"""Size limit of the wheel. The embedded models and heads take 40 MB of it, the head for SmolLM2 10."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the installed build backend, without network access."""
    for name in ("hatchling", "pip"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed, so no wheel can be built (`make install` installs it)")
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("slipstream-*.whl")
    return file


@pytest.fixture(scope="module")
def content(wheel: Path) -> dict[str, bytes]:
    """Path in the wheel -> bytes; weights are left out."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        return {name: b"" if name.endswith(".safetensors") else archive.read(name) for name in names}


def about(content: dict[str, bytes], file: str) -> str:
    """A file of the wheel's metadata folder."""
    (name,) = (name for name in content if name.partition("/")[0].endswith(".dist-info") and name.endswith(f"/{file}"))
    return content[name].decode()


def test_it_holds_only_the_files_of_the_package_embedded_models_heads_and_prompts(content: dict[str, bytes]) -> None:
    """No tests, recipes or benchmarks, and no caches."""
    packed = {name for name in content if not name.partition("/")[0].endswith(".dist-info")}
    here = {path.relative_to(ROOT) for path in (ROOT / "slipstream").rglob("*") if path.is_file()}
    assert packed == {path.as_posix() for path in here if "__pycache__" not in path.parts}
    for name in ("target", "draft", "eagle3", "medusa"):
        for file in ("model.safetensors", "config.json", "README.md"):
            assert f"slipstream/zoo/models/{name}/{file}" in content
    for name in ("target", "draft"):
        assert f"slipstream/zoo/models/{name}/tokenizer.json" in content
    for kind in ("code", "edit"):
        assert f"slipstream/zoo/prompts/{kind}.jsonl" in content


def test_the_wheel_has_licence_notice_and_the_console_command(content: dict[str, bytes]) -> None:
    metadata = Parser().parsestr(about(content, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("License-File") or ()) == {"LICENSE", "NOTICE"}
    for name in ("LICENSE", "NOTICE"):
        assert about(content, f"licenses/{name}") == (ROOT / name).read_text()
    points = ConfigParser()
    points.read_string(about(content, "entry_points.txt"))
    assert dict(points["console_scripts"]) == {"slipstream": "slipstream.__main__:main"}
    module, _, name = points["console_scripts"]["slipstream"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_wheel_is_not_too_large(wheel: Path) -> None:
    assert wheel.stat().st_size < MEGABYTES * 1e6
