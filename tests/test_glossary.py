"""docs/glossary.md defines each term once and every reported figure; its computed figures agree with the code."""

import re
from pathlib import Path

from slipstream.core.stats import SpecStats

TEXT = (Path(__file__).parent.parent / "docs" / "glossary.md").read_text(encoding="utf-8")

TABLES = re.findall(r"\| term \| definition \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT)


def test_each_term_is_defined_once_in_alphabetical_order_and_so_is_every_reported_figure():
    tables = [[line.split(" | ")[0].strip("| ").replace("`", "").lower() for line in t.splitlines()] for t in TABLES]
    assert len(tables) == len(re.findall(r"^\| term ", TEXT, re.MULTILINE)) >= 7
    terms = [term for table in tables for term in table]
    assert len(terms) == len(set(terms))
    assert all(table == sorted(table) for table in tables)
    named = {"tokens_per_second": "tokens/s"}
    for name in SpecStats().as_dict():
        assert named.get(name, f"`{name}`") in TEXT, name
    for term in ("speed-up", "break-even", "TTFT", "TPOT", "Draft tokens after a stop", "bonus token"):
        assert term in TEXT
