"""The tokenizer of a checkpoint as metadata of a GGUF file.

llama.cpp knows two kinds that our families have: byte-level BPE ("gpt2"), and BPE of characters that falls back to
bytes ("llama"). How texts are split into words it knows by name only, so its own programs may encode a text
differently. Slipstream reads tokenizer.json, which is in the file, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.models.gguf_shape import ENDS
from slipstream.models.gguf_tokenizer import WHOLE
from slipstream.models.text import tokenizer_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""

_WORDS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "qwen2",
}
"""Pattern that splits texts into words -> llama.cpp's name for it."""

GPT2 = "gpt-2"


@dataclass(frozen=True)
class Words:
    """tokenizer: as `tokenizer_of` gives it. kind: "gpt2" or "llama". texts, types: of every id. merges, scores: of
    the BPE, what the kind needs. words: llama.cpp's name of how texts are split; known: whether that is exact."""

    tokenizer: Any
    kind: str
    text: str
    texts: Seq[str]
    types: Seq[int]
    merges: Seq[str]
    scores: Seq[float]
    words: str
    known: bool


def words_of(source: str | Path, rows: int) -> Words | None:
    """The tokenizer of a folder or hub id, for a model with an embedding of so many rows; None if it has none. Raises
    LoadError, and UnsupportedModelError for a kind that llama.cpp does not have."""
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = "{}" if backend is None else backend.to_str()
    found = json.loads(text)
    model: dict[str, Any] = found.get("model") or {}
    parts = [part.get("type") for key in ("pre_tokenizer", "decoder") for part in _parts(found.get(key))]
    if model.get("type") != "BPE" or not ("ByteLevel" in parts or model.get("byte_fallback")):
        raise UnsupportedModelError(
            f"the tokenizer of {str(source)!r} is of the kind {model.get('type')!r}",
            why="llama.cpp's kinds that are written here are byte-level BPE, and BPE that falls back to bytes",
            fix="convert the model with llama.cpp's own script",
        )
    texts, types = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for token, i in model["vocab"].items():
        if i < rows:
            texts[i], types[i] = token, NORMAL
    for added in found.get("added_tokens") or []:
        if added["id"] < rows:
            texts[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if "ByteLevel" in parts:
        words = _split(found.get("pre_tokenizer"))
        return Words(tokenizer, "gpt2", text, texts, types, merges, (), words or GPT2, words is not None)
    ranks = {"".join(pair.split(" ")): -float(rank) for rank, pair in reversed(list(enumerate(merges)))}
    for i, token in enumerate(texts):
        if len(token) == 6 and token.startswith("<0x") and types[i] == NORMAL:
            types[i] = BYTE
    if (unknown := model.get("unk_token")) in texts:
        types[texts.index(unknown)] = UNKNOWN
    scores = [ranks.get(token, -1e6 if len(token) > 1 else 0.0) for token in texts]
    return Words(tokenizer, "llama", text, texts, types, (), scores, "default", True)


def add_words(writer: Any, words: Words, eos_ids: Seq[int]) -> None:
    """Write the metadata. writer: of the package gguf. eos_ids: that end a text; the first three have a place."""
    of = words.tokenizer
    writer.add_tokenizer_model(words.kind)
    writer.add_tokenizer_pre(words.words)
    writer.add_token_list(list(words.texts))
    writer.add_token_types(list(words.types))
    if words.merges:
        writer.add_token_merges(list(words.merges))
    if words.scores:
        writer.add_token_scores(list(words.scores))
    ids = of.encode("a")
    writer.add_add_bos_token(bool(ids) and ids[0] == of.bos_token_id)
    if words.kind == "llama":
        first = next((i for i in ids if i != of.bos_token_id), ids[0])
        writer.add_add_space_prefix(words.texts[first].startswith("▁"))
    named = {"bos": of.bos_token_id, "pad": of.pad_token_id, "unk": of.unk_token_id}
    named |= dict(zip(("eos", "eot", "eom"), eos_ids, strict=False))
    for role, i in named.items():
        if i is not None and i < len(words.texts):
            getattr(writer, f"add_{role}_token_id")(i)
    template = of.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)
    writer.add_string(WHOLE, words.text)
    writer.add_string(ENDS, " ".join(map(str, eos_ids)) or "none")


def _parts(found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A pre-tokenizer or decoder, or those in a sequence."""
    if not found:
        return []
    inside = found.get("pretokenizers") or found.get("decoders")
    return inside or [found]


def _split(found: dict[str, Any] | None) -> str | None:
    """llama.cpp's name for how a byte-level tokenizer splits texts into words; None if it has none."""
    parts = _parts(found)
    if [part["type"] for part in parts] == ["ByteLevel"] and parts[0].get("use_regex", True):
        return GPT2 if not parts[0].get("add_prefix_space") else None
    if [part["type"] for part in parts] == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        return _WORDS.get(parts[0]["pattern"].get("Regex", ""))
    return None
