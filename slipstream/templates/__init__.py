"""Templates: texts that are printed or written unchanged, and Jinja pages that are filled with values."""

from pathlib import Path

FOLDER = Path(__file__).parent


def fill(template: str, **values: object) -> str:
    """Render the template file `template` with these values, escaped in HTML. A missing value is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    pages = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=select_autoescape(), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return pages.get_template(template).render(values)
