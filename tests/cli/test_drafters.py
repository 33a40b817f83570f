"""`slipstream drafters`: the table that is read from the code."""

from __future__ import annotations

import json

from slipstream.drafters.registry import DRAFTERS


def test_lists_every_registered_drafter_with_what_it_needs(cli):
    rows = json.loads(cli("drafters", "--json").out)
    assert set(rows) == set(DRAFTERS)
    assert all(row["is"] and row["needs"] for row in rows.values())
    assert rows["eagle3"]["needs"] == "a trained head"


def test_the_table_names_every_drafter(cli):
    said = cli("drafters").out
    assert all(f"\n {name} " in said for name in DRAFTERS)


def test_shows_the_options_that_the_drafter_accepts(cli):
    from slipstream.drafters.ngram import NgramConfig

    options = json.loads(cli("drafters", "ngram", "--json").out)
    assert NgramConfig(**options) == NgramConfig()
    assert "max_ngram" in cli("drafters", "ngram").out


def test_every_drafters_options_can_be_shown(cli):
    for name in DRAFTERS:
        assert cli("drafters", name).code == 0
