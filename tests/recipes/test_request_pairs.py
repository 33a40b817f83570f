import ast
import random

import pytest

from recipes.embedded.corpus import SourceFile
from recipes.embedded.request_pairs import EDITS, functions, make_pairs, parses

TEXT = '''
import os


class Store:
    def load(self, path, default=None):
        """Load the entry at a path, or the default when it is missing."""
        limit = 40
        entry = self.entries.get(path, "missing")
        if len(entry) > limit:
            entry = entry[:limit]
        return entry or default


def total(values, start=0):
    """Add up the values, beginning with the start value."""
    result = start
    for value in values:
        result += value * 3
        print("adding up", value)
    return result
'''


def test_functions_are_dedented_and_parse() -> None:
    sources = functions(TEXT)
    assert sorted(node.name for _, node in sources) == ["load", "total"]
    assert all(source.startswith("def ") and parses(source) for source, _ in sources)
    assert functions("def broken(:\n") == []


@pytest.mark.parametrize("kind", list(EDITS))
@pytest.mark.parametrize("seed", range(6))
def test_every_edit_changes_only_what_it_requests(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    for source, node in functions(TEXT):
        edit = EDITS[kind](rng, source, node)
        if edit is None:
            continue
        ask, after = edit
        before_lines, after_lines = source.split("\n"), after.split("\n")
        if kind == "comment":
            assert after_lines[1:] == before_lines
            assert after_lines[0].startswith("# ")
            assert after_lines[0] in ask
        elif kind == "delete":
            gone = [row for row in before_lines if row not in after_lines]
            assert len(gone) == 1
            assert gone[0].strip() in ask
            assert len(after_lines) == len(before_lines) - 1
        else:
            assert len(after_lines) == len(before_lines)
            changed = [(a, b) for a, b in zip(before_lines, after_lines, strict=True) if a != b]
            assert changed
            if kind in ("number", "string", "hint"):
                assert len(changed) == 1
            if kind == "rename":
                assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(after))


def test_renaming_renames_every_occurrence_consistently() -> None:
    for seed in range(20):
        source, node = next(f for f in functions(TEXT) if f[1].name == "total")
        edit = EDITS["rename"](random.Random(seed), source, node)
        names = lambda text: [n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)]  # noqa: E731
        before, after = names(source), names(edit[1])
        mapping = dict(zip(before, after, strict=True))
        assert [mapping[n] for n in before] == after
        assert sum(a != b for a, b in mapping.items()) <= 1


def test_pairs_are_deterministic_and_contain_their_snippet() -> None:
    many = SourceFile("demo", "1.0", "demo.py", TEXT * 20, "train")
    pairs = list(make_pairs(many, edits_per_function=1.0))
    assert pairs == list(make_pairs(many, edits_per_function=1.0))
    assert {p.kind for p in pairs} >= {"write", "rename"}
    sources = {source for source, _ in functions(TEXT)}
    for pair in pairs:
        assert parses(pair.assistant)
        if pair.kind == "write":
            assert pair.assistant in sources
        else:
            assert any(source in pair.user for source in sources)
            assert pair.assistant not in sources
