"""What the README shows runs as it stands (with the embedded models where it says `path/to/...`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_snippets_of_the_readme_run(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.sub(r'"path/to/[\w-]+"', '"embedded"', snippet), {})
    assert capsys.readouterr().out.strip()


def test_the_readme_has_snippets() -> None:
    assert len(SNIPPETS) >= 2
