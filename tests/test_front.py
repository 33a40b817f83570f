"""What a stranger sees first: README is short, and the files that a code-hosting platform reads are valid and agree
with the package."""

import re
from pathlib import Path

import pytest
import yaml

from slipstream import __version__

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.*"),
    *(ROOT / "slipstream").rglob("*.md"), ROOT / "benchmarks" / "README.md",
]  # fmt: skip


def section(heading: str) -> str:
    (text,) = re.findall(rf"^## {heading}$(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    return str(text)


def test_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.splitlines()) <= 110
    assert len(README.split()) <= 900
    rows = [line for line in section("How fast").splitlines() if line.startswith("| ")]
    assert len(rows) <= 1 + 8
    assert "wanted" not in README
    assert not re.search(r"\b14(?:\.2)?M\b", README)


def test_every_figure_of_readme_links_to_the_page_that_has_its_numbers() -> None:
    for line in section("How fast").splitlines():
        for page in re.findall(r"\]\((benchmarks/[\w./-]+)\)", line):
            text = (ROOT / page).read_text(encoding="utf-8")
            missing = [each for each in re.findall(r"\d+\.\d+x|\d+ \(\d+ to \d+\)", line) if each not in text]
            assert not missing, page


def test_no_page_installs_slipstream_from_an_index_that_does_not_have_it() -> None:
    from_index = re.compile(
        r"pip install (?:-\S+ )*['\"]?slipstream(?:\[[\w,]+\])?['\"]?(?! @)(?:$|[\s`;])", re.MULTILINE
    )
    assert not {str(page): found for page in PAGES if (found := from_index.findall(page.read_text(encoding="utf-8")))}


def test_the_citation_and_the_hooks_have_the_versions_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    ruff = repository["rev"].removeprefix("v")
    assert f"ruff=={ruff}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_a_form_for_issues_is_valid(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert form["blank_issues_enabled"] is True
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    names = [each["id"] for each in fields]
    assert len(names) == len(set(names))
    assert all(each["attributes"]["label"] for each in fields)
