"""Tables in Markdown, with the same text in each cell as in a terminal."""

from collections.abc import Collection, Iterable, Sequence as Seq

from slipstream.measure.tables import Table


def render_markdown(table: Table) -> str:
    """Render a table in Markdown. A cell of several lines becomes one line."""
    left = [i for i, column in enumerate(table.columns) if column.words]
    cells = [[text.replace("\n", ", ") for text in row] for row in table.texts()]
    return render_markdown_rows([column.heading for column in table.columns], cells, left)


def render_markdown_rows(heads: Seq[str], body: Iterable[Seq[object]], left: Collection[int] = (0,)) -> str:
    """Render cells as a table in Markdown. left: columns that are aligned left; other columns contain numbers."""
    lines = [list(heads), ["---" if i in left else "---:" for i in range(len(heads))], *body]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
