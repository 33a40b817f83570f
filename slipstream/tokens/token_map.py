"""`TokenMap` has the token of each id of a checkpoint. It is read without transformers' tokenizer if possible."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.checkpoints.checkpoint import Checkpoint, read_once
from slipstream.tokens.folder_tokenizer import ROLES, backend_in, content_of, settings_of
from slipstream.tokens.text import tokenizer_of


@dataclass(frozen=True)
class TokenMap:
    """tokens   tokens by id, including added tokens.
    special  ids of special tokens, which control the model and are not text.
    roles    ids by role ("bos", "eos", "pad", ...); None if the tokenizer has no such token.
    """

    tokens: Mapping[int, str]
    special: frozenset[int]
    roles: Mapping[str, int | None]


@read_once
def token_map(checkpoint: Checkpoint) -> TokenMap | None:
    """Return the token map of a checkpoint; None if the checkpoint has no tokenizer. Raises LoadError."""
    if checkpoint.is_gguf:
        from slipstream.checkpoints.gguf_header import CONTROL

        header = checkpoint.header
        roles = {role: header.token_id(role) for role in ROLES}
        return TokenMap(header.token_texts, header.tokens_of(CONTROL), roles) if header.has_tokenizer else None
    backend = backend_in(checkpoint)
    if backend is None:  # an older tokenizer
        older: Any = tokenizer_of(checkpoint)
        if older is None:
            return None
        tokens = {i: token for token, i in older.get_vocab().items()}
        roles = {role: getattr(older, f"{role}_token_id") for role in ROLES}
        return TokenMap(tokens, frozenset(older.all_special_ids), roles)
    ids, settings = backend.get_vocab(with_added_tokens=True), settings_of(checkpoint)
    named = {role: content_of(settings.get(f"{role}_token")) for role in ROLES}
    return TokenMap(
        tokens={i: token for token, i in ids.items()},
        special=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
        roles={role: None if name is None else ids.get(name) for role, name in named.items()},
    )


def has_chat_template(checkpoint: Checkpoint) -> bool:
    if checkpoint.is_gguf:
        return bool(checkpoint.header.templates)
    files = [checkpoint.place / f"chat_template.{kind}" for kind in ("jinja", "json")]
    return any(file.exists() for file in files) or "chat_template" in settings_of(checkpoint)
