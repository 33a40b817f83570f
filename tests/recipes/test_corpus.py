from email.message import Message
from pathlib import Path

import pytest

from recipes.embedded.corpus import Package, build_corpus, clean, licence_of, strip_header, wanted


class FakeDistribution:
    def __init__(self, **headers: str | list[str]) -> None:
        self.metadata = Message()
        for name, values in headers.items():
            for value in [values] if isinstance(values, str) else values:
                self.metadata[name.replace("_", "-")] = value


@pytest.mark.parametrize(
    ("headers", "permissive"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"}, True),
        ({"License_Expression": "Apache-2.0 OR GPL-2.0-only"}, True),
        ({"License_Expression": "MIT AND GPL-3.0-or-later"}, False),
        ({"License": "MPL-2.0 AND MIT"}, False),
        ({"License": "Apache 2.0 License"}, True),
        ({"License": "", "Classifier": "License :: OSI Approved :: BSD License"}, True),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"}, False),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "License :: Other/Proprietary License"]}, False),
        ({}, False),
    ],
)
def test_only_permissive_licences(headers: dict[str, str | list[str]], permissive: bool) -> None:
    licence = licence_of(FakeDistribution(**headers))  # type: ignore[arg-type]
    assert (licence is not None) == permissive


def test_cleaning_drops_unwanted_paths_licence_headers_data_and_generated_files_but_no_comments() -> None:
    assert wanted("json/decoder.py")
    for path in ("json/tests/test_x.py", "pip/_vendor/rich/a.py", "test/support.py", "a/test_b.py", "a/conftest.py"):
        assert not wanted(path), path
    assert strip_header("# Copyright 2020 X\n# Licensed under ...\n\nimport os\n") == "import os\n"
    assert strip_header("# A useful remark\nimport os\n").startswith("# A useful")
    code = "".join(f"def f{chr(97 + i)}(x):\n    return x + other\n\n" for i in range(20))
    assert clean(code.encode()) == code.strip("\n") + "\n"
    assert clean(("# Auto-generated, do not edit\n" + code).encode()) is None
    assert clean((code + "x = '" + "a" * 500 + "'\n").encode()) is None
    assert clean(b"x = 1\n") is None
    assert clean("\n".join("1, 2, 3, 4, 5, 6, 7, 8" for _ in range(50)).encode()) is None
    assert clean(b"\xff\xfe" + code.encode()) is None


def make(root: Path, name: str, bodies: list[str]) -> Package:
    files = []
    for i, body in enumerate(bodies):
        path = root / f"{name}{i}.py"
        path.write_text(body)
        files.append((path.name, path))
    return Package(name, "1", "MIT", tuple(files))


def body(tag: str) -> str:
    return "".join(f"def {tag}_{chr(97 + i)}(x):\n    return {tag} + {chr(97 + i)}x\n\n" for i in range(20))


def test_near_duplicates_are_dropped_across_packages(tmp_path: Path) -> None:
    one = make(tmp_path, "one", [body("alpha"), body("beta")])
    two = make(tmp_path, "two", [body("alpha") + "x = 1\n", body("gamma")])
    kept = [(f.package, f.text[:9]) for f in build_corpus([one, two])]
    assert sorted(kept) == [("one", "def alpha"), ("one", "def beta_"), ("two", "def gamma")]


def test_split_is_by_file_and_stable(tmp_path: Path) -> None:
    names = [f"n{chr(97 + i)}{chr(97 + j)}" for i in range(10) for j in range(20)]
    package = make(tmp_path, "p", [body(n) for n in names])
    first = {f.path: f.split for f in build_corpus([package], heldout=0.2)}
    fewer = Package("p", "1", "MIT", package.files[:100])
    again = {f.path: f.split for f in build_corpus([fewer], heldout=0.2)}
    assert len(first) == 200
    assert all(first[path] == split for path, split in again.items())
    assert 0.1 < sum(s == "heldout" for s in first.values()) / 200 < 0.3


def test_package_cap(tmp_path: Path) -> None:
    package = make(tmp_path, "p", [body(n) for n in ("aa", "bb", "cc", "dd")])
    size = len(body("aa"))
    assert len(build_corpus([package], cap_chars=2 * size - 10)) == 2
