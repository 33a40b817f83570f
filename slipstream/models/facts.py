"""Facts about a checkpoint that do not need its weights: shape, sizes, tokenizer. `targets.described` has those of each
model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.errors import CheckpointError, LoadError
from slipstream.models.checkpoint import tensor_shapes
from slipstream.models.folder_tokenizer import ROLES, content_of, settings_of
from slipstream.models.gguf_header import CONTROL, GgufHeader, read_header
from slipstream.models.module_shape import ModelShape
from slipstream.models.text import tokenizer_of

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


@dataclass(frozen=True)
class ModelFacts:
    """Of a model in a folder. checkpoint: the requested folder, hub id or GGUF file. folder: of its small files, or the
    GGUF file."""

    checkpoint: str
    folder: Path
    config: ModelShape

    @cached_property
    def tokenizer(self) -> TokenMap | None:
        """None if the checkpoint has none. Raises LoadError."""
        return _tokens_in_folder(self.folder)

    @property
    def chat_template(self) -> bool:
        files = [self.folder / f"chat_template.{kind}" for kind in ("jinja", "json")]
        return any(file.exists() for file in files) or "chat_template" in settings_of(self.folder)

    @cached_property
    def parameters(self) -> int:
        """Number of weights; a tied head is counted once."""
        return sum(math.prod(shape) for shape in self.config.shapes().values())

    @cached_property
    def active_parameters(self) -> int:
        """Number of weights used for one token: of each mixture, only the experts that the router picks."""
        experts = self.config.experts
        idle = 1 - experts.per_token / experts.count if experts else 0.0
        mixed = sum(math.prod(s) for name, s in self.config.shapes().items() if ".mlp.experts." in name)
        return round(self.parameters - idle * mixed)

    @cached_property
    def step_parameters(self) -> int:
        """Number of weights that one decode step reads: the active ones without an untied input embedding, of which a
        step reads one row, and without an encoder, which runs once."""
        shapes = self.config.shapes()
        looked_up = ["embed_positions.weight", *([] if self.config.tie_embeddings else ["embed_tokens.weight"])]
        if self.config.source_context is not None:
            looked_up += [name for name in shapes if "encoder." in name]
        return self.active_parameters - sum(math.prod(shapes[name]) for name in looked_up if name in shapes)

    @property
    def stored(self) -> dict[str, int] | None:
        """Bytes of the weight files per dtype, as safetensors names it ("F16"); None for a hub id whose weights are not
        downloaded. Raises CheckpointError if files of a folder are missing or damaged."""
        try:
            return self._stored
        except CheckpointError:
            if Path(self.checkpoint).expanduser().is_dir():
                raise
            return None

    @cached_property
    def _stored(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for shape, dtype in tensor_shapes(self.folder).values():
            total[dtype] = total.get(dtype, 0) + math.prod(shape) * _BYTES.get(dtype, 1)
        return total

    def kv_bytes(self, itemsize: int = 4) -> int:
        """Bytes of KV cache per token of context, with `itemsize` bytes per number."""
        return 2 * self.config.kv_width * itemsize


@dataclass(frozen=True)
class GgufFacts(ModelFacts):
    """Of a model in a GGUF file."""

    @property
    def header(self) -> GgufHeader:
        return read_header(self.folder)

    @cached_property
    def tokenizer(self) -> TokenMap | None:
        header = self.header
        roles = {role: header.token_id(role) for role in ROLES}
        return TokenMap(header.token_texts, header.tokens_of(CONTROL), roles) if header.has_tokenizer else None

    @property
    def chat_template(self) -> bool:
        return "tokenizer.chat_template" in self.header.metadata

    @property
    def stored(self) -> dict[str, int]:
        return self.header.stored


def facts_of(checkpoint: str | Path, place: Path, config: ModelShape) -> ModelFacts:
    """place: the folder of the small files, or a GGUF file."""
    return (ModelFacts if place.is_dir() else GgufFacts)(str(checkpoint), place, config)


def _tokens_in_folder(folder: Path) -> TokenMap | None:
    """Read tokenizer.json with the tokenizers library (milliseconds), older files with transformers."""
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").exists():
        older = tokenizer_of(folder)
        if older is None:
            return None
        tokens = {i: token for token, i in older.get_vocab().items()}
        roles = {role: getattr(older, f"{role}_token_id") for role in ROLES}
        return TokenMap(tokens, frozenset(older.all_special_ids), roles)
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as fault:  # the library raises bare Exception
        raise LoadError(
            f"{folder / 'tokenizer.json'} cannot be read: {fault}",
            why="without it text cannot be tokenized",
            fix="download or export it again",
        ) from fault
    ids, names = tokenizer.get_vocab(with_added_tokens=True), settings_of(folder)
    named = {role: content_of(names.get(f"{role}_token")) for role in ROLES}
    return TokenMap(
        tokens={i: token for token, i in ids.items()},
        special=frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special),
        roles={role: None if name is None else ids.get(name) for role, name in named.items()},
    )
