"""What the files of a checkpoint say beside its shape: tokens, whether there is a chat template, sizes of the weights.
`targets.described` has it of each model. place: a folder, or a GGUF file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoints.checkpoint import tensor_shapes
from slipstream.checkpoints.gguf_header import CONTROL, read_header
from slipstream.errors import reading
from slipstream.tokens.folder_tokenizer import ROLES, content_of, settings_of
from slipstream.tokens.text import tokenizer_of

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2}


@dataclass(frozen=True)
class TokenMap:
    """tokens   id -> token, added tokens included.
    special  ids of special tokens (control tokens, not text).
    roles    "bos", "eos", "pad", ... -> id, or None if the tokenizer has none.
    """

    tokens: Mapping[int, str]
    special: frozenset[int]
    roles: Mapping[str, int | None]


def token_map(place: Path) -> TokenMap | None:
    """None if the checkpoint has no tokenizer. Raises LoadError."""
    if place.is_dir():
        return _tokens_in_folder(place)
    header = read_header(place)
    roles = {role: header.token_id(role) for role in ROLES}
    return TokenMap(header.token_texts, header.tokens_of(CONTROL), roles) if header.has_tokenizer else None


def has_chat_template(place: Path) -> bool:
    if not place.is_dir():
        return bool(read_header(place).templates)
    files = [place / f"chat_template.{kind}" for kind in ("jinja", "json")]
    return any(file.exists() for file in files) or "chat_template" in settings_of(place)


def stored_bytes(place: Path) -> dict[str, int]:
    """Bytes of the weights per dtype, as safetensors names it ("F16"), or type of GGUF. Raises CheckpointError if files
    are missing or damaged."""
    if not place.is_dir():
        return read_header(place).stored
    total: dict[str, int] = {}
    for shape, dtype in tensor_shapes(place).values():
        total[dtype] = total.get(dtype, 0) + math.prod(shape) * _BYTES.get(dtype, 1)
    return total


def _tokens_in_folder(folder: Path) -> TokenMap | None:
    """Read tokenizer.json with the tokenizers library (milliseconds), older files with transformers."""
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").exists():
        older: Any = tokenizer_of(folder)
        if older is None:
            return None
        tokens = {i: token for token, i in older.get_vocab().items()}
        roles = {role: getattr(older, f"{role}_token_id") for role in ROLES}
        return TokenMap(tokens, frozenset(older.all_special_ids), roles)
    with reading(f"{folder / 'tokenizer.json'} cannot be read", "download or export it again"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, names = tokenizer.get_vocab(with_added_tokens=True), settings_of(folder)
    named = {role: content_of(names.get(f"{role}_token")) for role in ROLES}
    return TokenMap(
        tokens={i: token for token, i in ids.items()},
        special=frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special),
        roles={role: None if name is None else ids.get(name) for role, name in named.items()},
    )
