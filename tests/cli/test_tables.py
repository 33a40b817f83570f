"""Tables on narrow terminals: nothing that carries meaning is squeezed out."""

import pytest

from slipstream.cli import render
from slipstream.cli.table_forms import print_table
from slipstream.measure.tables import Column, Estimate, Table, words

COLUMNS = [words("method"), words("setting"), Column("speed-up (95%)", "x"), Column("tok/s"), Column("accept", "%"),
           Column("tau", digits=2), words("text"), Column("memory", "B"), Column("host", "%")]  # fmt: skip
ROWS = [
    [
        method, setting, Estimate(1.2 + i, 1.1, 1.3 + i), 1234 + i, 0.71, 2.0 + i / 10, "identical",
        4e8, 0.11,
    ]
    for setting in ("greedy\nbatch 4\ncontext 1024", "T=0.8\nbatch 4\ncontext 1024")
    for i, method in enumerate(("plain", "model, K=3", "suffix branches=3, K=10"))
]  # fmt: skip
TABLE = Table("Speed", COLUMNS, ROWS, "A note.")


@pytest.fixture
def shown(monkeypatch, capsys):
    def show(table: Table, columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table(table)
        return capsys.readouterr().out.splitlines()

    return show


@pytest.mark.parametrize("columns", [50, 60, 80, 120])
def test_every_cell_is_whole_at_every_width(shown, columns):
    lines = shown(TABLE, columns)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert text.count("A note.") == 1
    for row, cells in zip(ROWS, TABLE.texts(), strict=True):
        assert all(part in text for part in row[1].splitlines())
        assert all(cell in text for cell in [cells[0], *cells[2:]])
    for column in COLUMNS[2:]:
        assert all(word in text for word in column.heading.split())
    assert text.count("identical") == len(ROWS)


def test_a_table_that_fits_is_one_and_a_narrow_terminal_gets_one_for_each_setting(shown):
    assert sum(line.startswith("method") for line in shown(TABLE, 160)) == 1
    lines = [line.strip() for line in shown(TABLE, 60)]
    assert [line for line in lines if line.startswith("Speed")] == [
        "Speed, greedy, batch 4, context 1024",
        "Speed, T=0.8, batch 4, context 1024",
    ]


def test_counts_agree_with_their_noun():
    texts = [render.spell(n, "prompt") for n in (0, 1, 2, 1200)]
    assert texts == ["0 prompts", "1 prompt", "2 prompts", "1,200 prompts"]
