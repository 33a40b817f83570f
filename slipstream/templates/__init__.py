"""Texts that are printed or written as they stand, and pages of Jinja that are filled with values."""

from pathlib import Path

FOLDER = Path(__file__).parent


def fill(template: str, **values: object) -> str:
    """The page of that file name. Values are escaped in HTML; one that a page names and is not given is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    pages = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=select_autoescape(), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return pages.get_template(template).render(values)
