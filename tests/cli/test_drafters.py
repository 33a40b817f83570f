"""`slipstream drafters`: the table that is read from the code."""

import json
import re

import pytest

from slipstream.cli.drafters import defaults, meanings, summary
from slipstream.drafters.draft_plan import find_options
from slipstream.drafters.ngram import NgramConfig
from slipstream.drafters.registry import DRAFTERS, limit_chosen
from slipstream.settings import RULES


def test_lists_every_registered_drafter_with_what_it_needs(cli):
    rows = json.loads(cli("drafters", "--json").out)
    assert set(rows) == set(DRAFTERS)
    assert all(row["is"] and row["needs"] for row in rows.values())
    assert rows["eagle3"]["needs"] == "a trained head"


def test_shows_the_draft_lengths_that_are_in_force(cli):
    """Those of the banner of `generate`, and the one that `tune`, `verify` and `trace` fix."""
    rows = json.loads(cli("drafters", "--json").out)
    assert (rows["suffix"]["length"], rows["suffix"]["longest"]) == (10, limit_chosen("suffix")) == (10, 16)
    assert re.search(r"\n suffix +nothing +up to 16 ", cli("drafters").out)
    assert "up to 16; 10 if a command needs a number" in cli("drafters", "suffix").out
    assert "up to 0" not in cli("drafters").out + cli("drafters", "none").out


def test_shows_the_options_that_the_drafter_accepts(cli):
    options = json.loads(cli("drafters", "ngram", "--json").out)
    assert NgramConfig(**options) == NgramConfig()
    assert "max_ngram" in cli("drafters", "ngram").out


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_option_of_a_drafter_is_shown_with_its_default_and_meaning(cli, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")
    result = cli("drafters", name, code=0)
    known = defaults(find_options(name))
    rows = [line.split(maxsplit=1) for line in result.out.splitlines()]
    shown = {row[0]: row[1].strip() for row in rows if len(row) == 2 and row[0] in known}
    assert shown.keys() == known.keys()
    assert all(text != repr(known[option]) for option, text in shown.items())


@pytest.mark.parametrize("name", DRAFTERS)
def test_help_on_drafters_names_no_classes_and_modules(name):
    config = find_options(name)
    said = " ".join([summary(name), *({} if config is None else meanings(config)).values()])
    quoted = set(re.findall(r"`(\w[^`]*)`", said))
    assert quoted <= {*defaults(config), *DRAFTERS, *RULES}
    assert set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", said)) <= {"LayerSkip"}


def test_drafters_are_not_described_alike():
    assert len({summary(name) for name in DRAFTERS}) == len(DRAFTERS)
