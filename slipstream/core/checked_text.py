"""`check_text`: refuses text that no tokenizer reads."""

from __future__ import annotations

from slipstream.errors import ParameterError, RequestError


def check_text(name: str, text: str, error: type[RequestError] = ParameterError) -> None:
    """Raise `error` for text with halves of surrogate pairs; as such Python reads bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        at = fault.start
        byte = ord(text[at]) - 0xDC00
        found = f"half of a surrogate pair, {text[at]!r}," if byte not in range(0x80, 0x100) else f"byte {byte:#x}"
        raise error(
            f"{name} is no UTF-8 text: it has {found} at character {at}", why="no tokenizer reads it", fix="give UTF-8"
        ) from fault
